"""The equivalence matrix through the served cluster: every answer is that of one local engine.

Prompts are token ids. At temperature 0 and 1, on the fake model (wrong KV changes its tokens) and
on the tiny decoder in float64.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from openai import AsyncOpenAI
from serving import BLOCK_TOKENS, LOCAL_PREFILL_TOKENS, MODELS, Cluster, locally

pytestmark = pytest.mark.cluster


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(length)]


def workload(seed: int) -> list[dict[str, Any]]:
    """Short and long prompts, some with a common beginning, some with penalties or stop strings."""
    rng = random.Random(seed)
    shared = prompt(seed, 40)
    asked: list[dict[str, Any]] = []
    for i, length in enumerate([1, 5, 16, 17, 33, 70, 130, 300]):
        params: dict[str, Any] = {
            "max_tokens": rng.randrange(8, 40),
            "temperature": float(i % 4 != 0),
            "seed": rng.getrandbits(63),
            "top_p": 0.9 if i % 4 == 3 else 1.0,
        }
        if i % 3 == 1:
            params["logprobs"] = 3
        if i % 3 == 2:
            params |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
        if i % 4 == 2:
            params["stop"] = ("e ", "a")
        asked.append({"prompt": (shared if i % 2 else []) + prompt(seed + i, length), **params})
    return asked


def expected(source: str, asked: dict[str, Any], n: int = 1) -> list[tuple[Any, ...]]:
    return [
        (c.text, c.finish, [round(p, 9) for p in c.logprobs] if "logprobs" in asked else None)
        for c in locally(source, n=n, **asked)
    ]


async def served(client: AsyncOpenAI, model: str, asked: dict[str, Any], n: int = 1) -> Any:
    extra = {k: asked[k] for k in ("repetition_penalty",) if k in asked}
    given = {k: list(v) if k == "stop" else v for k, v in asked.items() if k not in extra}
    return await client.completions.create(model=model, n=n, extra_body=extra, **given)


def shown(answer: Any) -> list[tuple[Any, ...]]:
    return [
        (
            choice.text,
            choice.finish_reason,
            [round(p, 9) for p in choice.logprobs.token_logprobs] if choice.logprobs else None,
        )
        for choice in answer.choices
    ]


@pytest.fixture
async def client(cluster: Cluster):
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
async def test_alone_then_with_a_warm_prefix(cluster: Cluster, client: AsyncOpenAI, model: str):
    cached = 0
    for asked in workload(100):
        first = await served(client, model, asked)
        again = await served(client, model, asked)
        assert shown(first) == shown(again) == expected(model, asked)
        assert first.usage.prompt_tokens == len(asked["prompt"])
        cached += again.usage.prompt_tokens_details.cached_tokens
    assert cached > 100
    cluster.settled()


@pytest.mark.parametrize("model", MODELS)
async def test_all_at_once(cluster: Cluster, client: AsyncOpenAI, model: str):
    asked = [request for seed in (200, 300, 400) for request in workload(seed)]
    answers = await asyncio.gather(*(served(client, model, request) for request in asked))
    assert [shown(answer) for answer in answers] == [expected(model, request) for request in asked]
    cluster.settled()


@pytest.mark.parametrize("model", MODELS)
async def test_long_prompts_are_prefilled_elsewhere(
    cluster: Cluster, client: AsyncOpenAI, model: str
):
    def moved() -> tuple[int, int]:
        received = sum(
            cluster.stats(model, "Decode", replica)["bytes_received"]
            for replica in cluster.pids(model, "Decode")
        )
        return received, cluster.stats(model, "Prefill")["bytes_sent"]

    decisions, bytes_before = cluster.counted(model, "decisions"), moved()
    lengths = [LOCAL_PREFILL_TOKENS + 1, 63, 64, 65, 250, 1000]
    asked = [
        {"prompt": prompt(500 + n, n), "max_tokens": 12, "temperature": t, "seed": n}
        for n in lengths
        for t in (0.0, 1.0)
    ]
    for request in asked:
        assert shown(await served(client, model, request)) == expected(model, request)
    after = cluster.counted(model, "decisions")
    elsewhere = after.get("disaggregated/", 0) - decisions.get("disaggregated/", 0)
    # At temperature 1 the same prompt again: the replica that has it needs no transfer.
    assert elsewhere >= len(lengths)
    assert after.get("fallback/link", 0) == decisions.get("fallback/link", 0)
    received, sent = (after - before for after, before in zip(moved(), bytes_before, strict=True))
    assert received == sent > 0
    pids = [*cluster.pids(model, "Prefill").values(), *cluster.pids(model, "Decode").values()]
    assert len(set(pids)) == len(pids) >= 2
    cluster.settled()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [10, 90])
async def test_three_choices(cluster: Cluster, client: AsyncOpenAI, model: str, length: int):
    for seed, temperature in ((1, 1.0), (2, 0.0)):
        asked = {
            "prompt": prompt(600 + seed + length, length),
            "max_tokens": 20,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 2,
        }
        answer = await served(client, model, asked, n=3)
        assert shown(answer) == expected(model, asked, n=3)
        assert len({choice.text for choice in answer.choices}) == (3 if temperature else 1)
    cluster.settled()


@pytest.mark.parametrize("model", MODELS)
async def test_streamed_and_whole_are_the_same(cluster: Cluster, client: AsyncOpenAI, model: str):
    asked = {"prompt": prompt(700, 100), "max_tokens": 60, "temperature": 1.0, "seed": 9}
    text, finish, usage = "", None, None
    async for chunk in await client.completions.create(
        model=model, stream=True, stream_options={"include_usage": True}, **asked
    ):
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    ((wanted, reason, _),) = expected(model, asked)
    assert (text, finish) == (wanted, reason)
    whole = await served(client, model, asked)
    assert shown(whole) == [(text, finish, None)]
    assert whole.usage.completion_tokens == usage.completion_tokens
    # Whole blocks of it are found again, on this decode replica or on prefill.
    cached = whole.usage.prompt_tokens_details.cached_tokens
    assert cached == 100 // BLOCK_TOKENS * BLOCK_TOKENS
    cluster.settled()
