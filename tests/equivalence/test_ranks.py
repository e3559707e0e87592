"""The equivalence matrix on ranks: real processes, gloo between them, the tokens of one rank.

The tiny decoder in float64, where the ranks' sums move logits by 1e-15 only, at temperature 0 and
1. The last test of each group takes one of its ranks away.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.build import BuiltEngine, build_engine
from engine.cache.hashing import hash_chain, root_hash
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.execution.ranks.executor import RankFailed
from engine.execution.ranks.launch import LocalProcesses
from engine.request import Request, SamplingParams
from engine.scheduling.plan import StepPlan
from engine.text.text_model import load_text
from engine.transfer.in_process import InProcessTransport
from engine.transfer.intake import KVIntake

GRIDS = [(2, 1), (1, 2), (2, 2)]
CHUNKS = SchedulerConfig(max_chunk_tokens=7)
WHOLE = SchedulerConfig(max_step_tokens=2048, max_chunk_tokens=2048)


def build(tp=1, pp=1, *, page=8, num_blocks=400, launcher=None) -> BuiltEngine:
    config = EngineConfig(
        model=ModelConfig(name="tiny", source="tiny"),
        max_context_tokens=1024,
        block_tokens=page,
        num_blocks=num_blocks,
        num_threads=1,
        reuse_tokens=page // 2,  # so that ranks copy parts of blocks
        scheduler=WHOLE,
        tensor_parallel=tp,
        pipeline_parallel=pp,
    )
    return build_engine(config, load_text("tiny").tokenizer, launcher)


def workload() -> list[Request]:
    rng = random.Random(3)
    shared = [rng.randrange(32, 127) for _ in range(40)]
    requests = []
    for i, length in enumerate([1, 33, 150, 16, 70, 5]):
        prompt = (shared if i % 2 else []) + [rng.randrange(32, 127) for _ in range(length)]
        penalised = {"presence_penalty": 0.5, "repetition_penalty": 1.2} if i % 3 == 2 else {}
        params = SamplingParams(
            max_tokens=8 + 2 * i,
            temperature=float(i % 3 != 0),
            seed=rng.getrandbits(64),
            top_p=0.9 if i % 4 == 3 else 1.0,
            logprobs=2 if i == 1 else None,
            **penalised,
        )
        requests.append(Request(request_id=f"r{i}", prompt_ids=tuple(prompt), params=params))
    return requests


def drive(built: BuiltEngine, requests=None, cached=None) -> dict[str, list[int]]:
    requests = workload() if requests is None else requests
    answers = {request.request_id: [] for request in requests}
    for request in requests:
        built.engine.submit(request)
    finish(built, answers, cached)
    return answers


def finish(built: BuiltEngine, answers, cached=None) -> None:
    while (step := built.engine.step()) is not None:
        built.engine.check()
        for output in step.outputs:
            answers[output.request_id].append(output.token.token_id)
            if cached is not None:
                cached.add(output.num_cached_tokens)
    assert built.engine.stats().num_held_blocks == 0


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    answers = {}
    for request in workload():
        answers.update(drive(build(), [request]))
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    return answers


@pytest.fixture(scope="module", params=GRIDS, ids=lambda grid: f"TP {grid[0]} PP {grid[1]}")
def ranked(request):
    """27 blocks of 8: requests preempt each other. Two stages keep their KV where this process
    cannot map it, and four ranks are reached by TCP, as those of other machines are."""
    launcher = LocalProcesses()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == (1, 2):
            patch.setattr("engine.build.machine", lambda: "another")
        if request.param == (2, 2):
            launcher.host = "127.0.0.1"
        built = build(*request.param, num_blocks=28, launcher=launcher)
    yield built
    built.engine.close()
    built.pool.close()
    assert all(ended(pid) for pid in pids(built))


def pids(built: BuiltEngine) -> list[int]:
    return list(built.ranks.pids)


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("limits", [WHOLE, CHUNKS], ids=["whole prompts", "chunks of 7"])
def test_ranks_give_the_tokens_of_one(ranked, alone, limits):
    ranked.engine.reconfigure(limits)
    assert drive(ranked) == alone


def test_stages_work_on_steps_of_their_own(ranked, alone, monkeypatch):
    stages = ranked.engine.config.pipeline_parallel
    ranked.engine.reconfigure(CHUNKS)
    submit, under_way = ranked.ranks.submit, []

    def counted(plan):
        submit(plan)
        under_way.append(len(ranked.ranks._steps))

    monkeypatch.setattr(ranked.ranks, "submit", counted)
    assert drive(ranked) == alone
    assert max(under_way) == stages
    if stages == 2:
        assert under_way.count(2) > len(under_way) / 2


def test_preemption_and_a_warm_prefix_change_nothing(ranked, alone):
    ranked.engine.reconfigure(WHOLE)
    before = ranked.engine.stats()
    assert drive(ranked) == alone
    after = ranked.engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_hit_tokens > before.prefix_hit_tokens


def test_a_part_of_a_block_is_copied_on_every_rank(ranked, alone):
    request = replace(workload()[3], salt="copied")  # 56 tokens, 55 of which may be cached
    for expected in (0, 52):
        cached = set()
        assert drive(ranked, [request], cached) == {request.request_id: alone[request.request_id]}
        assert cached == {expected}


async def pull(prefill: BuiltEngine, decode: BuiltEngine, request: Request) -> list[int]:
    """One request through prefill engine, transfer and decode engine."""
    engine, pool = decode.engine, decode.pool
    reservation = engine.submit(request, remote=True)
    assert reservation is not None
    intake = KVIntake(
        pool,
        reservation.blocks,
        first_token=reservation.num_cached_tokens,
        num_tokens=request.num_tokens,
    )
    chain = hash_chain(
        root_hash(engine.layout.fingerprint, request.salt), request.token_ids, pool.block_tokens
    )
    transport = InProcessTransport(prefill.engine, prefill.pool, chunk_bytes=3000)
    prefilled = await transport.pull(
        "", request, intake, chain=tuple(chain), chain_tokens=pool.block_tokens
    )
    output = engine.kv_arrived(request.request_id, prefilled.first)
    answers = {request.request_id: [output.token.token_id]}
    if output.finish is None:
        finish(decode, answers)
    return answers[request.request_id]


@pytest.mark.parametrize("page", [8, 16])
async def test_prefill_on_ranks_and_decode_on_one_change_nothing_nor_the_reverse(
    ranked, alone, page
):
    one = build(page=page)
    for number, request in enumerate(workload()):
        salted = replace(request, salt=f"{page}")  # nothing of it is cached yet
        sides = (ranked, one) if number % 2 else (one, ranked)
        assert await pull(*sides, salted) == alone[request.request_id]
    assert one.engine.stats().num_leases == ranked.engine.stats().num_leases == 0


def test_the_kv_of_ranks_is_that_of_one(ranked):
    one = build()
    request = workload()[2]
    drive(one, [request])
    drive(ranked, [request])
    ours = ranked.engine.kv_bytes(request.token_ids, "")
    theirs = one.engine.kv_bytes(request.token_ids, "")
    assert len(ours) == len(theirs) > 10
    for a, b in zip(ours, theirs, strict=True):
        left, right = np.frombuffer(a), np.frombuffer(b)
        assert np.abs(right).max() > 0.1
        np.testing.assert_allclose(left, right, atol=1e-12)


def test_a_lost_rank_ends_the_group_at_once(ranked):
    executor = ranked.ranks
    heard = []
    executor.on_failure = heard.append
    victim = pids(ranked)[-1]
    grid = (ranked.engine.config.tensor_parallel, ranked.engine.config.pipeline_parallel)
    ranked.engine.submit(replace(workload()[4], request_id="last"))
    if grid == (2, 1):  # killed while nothing is computed: noticed without a step
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: executor.failure is not None)
    elif grid == (1, 2):  # hangs, and is noticed by its silence
        executor.silence_s = 2.5
        os.kill(victim, signal.SIGSTOP)
    else:  # hangs, and somebody's patience ends
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(0.5, executor.kill, ("step_limit_s",)).start()
    with pytest.raises(RankFailed, match=r"rank|step_limit_s"):
        ranked.engine.step()
    assert heard == [executor.failure]
    wait_until(lambda: all(ended(pid) for pid in pids(ranked)))
    with pytest.raises(RankFailed):
        executor.execute(StepPlan(chunks=()))


def wait_until(true, within_s=240.0):
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SIZES = {(1, 1): 16, (2, 1): 8, (1, 2): 4, (2, 2): 8, (4, 1): 16}
"""Ranks that share a layer, stages, and tokens of a block. Four ranks hold each of the two KV heads
twice: both copies are written, one is read."""


@pytest.fixture(scope="module")
def sizes():
    """An engine of each size, all at once."""
    with ThreadPoolExecutor() as pool:
        started = {
            size: pool.submit(build, *size, page=page, num_blocks=100)
            for size, page in SIZES.items()
        }
    built = {size: engine.result() for size, engine in started.items()}
    yield built
    for each in built.values():
        each.engine.close()
        if each.ranks is not None:
            each.pool.close()


@pytest.mark.timeout(900)  # thirteen processes start
@pytest.mark.parametrize(
    ("prefill", "decode"),
    list(itertools.permutations(SIZES, 2)),
    ids=lambda size: f"{size[0]}x{size[1]}",
)
async def test_prefill_feeds_decode_of_any_other_size(sizes, alone, prefill, decode):
    for request in workload()[1:4]:
        salted = replace(request, salt=f"{prefill} {decode}")  # nothing of it is cached yet
        tokens = await pull(sizes[prefill], sizes[decode], salted)
        assert tokens == alone[request.request_id]
    assert sizes[prefill].engine.stats().num_leases == 0


def test_ranks_that_cannot_start_say_why():
    config = EngineConfig(
        model=ModelConfig(name="fake", source="fake"), num_threads=1, tensor_parallel=2
    )
    with pytest.raises(ConfigError, match="source='fake' has no parts"):
        build_engine(config, load_text("fake").tokenizer)
