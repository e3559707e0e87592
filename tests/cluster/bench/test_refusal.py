import json

import pytest

from cluster.bench.refusal import fault

BODY = json.dumps({"error": {"message": "try again", "type": "overloaded", "code": "queue_full"}})
HEADERS = {"x-request-id": "r1", "retry-after": "2", "retry-after-ms": "1500"}


def test_a_refusal_that_says_why_and_when_has_no_fault():
    assert fault(429, HEADERS, BODY) is None
    assert fault(503, HEADERS, BODY) is None


def test_one_that_says_that_waiting_is_no_use_needs_no_time():
    assert fault(429, {"x-request-id": "r1", "x-should-retry": "false"}, BODY) is None


@pytest.mark.parametrize(
    ("status", "headers", "body", "found"),
    [
        (500, HEADERS, BODY, "status 500"),
        (None, {}, "", "status None"),
        (429, HEADERS, "busy", "the body is not an error of the API"),
        (429, HEADERS, "[]", "the body is not an error of the API"),
        (429, HEADERS, BODY.replace("queue_full", ""), "the error has no code"),
        (429, {**HEADERS, "retry-after-ms": "2500"}, BODY, "retry-after 2 s and 2500 ms"),
        (429, {**HEADERS, "retry-after": "soon"}, BODY, "retry-after is not a number"),
        (429, {"x-request-id": "r1", "retry-after": "1"}, BODY, "no retry-after-ms"),
        (429, {"retry-after": "1", "retry-after-ms": "9"}, BODY, "no x-request-id"),
    ],
)
def test_what_a_client_cannot_act_on_is_named(status, headers, body, found):
    assert fault(status, headers, body).startswith(found)
