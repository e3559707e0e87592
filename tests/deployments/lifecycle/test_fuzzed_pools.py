"""Any request through prefill and decode says what one engine alone says, to the last logprob."""

from __future__ import annotations

import asyncio
import random

import pytest
from pools import alone, ask, lose, opened, request, settled, until

from engine.request import Request, SamplingParams

BATCHES, BATCH = 6, 10
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 24, 25, 32, 64, 65, 80, 127, 128, 129)
"""Around the borders of blocks (8 tokens) and of what is computed locally (4)."""

SHARED = tuple(random.Random(5).randrange(32, 127) for _ in range(max(LENGTHS)))


def drawn(rng: random.Random, i: int) -> tuple[Request, int]:
    """A request and how many choices it asks for."""
    length = rng.choice(LENGTHS)
    own = tuple(rng.randrange(32, 127) for _ in range(length))
    most = rng.choice([1, 1, 2, 3, 9, 30])
    params = {
        "max_tokens": most,
        "seed": rng.getrandbits(64),
        "temperature": rng.choice([0.0, 1.0]),
        "min_tokens": rng.randrange(0, min(most, 4) + 1),
    }
    if rng.random() < 0.3:
        params["logprobs"] = rng.choice([0, 3, 20])
    if rng.random() < 0.4:
        params["stop"] = tuple(rng.sample([chr(c) for c in range(32, 127)], 12))
    if rng.random() < 0.3:
        params["stop_token_ids"] = tuple(rng.sample(range(32, 127), 30))
    if rng.random() < 0.3:
        params |= {"presence_penalty": 1.0, "repetition_penalty": 1.3}
    if rng.random() < 0.2:
        params["logit_bias"] = ((65, 100.0),)
    prompt = SHARED[:length] if rng.random() < 0.5 else own
    one = Request(request_id=f"f{i}", prompt_ids=prompt, params=SamplingParams(**params))
    return one, rng.choice([1, 1, 1, 2, 3])


@pytest.mark.parametrize("source", ["fake", "tiny"])
async def test_any_request_says_what_one_engine_says(local_cluster, source):
    cluster = local_cluster(source, local_prefill_tokens=4)
    for name in ("p0", "p1"):
        await cluster.add_prefill(name)
    for name in ("d0", "d1"):
        await cluster.add_decode(name)
    client = await cluster.add_gateway("g0")
    rng = random.Random(7)

    async def compare(one: Request, n: int) -> None:
        reader = await opened(client, one, n)
        await reader.task
        assert reader.answers == [alone(source, one, choice) for choice in range(n)], (one, n)
        usage = reader.usage
        assert usage.prompt_tokens == len(one.prompt_ids)
        assert usage.completion_tokens == sum(map(len, reader.tokens))
        assert 0 <= usage.cached_tokens < len(one.prompt_ids)

    for batch in range(BATCHES):
        requests = [drawn(rng, batch * BATCH + i) for i in range(BATCH)]
        await asyncio.gather(*(compare(one, n) for one, n in requests))
    routes = [d.streams.counters.decisions for d in cluster.decodes.values()]
    assert sum(counts.get(("disaggregated", ""), 0) for counts in routes) > 10
    await settled(cluster)


async def test_bytes_of_half_characters_and_stops_survive_a_migration(local_cluster):
    cluster = local_cluster("tiny", local_prefill_tokens=4)
    await cluster.add_prefill("p0")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    for i in range(4):
        rng = random.Random(i)
        prompt = tuple(rng.randrange(0, 250) for _ in range(40))
        params = SamplingParams(
            max_tokens=160,
            seed=rng.getrandbits(64),
            temperature=1.0,
            ignore_eos=True,
            stop=("zzzz", "qqqqq"),
        )
        one = Request(request_id=f"m{i}", prompt_ids=prompt, params=params)
        # The window fills at a token of its own each time: that is where the replica is lost.
        client.window_tokens = 16 + i
        stream = await client.open(one, n=2, remaining_s=60.0)
        decode = cluster.decodes[f"d{i}"]
        await until(lambda table=decode.streams: _all_paused(table), "a full window")
        await cluster.add_decode(f"d{i + 1}")
        await lose(cluster, f"d{i}")
        answers, text = {0: [], 1: []}, {0: "", 1: ""}
        async for events in stream:
            for event in events:
                answers[event.choice].extend(event.token_ids)
                text[event.choice] += event.text
        await stream.aclose()
        assert stream.migrations == 2
        told = [alone("tiny", one, choice) for choice in range(2)]
        assert [(answers[c], text[c]) for c in range(2)] == [(a.tokens, a.text) for a in told]
    await settled(cluster)


def _all_paused(table) -> bool:
    return table.num_streams == 1 and all(s.paused for s in table._streams.values())


async def test_a_prompt_cached_by_another_tenant_is_computed_anew(local_cluster):
    from dataclasses import replace

    cluster = local_cluster("tiny")
    await cluster.add_prefill("p0")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(1, 100)
    for salt in ("a", "b"):
        tokens, _, _, usage = await ask(client, replace(one, request_id=salt, salt=salt))
        assert tokens == [alone("tiny", one).tokens]
        assert usage.cached_tokens == 0
    await settled(cluster)
