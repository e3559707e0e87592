"""Attention written out row by row in float64, and sequences laid into a poisoned paged cache."""

import itertools
import math

import torch

from engine.attention.backend import StepContext
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.quantisation.kv_codes import from_codes, to_codes

SHAPES = [
    # query lengths, key lengths: decode, mixed, prefill, more queries than keys, an empty sequence
    ((1, 1, 1), (5, 17, 33)),
    ((1, 7, 9, 1), (12, 7, 21, 300)),
    ((140, 3), (150, 2)),
    ((6, 2), (4, 0)),
]


def definition(q, k, v, *, causal, window, softcap=0.0, scale=None, slopes=None):
    """One sequence. q `[m, heads, dim]`; k, v `[n, kv_heads, dim]`. Output and log-sum-exp."""
    m, heads, dim = q.shape
    n, kv_heads, _ = k.shape
    out = torch.zeros(m, heads, dim, dtype=torch.float64)
    lse = torch.full((heads, m), math.inf, dtype=torch.float64)
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))  # one for each head
    for r in range(m):
        at = r + n - m
        low = 0 if window[0] < 0 else max(0, at - window[0])
        right = 0 if causal else window[1]
        high = n - 1 if right < 0 else min(n - 1, at + right)
        if high < low:
            continue
        seen = slice(low, high + 1)
        scores = (k[seen] * q[r]).sum(-1) * (scale or 1 / math.sqrt(dim))  # [keys, heads]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes * (at - torch.arange(low, high + 1)).abs()[:, None]
        weights = torch.exp(scores - scores.amax(0))
        out[r] = (weights[:, :, None] * v[seen]).sum(0) / weights.sum(0)[:, None]
        lse[:, r] = scores.amax(0) + torch.log(weights.sum(0))
    return out, lse


def defined(q, keys, values, q_lens, **options):
    """The definition for sequences laid end to end: `[tokens, heads, dim]`."""
    parts = zip(q.split(list(q_lens)), keys, values, strict=True)
    return torch.cat([definition(part, k, v, **options)[0] for part, k, v in parts])


class Paged:
    """Sequences laid into shuffled pages; everything unused is NaN, unused table entries absurd."""

    def __init__(self, k_lens, page, kv_heads, dtype, dim=8, seed=0):
        g = torch.Generator().manual_seed(seed)
        columns = max(1, *(-(-n // page) for n in k_lens)) + 1
        total = sum(-(-n // page) for n in k_lens) + 3
        self.keys = [torch.randn(n, kv_heads, dim, generator=g, dtype=dtype) for n in k_lens]
        self.values = [torch.randn(n, kv_heads, dim, generator=g, dtype=dtype) for n in k_lens]
        self.k_cache = torch.full((total, page, kv_heads, dim), math.nan, dtype=dtype)
        self.v_cache = torch.full((total, page, kv_heads, dim), math.nan, dtype=dtype)
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
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
    )


def filled_pool(data, page, dtype, layer, layers=3, kv_dtype="auto"):
    """A pool whose other layers are NaN, with the sequences of `data` in one.

    Where it holds codes, free slots have scales that are NaN.
    """
    layout = KVLayout(
        num_layers=layers,
        num_kv_heads=data.k_cache.shape[2],
        head_dim=data.k_cache.shape[3],
        dtype=str(dtype).removeprefix("torch."),
        fingerprint="",
    )
    pool = KVPool(layout.kept_as(kv_dtype), data.k_cache.shape[0], page)
    if pool.layout.coded:
        for codes, scales, cache in (
            (pool.keys(layer), pool.key_scales(layer), data.k_cache),
            (pool.values(layer), pool.value_scales(layer), data.v_cache),
        ):
            for to, made in zip((codes, scales), to_codes(cache, pool.code_dtype), strict=True):
                to.copy_(made)
        return pool
    pool.data.fill_(math.nan)
    pool.keys(layer).copy_(data.k_cache)
    pool.values(layer).copy_(data.v_cache)
    return pool


def attend_over_pool(backend, q_lens, k_lens, *, page, window, dtype, softcap=0.0, dim=16, layer=1):
    """What a backend gives for one layer of a step, and what it should: 4 heads over 2 KV heads."""
    data = Paged(k_lens, page, 2, dtype, dim=dim)
    lens = list(zip(q_lens, k_lens, strict=True))
    new_k = torch.cat([k[n - m :] for k, (m, n) in zip(data.keys, lens, strict=True)])
    new_v = torch.cat([v[n - m :] for v, (m, n) in zip(data.values, lens, strict=True)])
    pool = filled_pool(data, page, dtype, layer)
    step = make_step(q_lens, k_lens, data.table, page)
    for blocks in (pool.keys(layer), pool.values(layer)):
        blocks[step.slots // page, step.slots % page] = math.nan  # what the step itself writes
    # As the decoder gives them: slices of one product, their rows apart.
    q = torch.randn(sum(q_lens), 6, dim, dtype=dtype)[:, :4]
    got = backend.attend(q, new_k, new_v, layer, pool, step)
    limits = (-1, -1) if window is None else (window - 1, 0)
    want = defined(q, data.keys, data.values, q_lens, causal=True, window=limits, softcap=softcap)
    assert pool.keys(0).isnan().all(), "another layer was touched"
    assert torch.equal(pool.keys(layer).nan_to_num(7.0), data.k_cache.nan_to_num(7.0))
    return got, want


def attend_over_codes(backend, q_lens, k_lens, *, page, dim=16, layer=1, kv_dtype="int8"):
    """The same for a pool of codes, in float32: it should be what the codes stand for."""
    data = Paged(k_lens, page, 2, torch.float32, dim=dim)
    lens = list(zip(q_lens, k_lens, strict=True))
    new_k = torch.cat([k[n - m :] for k, (m, n) in zip(data.keys, lens, strict=True)])
    new_v = torch.cat([v[n - m :] for v, (m, n) in zip(data.values, lens, strict=True)])
    pool = filled_pool(data, page, torch.float32, layer, kv_dtype=kv_dtype)
    step = make_step(q_lens, k_lens, data.table, page)
    for scales in (pool.key_scales(layer), pool.value_scales(layer)):
        scales[step.slots // page, step.slots % page] = math.nan  # what the step itself writes
    q = torch.randn(sum(q_lens), 4, dim)
    got = backend.attend(q, new_k, new_v, layer, pool, step)
    keys, values = (
        [from_codes(*to_codes(part, pool.code_dtype), torch.float64) for part in parts]
        for parts in (data.keys, data.values)
    )
    want = defined(q, keys, values, q_lens, causal=True, window=(-1, -1))
    return got, want
