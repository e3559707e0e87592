"""Keys, tenants and limits as clients meet them."""

import asyncio
import time

import pytest

from deployments.gateway.identity.keyring import hash_key, tenant_salt

PATH = "/v1/completions"
KEYS = {"a": "tr-key-a", "b": "tr-key-b", "op": "tr-key-op"}


def config(tenants=None, **more):
    return {
        "keys": [
            {"id": "ka", "sha256": hash_key(KEYS["a"]), "tenant": "a"},
            {"id": "kb", "sha256": hash_key(KEYS["b"]), "tenant": "b", "models": ["other"]},
            {"id": "ko", "sha256": hash_key(KEYS["op"]), "tenant": "ops", "operator": True},
        ],
        "tenants": {"a": {}, "b": {}, "ops": {}, **(tenants or {})},
        **more,
    }


def auth(who):
    return {"authorization": f"Bearer {KEYS[who]}"}


def body(**fields):
    return {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 7, **fields}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/v1/chat/completions"),
        ("post", PATH),
        ("get", "/v1/models"),
        ("get", "/v1/models/tiny"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/tailrace/requests"),
        ("get", "/tailrace/explain/x"),
        ("get", "/tailrace/live"),
    ],
)
async def test_every_door_asks_for_a_key_once_there_are_keys(gateway, method, path):
    gateway.state.apply(config())
    for headers in ({}, {"authorization": "Bearer tr-guess"}):
        answer = await gateway.raw(method.upper(), path, b"{}", headers)
        assert answer.status == 401, path
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "tr-guess" not in answer.body.decode()


async def test_health_and_metrics_need_none(gateway):
    gateway.state.apply(config())
    for path in ("/health", "/metrics", "/dashboard"):
        assert (await gateway.raw("GET", path)).status == 200


async def test_a_key_brings_its_tenants_salt_and_place(gateway):
    gateway.state.apply(config({"a": {"weight": 3, "tiers": ["flex", "batch"]}}))
    answer = await gateway.post(PATH, body(service_tier="priority"), headers=auth("a"))
    assert answer.json()["service_tier"] == "flex"
    place = gateway.backend.places[-1]
    assert (place.tenant, place.weight, place.tier) == ("a", 3, "flex")
    assert gateway.backend.opened[-1][1].salt == tenant_salt("a")


async def test_a_key_sees_and_may_use_its_own_models_only(gateway):
    gateway.state.apply(config())
    gateway.backend.serve("other")
    listed = await gateway.raw("GET", "/v1/models", headers=auth("b"))
    assert [m["id"] for m in listed.json()["data"]] == ["other"]
    refused = await gateway.post(PATH, body(), headers=auth("b"))
    assert refused.status == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert (await gateway.post(PATH, body(model="other"), headers=auth("b"))).status == 200


async def test_a_tenants_limits_narrow_those_of_the_gateway(gateway):
    gateway.state.apply(config({"a": {"max_output_tokens": 5, "max_prompt_tokens": 2, "max_n": 1}}))
    for fields, param in (
        ({"prompt": [1, 2], "max_tokens": 6}, "max_tokens"),
        ({"prompt": [1, 2, 3], "max_tokens": 5}, "prompt"),
        ({"prompt": [1, 2], "max_tokens": 5, "n": 2}, "n"),
    ):
        answer = await gateway.post(PATH, body(**fields), headers=auth("a"))
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert (await gateway.post(PATH, body(), headers=auth("op"))).status == 200


