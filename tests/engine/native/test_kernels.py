"""Each kernel against torch in float64, over sizes that fit no vector and a pool full of NaN."""

import math

import pytest
import torch
import torch.nn.functional as F

from engine.models.decoder import RotaryAngles, rotate

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def values(*shape, dtype, seed=0, scale=1.0):
    """Random numbers that `dtype` holds exactly, in float64."""
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype).double()


def close(got, want, dtype):
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) < TOLERANCE[dtype] * float(1 + want.abs().max())


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 65, 130])
@pytest.mark.parametrize("sizes", [(1, 1), (31, 3), (33, 64), (70, 37), (96, 129)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_product_is_that_of_float64(kind, make, rows, sizes, num_threads):
    dtype, _ = kind
    model = make.decoder(kind, num_threads=num_threads)
    out, size = sizes
    x, w = values(rows, size, dtype=dtype), values(out, size, dtype=dtype, seed=1)
    b = values(out, dtype=dtype, seed=2)
    scale = math.sqrt(size)
    close(model.linear(x, w / scale), x @ (w / scale).to(dtype).double().T, dtype)
    close(model.linear(x, w, b), x @ w.T + b, dtype)


def test_rows_of_a_product_do_not_depend_on_their_company(kind, make):
    dtype, _ = kind
    model = make.decoder(kind, num_threads=2)
    x, w = values(70, 83, dtype=dtype), values(45, 83, dtype=dtype, seed=1)
    whole = model.linear(x, w)
    for rows in (slice(0, 1), slice(3, 8), slice(10, 23), slice(1, 70)):
        assert torch.equal(model.linear(x[rows], w), whole[rows])


@pytest.mark.parametrize("rows", [127, 128, 200, 333])
def test_many_rows_are_the_same_by_any_number_of_threads(kind, make, rows):
    """From some number on, each thread begins with rows of its own instead of outputs."""
    dtype, _ = kind
    x, w = values(rows, 83, dtype=dtype), values(101, 83, dtype=dtype, seed=1)
    want = make.decoder(kind).linear(x, w)
    for num_threads in (2, 3, 5):
        got = make.decoder(kind, num_threads=num_threads).linear(x, w)
        assert torch.equal(got, want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1, 15, 16, 33, 50])
def test_the_gated_product_is_that_of_float64(kind, make, activation, inner):
    dtype, _ = kind
    model = make.decoder(kind, activation=activation)
    x = values(5, 37, dtype=dtype)
    gate, up = values(inner, 37, dtype=dtype, seed=1), values(inner, 37, dtype=dtype, seed=2)
    sides = x @ gate.T
    active = F.silu(sides) if activation == "silu" else F.gelu(sides, approximate="tanh")
    close(model.gated(x, gate, up), active * (x @ up.T), dtype)


def test_the_gate_closes_and_opens_at_the_ends_of_the_range(kind, make):
    dtype, _ = kind
    model = make.decoder(kind)
    x = torch.tensor([[1.0]], dtype=torch.float64)
    gate = torch.tensor([[-1e4], [-200.0], [-88.0], [0.0], [88.0], [200.0], [1e4]]).double()
    got = model.gated(x, gate, torch.ones_like(gate))
    close(got, F.silu(gate.to(dtype).double()).T, dtype)


@pytest.mark.parametrize("size", [1, 10, 16, 33, 576])
def test_the_norm_is_that_of_float64(kind, make, size):
    dtype, _ = kind
    x = values(4, size, dtype=dtype)
    weight = values(size, dtype=dtype, seed=1)
    close(make.decoder(kind).norm(x, weight), F.rms_norm(x, (size,), weight, 1e-5), dtype)


def attend(q, k, v, queries, window):
    """q `[queries, heads, dim]` against k, v `[keys, kv_heads, dim]`, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    position = torch.arange(k.shape[0])
    query = position[k.shape[0] - queries :, None]
    seen = position <= query
    if window:
        seen &= position > query - window
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


SHAPES = {
    "gqa": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "wide heads": {"head_dim": 66, "num_heads": 6, "num_kv_heads": 2},
    "heads of whole vectors": {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1},
    "a large group": {"head_dim": 32, "num_heads": 100, "num_kv_heads": 1},
    "normalised": {"qk_norm": True},
    "window": {"window": 9},
    "window of a round": {"window": 64},
    "window of one": {"window": 1},
}


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_float64(kind, make, shape, block_tokens):
    """Keys before this step's are written first, in a pass of their own."""
    dtype, _ = kind
    model = make.decoder(kind, num_threads=2, **SHAPES[shape])
    a = model.architecture
    lengths = [(1, 1), (1, 64), (1, 65), (130, 130), (40, 100), (3, 200), (1, 150), (2, 1100)]
    batch = make.batch(model, lengths, block_tokens=block_tokens)
    rows = a.num_heads + 2 * a.num_kv_heads
    qkv = [
        values(keys, rows, a.head_dim, dtype=torch.float32, seed=i)
        for i, (_, keys) in enumerate(lengths)
    ]
    for first in (True, False):
        whole = [(keys - queries, keys - queries) for queries, keys in lengths]
        batch.lengths = [(q, k) for q, k in whole if k] if first else lengths
        kept = batch.blocks
        if first:
            batch.blocks = [b for b, (_, k) in zip(batch.blocks, whole, strict=True) if k]
        _, _, step = batch.inputs()
        batch.blocks = kept
        parts = [
            x[:k] if first else x[k:]
            for x, (_, k) in zip(qkv, whole, strict=True)
            if k or not first
        ]
        got = model.attention(torch.cat(parts), 1, batch.pool, step)

    angles = RotaryAngles(a.rope, a.head_dim, torch.float64, torch.device("cpu"))
    want = []
    for (queries, keys), x in zip(lengths, qkv, strict=True):
        cos, sin = angles.at(torch.arange(keys))
        q, k = x[:, : a.num_heads], x[:, a.num_heads : -a.num_kv_heads]
        if a.qk_norm:
            weights = make.tensors(a)
            q, k = (
                F.rms_norm(
                    part,
                    (a.head_dim,),
                    weights[f"layers.1.{name}_norm"].to(dtype).double(),
                    a.norm_eps,
                )
                for name, part in (("q", q), ("k", k))
            )
        q, k = rotate(q, cos, sin)[keys - queries :], rotate(k, cos, sin)
        stored_k, stored_v = k.to(dtype).double(), x[:, -a.num_kv_heads :].to(dtype).double()
        want.append(attend(q, stored_k, stored_v, queries, a.window))
    close(got, torch.cat(want), dtype)


def test_k_and_v_are_stored_where_the_step_says_and_nowhere_else(kind, make):
    dtype, _ = kind
    model = make.decoder(kind)
    a = model.architecture
    batch = make.batch(model, [(5, 20)], block_tokens=8)
    _, _, step = batch.inputs()
    qkv = values(5, a.num_heads + 2 * a.num_kv_heads, a.head_dim, dtype=torch.float32)
    batch.pool.data[list(batch.blocks), 1] = 0
    before = batch.pool.data.clone()
    model.attention(qkv, 1, batch.pool, step)
    for at, slot in enumerate(step.slots.tolist()):
        block, offset = divmod(slot, 8)
        stored = batch.pool.data[block, 1, 1, offset]
        assert torch.equal(stored, qkv[at, -a.num_kv_heads :].to(dtype))
        cos, sin = RotaryAngles(a.rope, a.head_dim, torch.float64, torch.device("cpu")).at(
            torch.tensor([15 + at])
        )
        k = rotate(qkv[at : at + 1, a.num_heads : -a.num_kv_heads], cos, sin)[0]
        close(batch.pool.data[block, 1, 0, offset].double(), k, dtype)
        before[block, 1, :, offset] = batch.pool.data[block, 1, :, offset]
    assert torch.equal(batch.pool.data.nan_to_num(7.0), before.nan_to_num(7.0))
