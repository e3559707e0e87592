"""Attention over keys and values that the pool holds as codes, against its definition."""

import math

import pytest
import torch

from engine.attention.backend import StepContext
from engine.attention.cpu import CpuAttention
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.quantisation.kv_codes import from_codes, to_codes

HEADS, KV_HEADS, DIM = 6, 2, 12
LENGTHS = ((1, 290), (5, 9), (1, 3), (20, 31), (1, 280))


def make_layout(dtype: str, kind: str) -> KVLayout:
    numbers = KVLayout(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, fingerprint="f"
    )
    return numbers.kept_as(kind)


def definition(q, k, v, window):
    """q `[m, heads, dim]` behind the last keys; k, v `[n, kv_heads, dim]`, float64."""
    group = HEADS // KV_HEADS
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    position = torch.arange(k.shape[0])
    query = position[k.shape[0] - q.shape[0] :, None]
    seen = position <= query
    if window:
        seen &= position > query - window
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Paged:
    """Every request in shuffled blocks of a pool whose every other byte says NaN."""

    def __init__(self, page, dtype, kind="int8"):
        g = torch.Generator().manual_seed(1)
        counts = [-(-n // page) for _, n in LENGTHS]
        free = (torch.randperm(sum(counts), generator=g) + 1).tolist()
        self.page = page
        self.pool = KVPool(make_layout("float64", kind), sum(counts) + 1, page)
        self.pool.data.fill_(255)
        self.table = torch.full((len(LENGTHS), max(counts)), 2**30, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor(free[:count])
            free = free[count:]
        self.k, self.v = (
            [torch.randn(n, KV_HEADS, DIM, generator=g, dtype=torch.float64) for _, n in LENGTHS]
            for _ in range(2)
        )
        self.q = [torch.randn(m, HEADS, DIM, generator=g, dtype=torch.float64) for m, _ in LENGTHS]
        self.k, self.v, self.q = ([x.to(dtype) for x in xs] for xs in (self.k, self.v, self.q))

    def step(self, lengths):
        slots = []
        for row, (m, n) in enumerate(lengths):
            at = torch.arange(n - m, n)
            slots.append(self.table[row, at // self.page].long() * self.page + at % self.page)
        q_lens, k_lens = (tuple(x) for x in zip(*lengths, strict=True))
        cu_q = torch.cumsum(torch.tensor([0, *q_lens]), 0).int()
        return StepContext(
            slots=torch.cat(slots),
            cu_q=cu_q,
            kv_lens=torch.tensor(k_lens, dtype=torch.int32),
            block_table=self.table,
            last=cu_q[1:].long() - 1,
            max_q=max(q_lens),
            max_k=max(k_lens),
            uniform_q=None,
            q_lens=q_lens,
            k_lens=k_lens,
        )

    def attend(self, attention, layer):
        """All but the last tokens first, then those."""
        before = [(n - m, n - m) for m, n in LENGTHS]
        attention.attend(
            torch.cat(
                [
                    torch.zeros_like(q[:1]).expand(n, -1, -1)
                    for q, (n, _) in zip(self.q, before, strict=True)
                ]
            ),
            torch.cat([k[:n] for k, (n, _) in zip(self.k, before, strict=True)]),
            torch.cat([v[:n] for v, (n, _) in zip(self.v, before, strict=True)]),
            layer,
            self.pool,
            self.step(before),
        )
        return attention.attend(
            torch.cat(self.q),
            torch.cat([k[n - m :] for k, (m, n) in zip(self.k, LENGTHS, strict=True)]),
            torch.cat([v[n - m :] for v, (m, n) in zip(self.v, LENGTHS, strict=True)]),
            layer,
            self.pool,
            self.step(LENGTHS),
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("page", "kind"), [(3, "int8"), (16, "int8"), (256, "int8"), (16, "fp8")])
def test_codes_are_attended_as_the_numbers_they_stand_for(page, kind, window, dtype):
    data = Paged(page, dtype, kind)
    got = data.attend(CpuAttention(window=window), 1)
    assert got.dtype == dtype
    codes = data.pool.code_dtype
    stands = [
        [from_codes(*to_codes(x, codes), torch.float64) for x in xs] for xs in (data.k, data.v)
    ]
    want = torch.cat(
        [definition(q.double(), k, v, window) for q, k, v in zip(data.q, *stands, strict=True)]
    )
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-8 * 3}[dtype]
    assert float((got.double() - want).abs().max()) < limit
    assert torch.equal(data.pool.data[:, 0], torch.full_like(data.pool.data[:, 0], 255))


def test_the_answer_lies_within_what_rounding_can_do():
    """Weights change by at most a factor e^(2 ds), where ds is what rounded keys add to a score."""
    data = Paged(16, torch.float64)
    got = data.attend(CpuAttention(), 0).split([m for m, _ in LENGTHS])
    for q, k, v, said in zip(data.q, data.k, data.v, got, strict=True):
        want = definition(q, k, v, None)
        half_k, half_v = (to_codes(x)[1].double().max() / 2 for x in (k, v))
        shift = half_k * q.abs().sum(-1).max() / math.sqrt(DIM)
        limit = half_v + torch.expm1(2 * shift) * v.abs().max()
        error = (said - want).abs().max()
        assert 0 < float(error) < float(limit)


def test_a_block_has_its_scales_with_it():
    """What one block's bytes say in another pool is what they said here."""
    data = Paged(16, torch.float64)
    data.attend(CpuAttention(), 0)
    pool, other = data.pool, KVPool(data.pool.layout, 3, 16)
    block = int(data.table[0, 0])
    other.block_bytes(2, 0, 2)[:] = pool.block_bytes(block, 0, 2)
    for layer in range(2):
        for mine, theirs in (
            (pool.keys(layer), other.keys(layer)),
            (pool.values(layer), other.values(layer)),
            (pool.key_scales(layer), other.key_scales(layer)),
            (pool.value_scales(layer), other.value_scales(layer)),
        ):
            assert torch.equal(theirs[2].nan_to_num(7.0), mine[block].nan_to_num(7.0))
    assert torch.equal(pool.keys(0)[block], to_codes(data.k[0][:16])[0])
    assert torch.equal(pool.key_scales(0)[block], to_codes(data.k[0][:16])[1])
