"""OpenAI's own client, and raw HTTP where it cannot be rude enough, against the whole stack."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from serving import Cluster, wait_for

pytestmark = pytest.mark.cluster

CONTEXT_TOKENS = 4096
HELLO = [{"role": "user", "content": "Tell me about rivers."}]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=600, trust_env=False) as http:
        yield http


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


def test_chat(client: OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=20, temperature=0, seed=1
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 20
    assert answer.model == "tiny"
    again = client.chat.completions.create(
        model="small", messages=HELLO, max_completion_tokens=20, temperature=0
    )
    assert again.choices[0].message.content == choice.message.content
    assert again.model == "tiny"
    assert again.system_fingerprint == answer.system_fingerprint
    assert again.id != answer.id


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI):
    asked = {
        "model": "fake",
        "messages": HELLO,
        "max_tokens": 60,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    whole = client.chat.completions.create(**asked)
    texts, tokens, finishes, usage = ["", ""], [[], []], [None, None], None
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.logprobs:
                tokens[choice.index] += [(t.token, t.logprob) for t in choice.logprobs.content]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert tokens == [
        [(t.token, t.logprob) for t in choice.logprobs.content] for choice in whole.choices
    ]
    assert all(len(t.top_logprobs) == 2 for t in whole.choices[0].logprobs.content)
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, tokens))
    assert texts[0] != texts[1]


def test_stop_ends_the_answer_before_the_stop_string(client: OpenAI):
    asked = {"model": "fake", "prompt": "once upon", "max_tokens": 60, "seed": 3}
    free = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    word = free.text[20:23]
    stopped = client.completions.create(
        **asked, stop=[word], extra_body={"ignore_eos": True}
    ).choices[0]
    assert stopped.text == free.text[: free.text.index(word)]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_a_second_turn_reports_its_cached_tokens(client: OpenAI):
    messages = [{"role": "user", "content": "A long question. " * 20}]
    asked = {"model": "fake", "max_tokens": 4, "seed": 1}
    client.chat.completions.create(messages=messages, **asked)
    usage = client.chat.completions.create(messages=messages, **asked).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_several_prompts_and_echo(client: OpenAI):
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], n=2, max_tokens=5, seed=4, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == ["fake", "tiny"]
    tiny = client.models.retrieve("tiny")
    assert (tiny.id, tiny.model_extra["max_model_len"]) == ("tiny", CONTEXT_TOKENS)
    assert client.models.retrieve("small").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("grand")


def test_an_unknown_model_is_named_with_those_there_are(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="grand", messages=HELLO)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    assert "'grand'" in error.value.message
    assert "fake, tiny" in error.value.message


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=[65] * 5000)
    assert error.value.code == "context_length_exceeded"
    assert re.search(r"\b5000\b.*\b4096\b", error.value.message)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=[65] * 4000, max_tokens=200)
    assert error.value.code == "context_length_exceeded"
    assert re.search(r"\b4200\b.*\b4096\b", error.value.message)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_negative_limits_are_refused(http: httpx.Client, field: str):
    body = {"model": "tiny", "messages": HELLO, field: -3}
    error = refused(http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == field
    assert "-3" in error["message"]


def test_malformed_json_is_refused(http: httpx.Client):
    for body in (b'{"model": "tiny", ', b"", b"[1, 2]", b'{"model": "tiny", "messages": "\xff"}'):
        error = refused(http.post("/v1/chat/completions", content=body), 400)
        assert error["type"] == "invalid_request_error"


def test_a_mebibyte_of_garbage_is_refused_and_harms_nobody(http: httpx.Client, client: OpenAI):
    garbage = random.Random(1).randbytes(1 << 20)
    for route in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        refused(http.post(route, content=garbage), 400)
    text = json.dumps({"model": "tiny", "prompt": "x" * (1 << 20)})
    assert refused(http.post("/v1/completions", content=text), 400)["code"] == (
        "context_length_exceeded"
    )
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_a_body_beyond_the_limit_is_refused(http: httpx.Client):
    refused(http.post("/v1/completions", content=b" " * (9 << 20)), 413)


def test_a_client_that_gives_up_leaves_nothing_behind(cluster: Cluster):
    with (
        OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises((openai.APITimeoutError, openai.InternalServerError)),
    ):
        # Slower than the patience: 3,000 tokens one after the other.
        client.completions.create(
            model="tiny", prompt="a", max_tokens=3000, timeout=0.5, extra_body={"ignore_eos": True}
        )
    cluster.settled()


def test_the_gateways_own_deadline_is_a_504(http: httpx.Client):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers={"x-request-timeout-seconds": "0.5"})
    refused(answer, 504)


def test_tokenize_and_back(http: httpx.Client):
    tokens = http.post("/tokenize", json={"model": "tiny", "prompt": "Grüße"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len("Grüße".encode())
    back = http.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "Grüße"}
    chat = http.post("/tokenize", json={"model": "tiny", "messages": HELLO}).json()
    assert chat["count"] > len(HELLO[0]["content"])


def test_request_ids(http: httpx.Client, client: OpenAI):
    own = http.get("/v1/models", headers={"x-request-id": "river-7"})
    assert own.headers["x-request-id"] == "river-7"
    raw = client.completions.with_raw_response.create(model="fake", prompt="a", max_tokens=1)
    given = raw.headers["x-request-id"]
    assert given
    assert raw.headers.get_list("x-request-id") == [given]


def test_routes_that_are_not_there(http: httpx.Client):
    assert refused(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert refused(http.get("/v1/completions"), 405)["code"] == "method_not_allowed"


def test_health(http: httpx.Client):
    answer = http.get("/health").raise_for_status().json()
    assert (answer["status"], answer["models"]) == ("ok", ["fake", "tiny"])


def test_metrics_of_all_pools(cluster: Cluster, http: httpx.Client, client: OpenAI):
    for model in ("fake", "tiny"):
        client.completions.create(model=model, prompt="y" * 200, max_tokens=4)

    wanted = {
        (app, replica)
        for app in ("fake", "tiny")
        for pool in ("Prefill", "Decode")
        for replica in cluster.pids(app, pool)
    }
    found: dict[str, list[Any]] = {}

    def all_there() -> bool:
        """Replicas send their figures every second; those that ended are shown a little longer."""
        found.clear()
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        shown = found.get("vllm:kv_cache_usage_perc", [])
        moved = found.get("tailrace_kv_transfer_bytes_total", [])
        return {(s.labels["model_name"], s.labels["replica"]) for s in shown} == wanted and {
            s.labels["model"] for s in moved
        } == {"fake", "tiny"}

    wait_for(all_there)
    assert all(s.value > 0 for s in found["tailrace_kv_transfer_bytes_total"])
    assert {s.labels["model"] for s in found["tailrace_requests_total"]} >= {"fake", "tiny"}
    roles = {
        (s.labels["model"], s.labels["role"]) for s in found["tailrace_engine_step_seconds_count"]
    }
    assert roles == {(m, r) for m in ("fake", "tiny") for r in ("prefill", "decode")}
