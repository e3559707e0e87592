"""Keys and values as codes in the native decoder, against the twin of torch and float64."""

import math

import pytest
import torch

from engine.models.decoder import Decoder, RotaryAngles, rotate
from engine.native.library import NativeUnavailable
from engine.quantisation.kv_codes import from_codes, to_codes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def values(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float32)


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


def stored(batch, row, layer, keys):
    """Keys and values of one request as the pool's codes stand for, float64."""
    at = torch.arange(keys)
    page = batch.pool.block_tokens
    blocks = torch.tensor(batch.blocks[row])[at // page]
    pool = batch.pool
    return [
        from_codes(codes[blocks, at % page], scales[blocks, at % page], torch.float64)
        for codes, scales in (
            (pool.keys(layer), pool.key_scales(layer)),
            (pool.values(layer), pool.value_scales(layer)),
        )
    ]


SHAPES = {
    "gqa": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4},
    "wide heads": {"head_dim": 68, "num_heads": 6, "num_kv_heads": 2},
    "heads of a cache line": {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1},
    "heads of more": {"head_dim": 96, "num_heads": 3, "num_kv_heads": 3},
    "heads of two": {"head_dim": 128, "num_heads": 4, "num_kv_heads": 2},
    "a large group": {"head_dim": 32, "num_heads": 100, "num_kv_heads": 1},
    "normalised": {"qk_norm": True, "head_dim": 20},
    "window": {"window": 9},
    "window of a round": {"window": 64},
}


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_float64_over_what_is_stored(kind, make, shape, block_tokens):
    """In a pool whose every other byte says NaN; keys before this step's are written first."""
    dtype, _ = kind
    model = make.decoder(kind, num_threads=2, kv_codes=True, **SHAPES[shape])
    a = model.architecture
    lengths = [(1, 1), (1, 64), (1, 65), (130, 130), (40, 100), (3, 200), (1, 150)]
    batch = make.batch(model, lengths, block_tokens=block_tokens)
    rows = a.num_heads + 2 * a.num_kv_heads
    qkv = [values(keys, rows, a.head_dim, seed=i) for i, (_, keys) in enumerate(lengths)]
    before = [keys - queries for queries, keys in lengths]
    blocks = batch.blocks
    batch.lengths = [(n, n) for n in before if n]
    batch.blocks = [b for b, n in zip(blocks, before, strict=True) if n]
    _, _, step = batch.inputs()
    model.attention(
        torch.cat([x[:n] for x, n in zip(qkv, before, strict=True)]), 1, batch.pool, step
    )
    batch.lengths, batch.blocks = lengths, blocks
    _, _, step = batch.inputs()
    got = model.attention(
        torch.cat([x[n:] for x, n in zip(qkv, before, strict=True)]), 1, batch.pool, step
    )

    angles = RotaryAngles(a.rope, a.head_dim, torch.float64, torch.device("cpu"))
    weights = make.tensors(a)
    want = []
    for row, ((queries, keys), x) in enumerate(zip(lengths, qkv, strict=True)):
        cos, sin = angles.at(torch.arange(keys))
        q, k = x.double()[:, : a.num_heads], x.double()[:, a.num_heads : -a.num_kv_heads]
        if a.qk_norm:
            q, k = (
                torch.nn.functional.rms_norm(
                    part,
                    (a.head_dim,),
                    weights[f"layers.1.{name}_norm"].to(dtype).double(),
                    a.norm_eps,
                )
                for name, part in (("q", q), ("k", k))
            )
        q, k = rotate(q, cos, sin)[keys - queries :], rotate(k, cos, sin)
        v = x.double()[:, -a.num_kv_heads :]
        kept_k, kept_v = stored(batch, row, 1, keys)
        for exact, kept in ((k, kept_k), (v, kept_v)):
            step_size = exact.abs().amax(-1, keepdim=True) / 127
            assert float(((kept - exact).abs() / step_size).max()) < 0.501
        want.append(attend(q, kept_k, kept_v, queries, a.window))
    want = torch.cat(want)
    assert torch.isfinite(got).all()
    error = float((got.double() - want).abs().max())
    assert error < TOLERANCE[dtype] * float(1 + want.abs().max())


