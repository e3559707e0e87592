"""The CPU attention against its definition, written out row by row in float64."""

import itertools
import math

import pytest
import torch

from engine.attention.backend import StepContext
from engine.attention.cpu import CpuAttention, flash_attn_varlen_func, flash_attn_with_kvcache
from engine.execution.pool import KVPool
from engine.models.model import KVLayout

DIM = 8


def definition(q, k, v, *, causal, window, softcap):
    """One sequence. q `[m, heads, dim]`; k, v `[n, kv_heads, dim]`."""
    m, heads, dim = q.shape
    n, kv_heads, _ = k.shape
    out = torch.zeros(m, heads, dim, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for r in range(m):
        at = r + n - m
        low = 0 if window[0] < 0 else max(0, at - window[0])
        right = 0 if causal else window[1]
        high = n - 1 if right < 0 else min(n - 1, at + right)
        if high < low:
            continue
        for h in range(heads):
            head = h // (heads // kv_heads)
            scores = k[low : high + 1, head] @ q[r, h] / math.sqrt(dim)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            out[r, h] = weights / weights.sum() @ v[low : high + 1, head]
    return out


class Paged:
    """Sequences laid into shuffled pages; everything unused is NaN, unused table entries absurd."""

    def __init__(self, k_lens, page, kv_heads, dtype, seed=0):
        g = torch.Generator().manual_seed(seed)
        columns = max(1, *(-(-n // page) for n in k_lens)) + 1
        total = sum(-(-n // page) for n in k_lens) + 3
        self.keys = [torch.randn(n, kv_heads, DIM, generator=g, dtype=dtype) for n in k_lens]
        self.values = [torch.randn(n, kv_heads, DIM, generator=g, dtype=dtype) for n in k_lens]
        self.k_cache = torch.full((total, page, kv_heads, DIM), math.nan, dtype=dtype)
        self.v_cache = torch.full((total, page, kv_heads, DIM), math.nan, dtype=dtype)
        self.table = torch.full((len(k_lens), columns), 2**30, dtype=torch.int32)
        free = iter((torch.randperm(total - 1, generator=g) + 1).tolist())
        for row, n in enumerate(k_lens):
            for column in range(-(-n // page)):
                block = next(free)
                self.table[row, column] = block
                part = slice(column * page, min(n, (column + 1) * page))
                self.k_cache[block, : part.stop - part.start] = self.keys[row][part]
                self.v_cache[block, : part.stop - part.start] = self.values[row][part]


def cumulative(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


SHAPES = [
    # query lengths, key lengths: decode, mixed, prefill, more queries than keys, an empty sequence
    ((1, 1, 1), (5, 17, 33)),
    ((1, 7, 9, 1), (12, 7, 21, 300)),
    ((140, 3), (150, 2)),
    ((6, 2), (4, 0)),
]


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (4, 2), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_varlen_computes_the_definition(page, causal, window, softcap, paged):
    worst = {torch.float64: 1e-12, torch.float32: 5e-6}
    for (heads, kv_heads), (q_lens, k_lens), dtype in itertools.product(
        [(4, 2), (3, 1), (2, 2)], SHAPES, worst
    ):
        pool = Paged(k_lens, page, kv_heads, dtype)
        q = torch.randn(sum(q_lens), heads, DIM, dtype=dtype)
        got = flash_attn_varlen_func(
            q,
            pool.k_cache if paged else torch.cat(pool.keys),
            pool.v_cache if paged else torch.cat(pool.values),
            cumulative(q_lens),
            cumulative(k_lens),
            max(q_lens),
            max(k_lens),
            causal=causal,
            window_size=window,
            softcap=softcap,
            block_table=pool.table if paged else None,
        )
        assert got.dtype == dtype
        want = torch.cat(
            [
                definition(part, k, v, causal=causal, window=window, softcap=softcap)
                for part, k, v in zip(q.split(q_lens), pool.keys, pool.values, strict=True)
            ]
        )
        assert (got.double() - want).abs().max() < worst[dtype]


@pytest.mark.parametrize("page", [8, 16, 256])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_kvcache_without_append_takes_the_total_length(page, num_queries):
    k_lens = (5, 9, 40, 4)
    pool = Paged(k_lens, page, 2, torch.float64)
    q = torch.randn(4, num_queries, 4, DIM, dtype=torch.float64)
    got = flash_attn_with_kvcache(
        q,
        pool.k_cache,
        pool.v_cache,
        cache_seqlens=torch.tensor(k_lens, dtype=torch.int32),
        block_table=pool.table,
        causal=True,
    )
    for row in range(4):
        want = definition(
            q[row], pool.keys[row], pool.values[row], causal=True, window=(-1, -1), softcap=0.0
        )
        assert (got[row] - want).abs().max() < 1e-12


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
def test_kvcache_appends_in_place_behind_the_old_length(paged):
    k_lens, page = (6, 8, 15), 8
    pool = Paged(k_lens, page, 1, torch.float64)
    k_cache, v_cache, table = pool.k_cache, pool.v_cache, pool.table
    if not paged:
        k_cache = torch.full((3, 24, 1, DIM), math.nan, dtype=torch.float64)
        v_cache = k_cache.clone()
        for row, n in enumerate(k_lens):
            k_cache[row, :n], v_cache[row, :n] = pool.keys[row], pool.values[row]
    else:
        table = table.clone()
        used = set(table[table < 2**30].tolist())
        spare = [b for b in range(1, k_cache.shape[0]) if b not in used]
        table[1, 1], table[2, 2] = spare[0], spare[1]
    q, k, v = (torch.randn(3, 2, h, DIM, dtype=torch.float64) for h in (2, 1, 1))
    got = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor(k_lens, dtype=torch.int32),
        block_table=table if paged else None,
        causal=True,
    )
    for row, n in enumerate(k_lens):
        keys = torch.cat([pool.keys[row], k[row]])
        values = torch.cat([pool.values[row], v[row]])
        want = definition(q[row], keys, values, causal=True, window=(-1, -1), softcap=0.0)
        assert (got[row] - want).abs().max() < 1e-12
        for i in range(2):
            at = n + i
            stored = k_cache[table[row, at // page], at % page] if paged else k_cache[row, at]
            assert torch.equal(stored, k[row, i])


def test_a_used_table_entry_out_of_range_raises():
    pool = Paged((20,), 8, 1, torch.float32)
    pool.table[0, 1] = pool.k_cache.shape[0]
    arguments = (torch.randn(1, 1, 1, DIM), pool.k_cache, pool.v_cache)
    lens = torch.tensor([20], dtype=torch.int32)
    with pytest.raises(IndexError, match="outside"):
        flash_attn_with_kvcache(*arguments, cache_seqlens=lens, block_table=pool.table)
    pool.table[0, 1] = -1
    with pytest.raises(IndexError, match="outside"):
        flash_attn_with_kvcache(*arguments, cache_seqlens=lens, block_table=pool.table)


def test_a_length_beyond_the_table_raises():
    pool = Paged((20,), 8, 1, torch.float32)
    with pytest.raises(IndexError, match="columns"):
        flash_attn_with_kvcache(
            torch.randn(1, 1, 1, DIM),
            pool.k_cache,
            pool.v_cache,
            cache_seqlens=torch.tensor([100], dtype=torch.int32),
            block_table=pool.table,
        )


def make_step(q_lens, k_lens, table, page):
    slots = [
        int(table[row, at // page]) * page + at % page
        for row, (m, n) in enumerate(zip(q_lens, k_lens, strict=True))
        for at in range(n - m, n)
    ]
    return StepContext(
        slots=torch.tensor(slots),
        cu_q=cumulative(q_lens),
        kv_lens=torch.tensor(k_lens, dtype=torch.int32),
        block_table=table,
        last=torch.tensor([int(n) - 1 for n in cumulative(q_lens)[1:]]),
        max_q=max(q_lens),
        max_k=max(k_lens),
        uniform_q=q_lens[0] if len(set(q_lens)) == 1 else None,
        q_lens=q_lens,
        k_lens=k_lens,
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_the_backend_stores_then_attends_over_the_strided_pool(page, window):
    """A mixed batch, its decode rows neither adjacent nor equally long; free slots are NaN."""
    q_lens, k_lens, layer = (1, 5, 1, 20, 1), (290, 9, 3, 31, 280), 1
    data = Paged(k_lens, page, 2, torch.float64)
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=DIM, dtype="float64", fingerprint="")
    pool = KVPool(layout, data.k_cache.shape[0], page)
    pool.data.fill_(math.nan)
    pool.keys(layer).copy_(data.k_cache)
    pool.values(layer).copy_(data.v_cache)
    new_k = torch.cat([k[n - m :] for k, m, n in zip(data.keys, q_lens, k_lens, strict=True)])
    new_v = torch.cat([v[n - m :] for v, m, n in zip(data.values, q_lens, k_lens, strict=True)])
    step = make_step(q_lens, k_lens, data.table, page)
    pool.keys(layer).view(-1, page, 2, DIM)[step.slots // page, step.slots % page] = math.nan
    q = torch.randn(sum(q_lens), 4, DIM, dtype=torch.float64)
    got = CpuAttention(window=window).attend(q, new_k, new_v, layer, pool, step)
    limits = (-1, -1) if window is None else (window - 1, 0)
    want = torch.cat(
        [
            definition(part, k, v, causal=True, window=limits, softcap=0.0)
            for part, k, v in zip(q.split(q_lens), data.keys, data.values, strict=True)
        ]
    )
    assert (got - want).abs().max() < 1e-12
    assert pool.keys(0).isnan().all(), "another layer was touched"
    assert torch.equal(pool.keys(layer).nan_to_num(7.0), data.k_cache.nan_to_num(7.0))


def test_a_negative_slot_raises_instead_of_overwriting_the_last_block():
    data = Paged((3,), 8, 1, torch.float32)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, dtype="float32", fingerprint="")
    pool = KVPool(layout, data.k_cache.shape[0], 8)
    step = make_step((1,), (3,), data.table, 8)
    step.slots = torch.tensor([-1])
    one = torch.randn(1, 1, DIM)
    with pytest.raises(IndexError, match="slots"):
        CpuAttention().attend(one, one, one, 0, pool, step)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "varlen"])
@pytest.mark.parametrize(
    "k_lens",
    [
        tuple((37 * i) % 500 + 1 for i in range(23)),
        # Sorted by length, and still one group.
        (80, 300, 290, 295),
    ],
    ids=["many groups", "one group"],
)
def test_uneven_decode_rows_come_back_to_their_own_places(k_lens, backend):
    q_lens = (1,) * len(k_lens)
    data = Paged(k_lens, 16, 1, torch.float64)
    q = torch.randn(len(k_lens), 3, DIM, dtype=torch.float64)
    if backend:
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=DIM, dtype="float64", fingerprint=""
        )
        pool = KVPool(layout, data.k_cache.shape[0], 16)
        pool.keys(0).copy_(data.k_cache)
        pool.values(0).copy_(data.v_cache)
        newest = torch.stack([k[-1] for k in data.keys]), torch.stack([v[-1] for v in data.values])
        step = make_step(q_lens, k_lens, data.table, 16)
        got = CpuAttention().attend(q, *newest, 0, pool, step)
    else:
        got = flash_attn_varlen_func(
            q,
            data.k_cache,
            data.v_cache,
            cumulative(q_lens),
            cumulative(k_lens),
            1,
            max(k_lens),
            causal=True,
            block_table=data.table,
        )
    for row in range(len(k_lens)):
        want = definition(
            q[row : row + 1],
            data.keys[row],
            data.values[row],
            causal=True,
            window=(-1, -1),
            softcap=0.0,
        )
        assert (got[row] - want[0]).abs().max() < 1e-12