async def test_a_tenants_limits_on_what_a_conversation_carries_narrow_too(gateway):
    own = {"max_conversation_tokens": 90, "max_tool_output_bytes": 4, "max_retrieved_chunks": 2}
    gateway.state.apply(config({"a": own}, limits=dict.fromkeys(own, 200)))
    turn = {"role": "user", "content": "hi"}
    for fields, param in (
        ({"messages": [turn, {"role": "tool", "content": "12345"}]}, "messages[1].content"),
        ({"messages": [turn], "tailrace": {"retrieved": 3}}, "tailrace.retrieved"),
        ({"messages": [turn, {"role": "user", "content": "x" * 80}]}, "messages"),
    ):
        asked = {"model": "tiny", "max_tokens": 5, **fields}
        answer = await gateway.post("/v1/chat/completions", asked, headers=auth("a"))
        assert (answer.status, answer.error["param"]) == (400, param)
        own = await gateway.post("/v1/chat/completions", asked, headers=auth("op"))
        assert own.status == 200


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_tenants_bodies_are_bounded_apart(gateway, path):
    gateway.state.apply(config({"a": {"max_body_bytes": 1024}}))
    big = body(prompt="a b", messages=[{"role": "user", "content": "a b"}], tokens=[1], user=None)
    big["filler"] = "x" * 1100
    if path == "/tokenize":
        del big["messages"]
    refused = await gateway.post(path, big, headers=auth("a"))
    assert (refused.status, refused.error["code"]) == (413, "request_too_large")
    assert "at most 1024 are read" in refused.error["message"]
    assert (await gateway.post(path, big, headers=auth("op"))).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {"prompt": "a"}, 200),
        ("/detokenize", {"tokens": [1]}, 200),
        ("/v1/models", None, 200),
        ("/v1/models/tiny", None, 200),
        ("/v1/models/gone", None, 404),
        ("/tokenize", {"model": "gone", "prompt": "a"}, 404),
        (PATH, {"prompt": 5}, 400),
        (PATH, {"prompt": "a", "model": "gone"}, 404),
        (PATH, {"prompt": "a" * 2000}, 413),
        (PATH, {"prompt": "a", "service_tier": "batch"}, 429),
    ],
)
async def test_how_limits_stand_is_told_with_every_answer(gateway, path, fields, status):
    quota = {"requests_per_minute": 10, "tokens_per_minute": 100}
    step = {"action": "shed", "above": 1e-6}
    tiers = {"default": {}, "batch": {"queue_s": 1, "ladder": [step]}}
    gateway.state.apply(config({"a": quota}, limits={"max_body_bytes": 1024}, tiers=tiers))
    waits, _ = gateway.state.pressures.of("tiny", "batch")
    waits.began(time.monotonic() - 20)

    async def ask(**how):
        if fields is None:
            return await gateway.raw("GET", path, b"", **how)
        return await gateway.post(path, {"model": "tiny", **fields}, **how)

    answer = await ask(headers=auth("a"))
    assert answer.status == status
    # What is refused took nothing, nor do lists; turning text into tokens takes a request.
    left = "9" if path.endswith("tokenize") else "10"
    assert answer.headers["x-ratelimit-remaining-requests"] == left
    assert answer.headers["x-ratelimit-limit-tokens"] == "100"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "100"
    stranger = await ask()
    assert stranger.status == 401
    assert not [name for name in stranger.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_reserved_whole_and_what_was_not_used_comes_back(gateway):
    # The script answers with fewer tokens than were allowed.
    gateway.state.apply(config({"a": {"tokens_per_minute": 100, "requests_per_minute": 50}}))
    first = await gateway.post(PATH, body(max_tokens=90), headers=auth("a"))
    assert first.status == 200
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(100 - 93)
    assert first.headers["x-ratelimit-remaining-requests"] == "49"
    second = await gateway.post(PATH, body(max_tokens=1), headers=auth("a"))
    assert second.headers["x-ratelimit-remaining-tokens"] == str(100 - used - 4)


async def test_a_spent_limit_is_429_with_the_wait_and_another_tenant_is_not_touched(gateway):
    gateway.state.apply(config({"a": {"requests_per_minute": 1}}))
    began = time.monotonic()
    assert (await gateway.post(PATH, body(), headers=auth("a"))).status == 200
    denied = await gateway.post(PATH, body(), headers=auth("a"))
    took_s = time.monotonic() - began
    assert denied.status == 429
    assert denied.json()["error"]["code"] == "rate_limit_exceeded"
    assert "tenant a may take 1 requests a minute" in denied.json()["error"]["message"]
    assert 59 - took_s <= int(denied.headers["retry-after"]) <= 62
    assert denied.headers["x-ratelimit-remaining-requests"] == "0"
    assert KEYS["a"] not in denied.body.decode()
    assert (await gateway.post(PATH, body(), headers=auth("op"))).status == 200


async def test_what_never_fits_is_not_to_be_tried_again(gateway):
    gateway.state.apply(config({"a": {"tokens_per_minute": 8}}))
    denied = await gateway.post(PATH, body(), headers=auth("a"))
    assert denied.status == 429
    assert denied.headers["x-should-retry"] == "false"
    assert "retry-after" not in denied.headers


async def test_fifty_calls_at_once_cannot_exceed_a_token_limit(gateway):
    gateway.state.apply(config({"a": {"tokens_per_minute": 100}}))
    gate = asyncio.Event()
    gateway.backend.before_open = gate.wait
    calls = [asyncio.create_task(gateway.post(PATH, body(), headers=auth("a"))) for _ in range(50)]
    done: set[asyncio.Task] = set()
    while len(done) < 40:
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    gate.set()
    answers = await asyncio.gather(*calls)
    assert sorted(a.status for a in answers) == [200] * 10 + [429] * 40


async def test_a_place_is_given_back_by_whoever_leaves(gateway):
    gateway.state.apply(config({"a": {"concurrency": 1}}))
    gate = asyncio.Event()
    gateway.backend.before_open = gate.wait
    call = asyncio.create_task(gateway.post(PATH, body(), headers=auth("a")))
    while not gateway.backend.opened:
        await asyncio.sleep(0.01)
    denied = await gateway.post(PATH, body(), headers=auth("a"))
    assert denied.status == 429
    assert "1 requests running" in denied.json()["error"]["message"]
    call.cancel()
    gateway.backend.before_open = None
    for _ in range(3000):
        if (await gateway.post(PATH, body(), headers=auth("a"))).status == 200:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the place did not come back")


async def test_a_storm_of_retries_is_held_back_and_first_attempts_are_not(gateway):
    gateway.state.apply(config({"a": {"retries_per_minute": 2}}))
    retry = {**auth("a"), "x-stainless-retry-count": "1"}
    statuses = [(await gateway.post(PATH, body(), headers=retry)).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    assert (await gateway.post(PATH, body(), headers=auth("a"))).status == 200


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
async def test_turning_text_into_tokens_is_a_request_that_takes_no_tokens(gateway, path, fields):
    gateway.state.apply(config({"a": {"requests_per_minute": 1, "tokens_per_minute": 1}}))
    asked = {"model": "tiny", **fields}
    assert (await gateway.post(path, asked, headers=auth("a"))).status == 200
    denied = await gateway.post(path, asked, headers=auth("a"))
    assert (denied.status, denied.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (await gateway.post(path, asked, headers=auth("op"))).status == 200


async def test_figures_of_all_tenants_are_for_operators(gateway):
    gateway.state.apply(config())
    refused = await gateway.raw("GET", "/tailrace/live", headers=auth("a"))
    assert (refused.status, refused.json()["error"]["code"]) == (403, "not_an_operator")
    assert KEYS["a"] not in refused.body.decode()
    assert (await gateway.raw("GET", "/tailrace/live", headers=auth("op"))).status == 200


async def test_requests_of_others_are_not_explained(gateway):
    gateway.state.apply(config(explain={"slowest": 0}))
    named = {**auth("a"), "x-request-id": "mine"}
    assert (await gateway.post(PATH, body(), headers=named)).status == 200
    await gateway.settle()
    path = "/tailrace/explain/mine"
    assert (await gateway.raw("GET", path, headers=auth("a"))).status == 200
    assert (await gateway.raw("GET", path, headers=auth("op"))).status == 200
    assert (await gateway.raw("GET", path, headers=auth("b"))).status == 404
    listed = await gateway.raw("GET", "/tailrace/requests?slowest=false", headers=auth("b"))
    assert listed.json()["data"] == []
    # Another tenant that sends the same id does not push it out.
    gateway.backend.serve("other")
    theirs = {**auth("b"), "x-request-id": "mine"}
    assert (await gateway.post(PATH, body(model="other"), headers=theirs)).status == 200
    await gateway.settle()
    for who, model in (("a", "tiny"), ("b", "other")):
        told = await gateway.raw("GET", path, headers=auth(who))
        assert (told.status, told.json()["model"]) == (200, model)


async def test_requests_that_failed_early_are_their_tenants_and_strangers_nobodys(gateway):
    keys = [*config()["keys"], {"id": "kd", "sha256": hash_key("tr-key-d")}]
    gateway.state.apply({**config({"default": {}}), "keys": keys})
    refused = await gateway.post(PATH, body(model="gone"), headers=auth("a"))
    stranger = await gateway.post(PATH, body(), headers={"x-request-id": "stranger"})
    assert (refused.status, stranger.status) == (404, 401)
    await gateway.settle()

    async def listed(key):
        headers = {"authorization": f"Bearer {key}"}
        told = await gateway.raw("GET", "/tailrace/requests?slowest=false", headers=headers)
        return sorted(row["status"] for row in told.json()["data"])

    assert await listed(KEYS["a"]) == [404]
    assert await listed(KEYS["b"]) == []
    assert await listed("tr-key-d") == [], "the tenant `default` sees its own, too"
    assert await listed(KEYS["op"]) == [401, 404]
