"""The whole step: what may not change a bit of it, and what it refuses."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from engine.execution.pool import KVPool
from engine.models.decoder import Decoder
from engine.models.tiny import TINY_ARCHITECTURE, tiny_tensors
from engine.native.decoder import NativeDecoder
from engine.native.library import native_available

LENGTHS = [(150, 150), (1, 1), (33, 33), (64, 64)]


def prompts(count=150):
    g = torch.Generator().manual_seed(11)
    return [torch.randint(0, 70, (count,), generator=g).tolist() for _ in LENGTHS]


def alone(make, model, block_tokens=16):
    """Every row's logits of each request, computed whole and by itself."""
    rows = []
    for (_, keys), ids in zip(LENGTHS, prompts(), strict=True):
        batch = make.batch(model, [(keys, keys)], block_tokens=block_tokens)
        flat, positions, step = batch.inputs([ids])
        step.last = torch.arange(keys)
        rows.append(model.forward(flat, positions, batch.pool, step))
    return rows


@pytest.fixture(scope="module")
def computed_alone(make):
    """`alone`, of a decoder of one thread and these options: each once."""

    @cache
    def computed(kind, **options):
        return alone(make, make.decoder(kind, **options))

    return computed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "qkv_bias": True},
        {"window": 9},
        {"kv_codes": True},
        {"kv_codes": True, "window": 9, "head_dim": 68},
    ],
)
@pytest.mark.parametrize("block_tokens", [5, 16, 256])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_pages_batches_chunks_and_threads_do_not_change_a_bit(
    kind, make, computed_alone, options, block_tokens, num_threads
):
    want = computed_alone(kind, **options)
    model = make.decoder(kind, num_threads=num_threads, **options)
    batch = make.batch(model, LENGTHS, block_tokens=block_tokens, seed=4)
    done = [0] * len(LENGTHS)
    for size in (1, 7, 30, 70, 150):
        now = [min(at + size, keys) for at, (_, keys) in zip(done, LENGTHS, strict=True)]
        busy = [row for row, (a, b) in enumerate(zip(done, now, strict=True)) if b > a]
        part = make.batch(model, [(now[row] - done[row], now[row]) for row in busy])
        part.pool, part.blocks = batch.pool, [batch.blocks[row] for row in busy]
        flat, positions, step = part.inputs([prompts()[row] for row in busy])
        step.last = torch.arange(len(flat))
        got = model.forward(flat, positions, batch.pool, step)
        expected = torch.cat([want[row][done[row] : now[row]] for row in busy])
        assert torch.equal(got, expected)
        done = now
    assert done == [keys for _, keys in LENGTHS]


@pytest.mark.parametrize("options", [{}, {"window": 600}, {"kv_codes": True}])
def test_spans_of_a_long_context_are_joined_alike_by_one_thread_and_by_several(kind, make, options):
    """Several threads take a span each where there are too few requests for them."""
    ids = prompts(1300)[0]

    def rows(model, chunks):
        batch = make.batch(model, [(1, 1300)], block_tokens=16)
        out, first = {}, 0
        for size in chunks:
            batch.lengths = [(size, first + size)]
            flat, positions, step = batch.inputs([ids])
            step.last = torch.arange(size)
            logits = model.forward(flat, positions, batch.pool, step)
            out |= {first + i: logits[i] for i in range(size)}
            first += size
        return out

    alone = [1] * 6 + [505, 1, 1, 1, 510, 1, 1, 1, 272, 1]
    want = rows(make.decoder(kind, **options), [700, 600])
    assert len(want) == 1300
    for num_threads in (1, 4):
        got = rows(make.decoder(kind, num_threads=num_threads, **options), alone)
        assert all(torch.equal(row, want[at]) for at, row in got.items())


def test_only_the_wanted_rows_come_back_in_the_order_asked_for(kind, make):
    model = make.decoder(kind)
    want = alone(make, model)[0]
    batch = make.batch(model, [(150, 150)])
    flat, positions, step = batch.inputs([prompts()[0]])
    for rows in ([149], [3, 4, 5, 9], [7, 2, 2, 130], []):
        step.last = torch.tensor(rows, dtype=torch.int64)
        got = model.forward(flat, positions, batch.pool, step)
        assert torch.equal(got, want[rows])


def test_logits_are_wide_and_unrounded(kind, make):
    got = alone(make, make.decoder(kind))[0]
    assert got.dtype == (torch.float64 if kind[0] == torch.float64 else torch.float32)
    assert (got != got.to(torch.bfloat16).to(got.dtype)).any()