@pytest.mark.parametrize("head_dim", [4, 12, 64, 68])
def test_codes_and_scales_are_those_of_the_twin_to_the_bit(kind, make, head_dim):
    """Values are not rotated, nor is the key of position 0: nothing comes before their rounding."""
    dtype, _ = kind
    model = make.decoder(kind, kv_codes=True, head_dim=head_dim)
    a = model.architecture
    batch = make.batch(model, [(20, 20)], block_tokens=8)
    _, _, step = batch.inputs()
    qkv = values(20, a.num_heads + 2 * a.num_kv_heads, head_dim)
    qkv[3] = 0
    qkv[4, -1] = torch.arange(head_dim) + 0.5  # ties
    before = batch.pool.data.clone()
    model.attention(qkv, 1, batch.pool, step)
    wide = qkv.double() if dtype == torch.float64 else qkv
    pool, page = batch.pool, 8
    for token, slot in enumerate(step.slots.tolist()):
        block, offset = divmod(slot, page)
        codes, scales = to_codes(wide[token, -a.num_kv_heads :])
        assert torch.equal(pool.values(1)[block, offset], codes)
        assert torch.equal(pool.value_scales(1)[block, offset], scales)
    block, offset = divmod(int(step.slots[0]), page)
    codes, scales = to_codes(wide[0, a.num_heads : -a.num_kv_heads])
    assert torch.equal(pool.keys(1)[block, offset], codes)
    assert torch.equal(pool.key_scales(1)[block, offset], scales)
    assert torch.equal(pool.data[:, 0], before[:, 0]), "another layer was touched"
    unused = pool.data[[b for b in range(pool.num_blocks) if b not in batch.blocks[0]]]
    assert (unused == 255).all()


def test_a_row_that_is_not_finite_gets_a_scale_that_is_no_number(kind, make):
    model = make.decoder(kind, kv_codes=True)
    a = model.architecture
    for bad in (math.nan, math.inf, -math.inf):
        batch = make.batch(model, [(3, 3)])
        _, _, step = batch.inputs()
        qkv = values(3, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        qkv[2, -1, 5] = bad
        got = model.attention(qkv, 0, batch.pool, step)
        scales = batch.pool.value_scales(0)[batch.blocks[0][0], :3]
        assert scales.isnan().tolist() == [[False, False], [False, False], [False, True]]
        assert torch.isfinite(got[:, :2]).all(), "the other head's"
        assert got[2, 2:].isnan().all()


def test_the_step_is_that_of_the_twin_under_one_fingerprint(kind, make):
    """Codes may differ by one where the twin rounded a key to bfloat16 first."""
    dtype, _ = kind
    ours = make.decoder(kind, kv_codes=True)
    plain = make.decoder(kind, head_dim=12)
    theirs = Decoder(
        ours.architecture,
        make.tensors(ours.architecture),
        dtype=dtype,
        fingerprint="small",
        kv_dtype="int8",
    )
    assert ours.layout == theirs.layout
    assert ours.layout.fingerprint != plain.layout.fingerprint
    batch, other = (make.batch(model, [(60, 60)]) for model in (ours, theirs))
    flat, positions, step = batch.inputs([[(7 * i) % 70 for i in range(60)]])
    step.last = torch.arange(60)
    got = ours.forward(flat, positions, batch.pool, step).double()
    want = theirs.forward(flat, positions, other.pool, step).double()
    limit = {torch.float64: 1e-11, torch.float32: 2e-2, torch.bfloat16: 0.15}[dtype]
    assert float((got - want).abs().max()) < limit * float(want.abs().max())


def test_heads_whose_scales_would_not_be_aligned_are_refused(kind, make):
    with pytest.raises(NativeUnavailable):
        make.decoder(kind, kv_codes=True, head_dim=10)
