"""The equivalence matrix, in process: however a request is computed, it gets the same tokens.

At temperature 0 and 1, on the fake model (whose KV is the history, so wrong KV changes tokens) and
on a tiny decoder in float64 (where re-chunking moves logits by 1e-14 only), which also keeps its KV
as codes: each token's head is rounded by itself, so that nothing else decides what is stored.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from engine.build import BuiltEngine, assemble
from engine.cache.hashing import hash_chain, root_hash
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import TransferError
from engine.models.load import load_model
from engine.native.library import native_available
from engine.request import FinishReason, Request, SamplingParams
from engine.text.text_model import load_text
from engine.transfer.in_process import InProcessTransport
from engine.transfer.intake import KVIntake

MODELS = {
    "fake": {"source": "fake"},
    "tiny": {"source": "tiny"},
    "tiny, KV in int8": {"source": "tiny", "kv_dtype": "int8"},
    "native, KV in int8": {"source": "tiny", "kv_dtype": "int8", "backend": "native"},
}


@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish: FinishReason | None = None
    cached: int = 0


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    config = ModelConfig(name=request.param, **MODELS[request.param])
    if config.backend == "native" and native_available("float64") is not None:
        pytest.skip("not built")
    return load_model(config), load_text(config.source).tokenizer


def build(model, *, page=16, num_blocks=400, **limits) -> BuiltEngine:
    weights, tokenizer = model
    config = EngineConfig(
        model=ModelConfig(name="m", source="m"),
        max_context_tokens=1024,
        block_tokens=page,
        num_blocks=num_blocks,
        scheduler=SchedulerConfig(**limits),
    )
    return assemble(config, weights, tokenizer)


def workload(count=8, seed=3) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(32, 127) for _ in range(40)]
    requests = []
    for i in range(count):
        prefix = shared if i % 2 else []
        prompt = prefix + [rng.randrange(32, 127) for _ in range(rng.choice([1, 5, 16, 33, 70]))]
        penalised = {"presence_penalty": 0.5, "repetition_penalty": 1.2} if i % 3 == 2 else {}
        params = SamplingParams(
            max_tokens=rng.randrange(4, 24),
            temperature=float(i % 4 != 0),
            seed=rng.getrandbits(64),
            top_p=0.9 if i % 4 == 3 else 1.0,
            **penalised,
        )
        requests.append(Request(request_id=f"r{i}", prompt_ids=tuple(prompt), params=params))
    return requests


def drive(built: BuiltEngine, requests: list[Request]) -> dict[str, Answer]:
    answers = {r.request_id: Answer([], "") for r in requests}
    for request in requests:
        built.engine.submit(request)
    finish(built, answers)
    return answers


def finish(built: BuiltEngine, answers: dict[str, Answer]) -> None:
    for _ in range(5000):
        step = built.engine.step()
        if step is None:
            break
        built.engine.check()
        for output in step.outputs:
            take(answers[output.request_id], output)
    assert all(a.finish is not None for a in answers.values())
    assert built.engine.stats().num_held_blocks == 0


def take(answer: Answer, output) -> None:
    answer.tokens.append(output.token.token_id)
    answer.text += output.text
    answer.finish = output.finish
    answer.cached = output.num_cached_tokens


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Answer]:
    answers = {}
    for request in workload():
        answers.update(drive(build(model, max_step_tokens=2048, max_chunk_tokens=2048), [request]))
    assert len({tuple(a.tokens) for a in answers.values()}) > 5, "the model must tell them apart"
    return answers


def same(left: dict[str, Answer], right: dict[str, Answer]) -> None:
    assert {k: (a.tokens, a.text, a.finish) for k, a in left.items()} == {
        k: (a.tokens, a.text, a.finish) for k, a in right.items()
    }


@pytest.mark.parametrize("page", [8, 16, 256])
def test_a_batch_gives_the_tokens_of_each_alone_at_every_page_size(model, alone, page):
    same(drive(build(model, page=page, num_blocks=6400 // page + 2), workload()), alone)


def test_chunks_of_7_change_nothing(model, alone):
    same(drive(build(model, max_chunk_tokens=7), workload()), alone)


def test_a_step_budget_of_7_changes_nothing(model, alone):
    same(drive(build(model, max_step_tokens=7, max_chunk_tokens=7), workload()), alone)


def test_preemption_in_a_tiny_pool_changes_nothing(model, alone):
    built = build(model, page=8, num_blocks=24)
    same(drive(built, workload()), alone)
    assert built.engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "limits",
    [
        {"page": 8},
        {"max_step_tokens": 7, "max_chunk_tokens": 7},
        {"page": 8, "num_blocks": 24},
        {"max_running_requests": 2},
    ],
    ids=["batch", "chunks of 7", "tiny pool", "two at a time"],
)
def test_steps_planned_while_others_are_computed_change_nothing(model, alone, limits):
    built = build(model, overlap=True, **limits)
    same(drive(built, workload()), alone)
    stats = built.engine.stats()
    assert stats.num_steps_ahead > 0  # how many depends on how fast passes are
    assert (stats.num_preemptions > 0) is ("num_blocks" in limits)
    # Whether a prefix is there changes what is computed, not what comes out.
    same(drive(built, workload()), alone)
    built.engine.close()


def test_a_warm_prefix_changes_nothing(model, alone):
    built = build(model, page=8)
    drive(built, workload())
    again = drive(built, workload())
    same(again, alone)
    assert sum(a.cached for a in again.values()) > 100


def test_tokens_already_emitted_elsewhere_are_continued(model, alone):
    for cut in (1, 3):
        rest = [
            replace(r, output_ids=tuple(alone[r.request_id].tokens[:cut]))
            for r in workload()
            if len(alone[r.request_id].tokens) > cut
        ]
        answers = drive(build(model), rest)
        for request in rest:
            whole = alone[request.request_id]
            got = answers[request.request_id]
            assert got.tokens == whole.tokens[cut:]
            assert whole.text.endswith(got.text)


async def pull(prefill: BuiltEngine, decode: BuiltEngine, request: Request, **transport):
    """One request through prefill engine, transfer and decode engine. Returns its answer."""
    reservation = decode.engine.submit(request, remote=True)
    assert reservation is not None
    engine, pool = decode.engine, decode.pool
    intake = KVIntake(
        pool,
        reservation.blocks,
        first_token=reservation.num_cached_tokens,
        num_tokens=request.num_tokens,
    )
    chain = hash_chain(
        root_hash(engine.layout.fingerprint, request.salt), request.token_ids, pool.block_tokens
    )
    answer = Answer([], "")
    try:
        prefilled = await InProcessTransport(prefill.engine, prefill.pool, **transport).pull(
            "",
            request,
            intake,
            chain=tuple(chain),
            chain_tokens=pool.block_tokens,
        )
    except TransferError as error:
        engine.kv_failed(request.request_id)
        return answer, error
    output = engine.kv_arrived(request.request_id, prefilled.first)
    assert output is not None
    take(answer, output)
    return answer, None


@pytest.mark.parametrize(
    ("prefill_page", "decode_page", "overlap"),
    [(8, 8, True), (16, 16, False), (256, 256, False), (16, 8, False)],
)
async def test_prefill_elsewhere_split_at_any_token_changes_nothing(
    model, alone, prefill_page, decode_page, overlap
):
    prefill = build(model, page=prefill_page, num_blocks=6400 // prefill_page + 2, overlap=overlap)
    decode = build(model, page=decode_page, num_blocks=6400 // decode_page + 2, overlap=overlap)
    for cut in (0, 1, 2, 5):
        for request in workload():
            whole = alone[request.request_id]
            if len(whole.tokens) <= cut:
                continue
            split = replace(request, output_ids=tuple(whole.tokens[:cut]))
            answer, error = await pull(prefill, decode, split, chunk_bytes=500)
            assert error is None
            if answer.finish is None:
                finish(decode, {request.request_id: answer})
            assert answer.tokens == whole.tokens[cut:]
            assert whole.text.endswith(answer.text)
    for built in (prefill, decode):
        built.engine.check()
        stats = built.engine.stats()
        assert (stats.num_held_blocks, stats.num_leases) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_prompt_that_is_parked_on_its_way_changes_nothing(model, alone, overlap):
    prefill = build(
        model,
        page=8,
        max_running_requests=1,
        max_step_tokens=7,
        max_chunk_tokens=7,
        overlap=overlap,
    )
    decode = build(model, page=8)
    parked = 0
    for request in workload():
        long = len(request.prompt_ids) > 40
        pulled = asyncio.create_task(pull(prefill, decode, replace(request, priority=30)))
        for _ in range(3):  # the first chunks are on their way
            await asyncio.sleep(0)
        if long:
            ids = tuple(reversed(request.prompt_ids))
            urgent = replace(request, request_id="urgent", prompt_ids=ids)
            prefill.engine.submit(urgent, hold_s=60.0)
        answer, error = await pulled
        assert error is None
        if long:
            prefill.engine.cancel("urgent")
            prefill.engine.release("urgent")
        parked += prefill.engine.stats().num_preemptions
        finish(decode, {request.request_id: answer})
        assert (answer.tokens, answer.text) == (
            alone[request.request_id].tokens,
            alone[request.request_id].text,
        )
    assert parked > 0
    prefill.engine.check()
    stats = prefill.engine.stats()
    assert (stats.num_held_blocks, stats.num_leases) == (0, 0)


def drop_second():
    count = [0]

    def tamper(chunk):
        count[0] += 1
        return [] if count[0] == 2 else [chunk]

    return tamper


def flip_second():
    count = [0]

    def tamper(chunk):
        count[0] += 1
        if count[0] == 2:
            payload = bytearray(chunk.payload)
            payload[3] ^= 0x40
            return [replace(chunk, payload=memoryview(payload))]
        return [chunk]

    return tamper


@pytest.mark.parametrize(("tamper", "stage"), [(drop_second, "final"), (flip_second, "checksum")])
async def test_missing_or_wrong_kv_is_recomputed_here(model, alone, tamper, stage):
    prefill, decode = build(model, page=8), build(model, page=8)
    request = max(workload(), key=lambda r: len(r.prompt_ids))
    answer, error = await pull(prefill, decode, request, tamper=tamper())
    assert isinstance(error, TransferError)
    assert error.stage == stage
    assert answer.tokens == []
    finish(decode, {request.request_id: answer})
    assert answer.tokens == alone[request.request_id].tokens
    assert prefill.engine.stats().num_leases == 0


async def test_a_prefill_replica_with_another_model_is_refused(alone, model):
    other = "tiny" if model[0].layout.fingerprint == load_fake().layout.fingerprint else "fake"
    stranger = (load_model(ModelConfig(name=other, source=other)), load_text(other).tokenizer)
    request = workload()[4]
    _, error = await pull(build(stranger, page=8), build(model, page=8), request)
    assert isinstance(error, TransferError)
    assert error.stage == "offer"


def load_fake():
    return load_model(ModelConfig(name="fake", source="fake"))


@pytest.mark.parametrize("kept", ["float64", "int8"])
async def test_kv_of_another_type_is_refused_and_computed_here(kept):
    """Numbers offered for codes and codes for numbers, of the same weights."""
    tokenizer = load_text("tiny").tokenizer
    numbers, codes = (
        (load_model(ModelConfig(name="m", source="tiny", kv_dtype=kind)), tokenizer)
        for kind in ("float64", "int8")
    )
    mine, theirs = (numbers, codes) if kept == "float64" else (codes, numbers)
    request = max(workload(), key=lambda r: len(r.prompt_ids))
    want = drive(build(mine, page=8), [request])
    decode = build(mine, page=8)
    answer, error = await pull(build(theirs, page=8), decode, request)
    assert isinstance(error, TransferError)
    assert error.stage == "offer"
    assert "give both pools one kv_dtype" in str(error)
    answers = {request.request_id: answer}
    finish(decode, answers)
    same(answers, want)


def test_codes_hold_about_eight_times_the_tokens_of_float64(model):
    """Of heads of 16: a byte each and four for the scale, instead of eight bytes each."""
    if model[0].layout.dtype != "int8":
        pytest.skip("of codes")
    numbers = load_model(ModelConfig(name="m", source="tiny")), model[1]
    config = EngineConfig(
        model=ModelConfig(name="m", source="m"), max_context_tokens=64, kv_memory_bytes=1 << 24
    )
    codes, plain = (
        assemble(config, *each).engine.blocks.config.capacity_tokens for each in (model, numbers)
    )
    assert plain == ((1 << 24) // (16 * 3 * 2 * 2 * 16 * 8) - 1) * 16
    assert codes == ((1 << 24) // (16 * 3 * 2 * 2 * (16 + 4)) - 1) * 16


def test_two_tenants_never_share_a_prefix(model):
    built = build(model, page=8)
    request = max(workload(), key=lambda r: len(r.prompt_ids))
    drive(built, [replace(request, salt="a")])
    assert drive(built, [replace(request, salt="b")])[request.request_id].cached == 0
    assert drive(built, [replace(request, salt="a")])[request.request_id].cached > 0
