"""Whatever the published schema allows, and some of what it does not, gets a well-formed answer."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

pytestmark = pytest.mark.cluster

PATHS = [
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_id}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/tailrace/requests"),
    ("get", "/tailrace/explain/{request_id}"),
    ("get", "/tailrace/live"),
]


@pytest.fixture(scope="module")
def schema(cluster):
    return schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")


def test_the_schema_names_every_path(schema):
    published = {(o.method.lower(), o.path) for o in (r.ok() for r in schema.get_all_operations())}
    assert published == set(PATHS)


# What takes no body has nothing that could be wrong.
CASES = [(*where, GenerationMode.POSITIVE) for where in PATHS]
CASES += [(*where, GenerationMode.NEGATIVE) for where in PATHS if where[0] == "post"]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_makes_the_gateway_fail(schema, method, path, mode):
    operation = schema[path][method.upper()]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    def probe(case):
        if isinstance(case.body, dict):
            # Most drawn names are unknown models: send half of the bodies on to a real one.
            if len(str(case.body)) % 2:
                case.body["model"] = "fake"
            if path.startswith("/v1/"):
                case.body.setdefault("max_tokens", 3)
        response = case.call(timeout=600)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"]
        assert response.status_code < 500 or response.status_code == 503, response.text
        if response.status_code == 503:
            assert "retry-after" in {name.lower() for name in response.headers}

    probe()