@pytest.mark.parametrize("kv_codes", [False, True])
def test_a_request_that_is_not_a_number_does_not_spread(kind, make, kv_codes):
    """Not to its neighbours, and not through memory that later passes use again."""
    model = make.decoder(kind, kv_codes=kv_codes)
    want = alone(make, model)
    batch = make.batch(model, [(1, 20), (33, 33)])  # the first one's past is NaN
    flat, positions, step = batch.inputs([prompts()[0], prompts()[2]])
    step.last = torch.arange(len(flat))
    got = model.forward(flat, positions, batch.pool, step)
    assert torch.isnan(got[0]).all()
    assert torch.equal(got[1:], want[2])
    for row, again in zip(want, alone(make, model), strict=True):
        assert torch.equal(again, row)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s: s.slots.fill_(32), "a slot outside the pool"),
        (lambda s: s.slots.fill_(-1), "a slot outside the pool"),
        (lambda s: s.block_table.fill_(2), "a block outside the pool"),
        (lambda s: s.block_table.fill_(-1), "a block outside the pool"),
        (lambda s: s.kv_lens.fill_(17), "more keys than the block table"),
        (lambda s: s.kv_lens.fill_(4), "more queries than keys"),
        (lambda s: s.cu_q.copy_(torch.tensor([0, 4])), "cu_q does not end"),
        (lambda s: s.last.fill_(5), "a wanted row outside"),
    ],
)
def test_a_step_that_leaves_its_tables_is_refused(kind, make, fault, message):
    model = make.decoder(kind)
    batch = make.batch(model, [(5, 5)])
    flat, positions, step = batch.inputs([prompts()[0]])
    fault(step)
    with pytest.raises(IndexError, match=message):
        model.forward(flat, positions, batch.pool, step)


def test_ids_and_positions_out_of_range_are_refused(kind, make):
    model = make.decoder(kind)
    batch = make.batch(model, [(5, 5)])
    flat, positions, step = batch.inputs([prompts()[0]])
    for ids in (torch.full_like(flat, 70), torch.full_like(flat, -1)):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            model.forward(ids, positions, batch.pool, step)
    with pytest.raises(IndexError, match="outside the rotation"):
        model.forward(flat, positions - 1, batch.pool, step)


def test_kv_is_that_of_torch_within_rounding_under_one_fingerprint(kind, make):
    """So that replicas of either kind may hand over to each other."""
    dtype, _ = kind
    ours = make.decoder(kind)
    theirs = Decoder(
        ours.architecture, make.tensors(ours.architecture), dtype=dtype, fingerprint="small"
    )
    assert ours.layout == theirs.layout
    batch = make.batch(ours, [(60, 60)])
    flat, positions, step = batch.inputs([prompts()[0]])
    ours.forward(flat, positions, batch.pool, step)
    other = KVPool(theirs.layout, batch.pool.num_blocks, batch.pool.block_tokens)
    theirs.forward(flat, positions, other, step)
    rows = step.slots // 16, slice(None), slice(None), step.slots % 16
    limit = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    want = other.data[rows].double()
    assert float((batch.pool.data[rows].double() - want).abs().max()) < limit * want.abs().max()


@pytest.mark.skipif(native_available("float64") is not None, reason="not built")
@pytest.mark.parametrize("kv_codes", [False, True])
@pytest.mark.parametrize("block_tokens", [8, 256])
@pytest.mark.parametrize("size", [1, 7, 44])
def test_the_tiny_model_in_float64_says_what_torch_says(make, block_tokens, size, kv_codes):
    ids = list(b"The quick brown fox jumps over the lazy dog.")

    def greedy(model, size, block_tokens):
        tokens, first = list(ids), 0
        batch = make.batch(model, [(1, 104)], block_tokens=block_tokens)
        while len(tokens) < 100:
            stop = min(first + size, len(tokens))
            batch.lengths = [(stop - first, stop)]
            flat, positions, step = batch.inputs([tokens])
            logits = model.forward(flat, positions, batch.pool, step)
            if stop == len(tokens):
                tokens.append(int(logits[0].argmax()))
            first = stop
        return tokens

    options = {"dtype": torch.float64, "fingerprint": "tiny"}
    native = NativeDecoder(
        TINY_ARCHITECTURE, tiny_tensors(), num_threads=2, kv_codes=kv_codes, **options
    )
    kv_dtype = "int8" if kv_codes else "auto"
    twin = Decoder(TINY_ARCHITECTURE, tiny_tensors(), kv_dtype=kv_dtype, **options)
    want = greedy(twin, 44, 16)
    assert greedy(native, size, block_tokens) == want


def affinity_of_team(make, allowed):
    """Where threads that came with a team of two may run behind a pass, and where the first may."""
    if native_available("float32"):
        pytest.skip("there is no native decoder here")

    def run():
        os.sched_setaffinity(0, allowed)
        before = set(os.listdir("/proc/self/task"))
        model = make.decoder((torch.float32, "portable"), num_threads=2)
        new = set(os.listdir("/proc/self/task")) - before
        batch = make.batch(model, [(40, 40)])
        model.forward(*batch.inputs()[:2], batch.pool, batch.inputs()[2])
        return [os.sched_getaffinity(int(thread)) for thread in new], os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core cannot be shared out")
def test_the_others_of_a_team_keep_off_the_core_of_the_one_that_runs_the_pass(make):
    allowed = set(sorted(os.sched_getaffinity(0))[:2])
    if len(allowed) < 2:
        pytest.skip("this process has one core")
    others, own = affinity_of_team(make, allowed)
    assert own == allowed
    (moved,) = (each for each in others if each != allowed)
    assert len(moved) == 1
    assert moved < allowed


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_team_larger_than_the_cores_it_may_use_is_left_where_it_is(make):
    allowed = {min(os.sched_getaffinity(0))}
    others, own = affinity_of_team(make, allowed)
    assert own == allowed
    assert others
    assert all(each == allowed for each in others)
