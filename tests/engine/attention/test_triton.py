"""The Triton kernel in its interpreter, over the cases that the twins of flash-attn are held to."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention import SHAPES, Paged, attend_over_codes, attend_over_pool, cumulative, defined

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from engine.attention import triton_paged
from engine.attention.triton_paged import (
    SPLIT_KEYS,
    TritonAttention,
    paged_attention,
    tiling,
)

ALL = (-1, -1)
WORST = 2e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def attend(pool, q, q_lens, k_lens, *, causal=True, window=ALL, softcap=0.0, **more):
    return paged_attention(
        q.to(DEVICE),
        pool.k_cache.to(DEVICE),
        pool.v_cache.to(DEVICE),
        cu_q=cumulative(q_lens).to(DEVICE),
        kv_lens=torch.tensor(k_lens, dtype=torch.int32, device=DEVICE),
        block_table=pool.table.to(DEVICE),
        max_q=max(q_lens),
        max_k=max(k_lens),
        window=(window[0], 0) if causal else window,
        softcap=softcap,
        **more,
    ).cpu()


CASES = [
    (heads, page, causal, window, softcap)
    for (heads, page), causal, window, softcap in itertools.product(
        [((4, 2), 8), ((3, 1), 256), ((2, 2), 5)],
        [True, False],
        [ALL, (3, 0), (4, 2), (0, 0)],
        [0.0, 1.5],
    )
    if page == 8 or causal == (softcap > 0)  # the interpreter takes half a second for each
]


@pytest.mark.parametrize(("heads", "page", "causal", "window", "softcap"), CASES)
def test_it_computes_the_definition(heads, page, causal, window, softcap):
    for q_lens, k_lens in SHAPES:
        pool = Paged(k_lens, page, heads[1], torch.float32)
        q = torch.randn(sum(q_lens), heads[0], 8)
        options = {"causal": causal, "window": window, "softcap": softcap}
        got = attend(pool, q, q_lens, k_lens, **options)
        want = defined(q, pool.keys, pool.values, q_lens, **options)
        assert (got.double() - want).abs().max() < WORST


@pytest.mark.parametrize("dim", [16, 24, 160])
def test_any_head_dimension_will_do(dim):
    q_lens, k_lens = (1, 5), (70, 9)
    pool = Paged(k_lens, 16, 1, torch.float32, dim=dim)
    q = torch.randn(6, 2, dim)
    got = attend(pool, q, q_lens, k_lens)
    want = defined(q, pool.keys, pool.values, q_lens, causal=True, window=ALL)
    assert (got.double() - want).abs().max() < WORST


@pytest.mark.parametrize("window", [ALL, (600, 0)])
def test_splits_of_long_sequences_are_joined(window):
    q_lens, k_lens = (1, 1, 3), (SPLIT_KEYS + 1, 40, 2 * SPLIT_KEYS)
    assert tiling(2, 8, 3, max(k_lens)).num_splits == 2
    pool = Paged(k_lens, 64, 1, torch.float32)
    q = torch.randn(5, 2, 8)
    got = attend(pool, q, q_lens, k_lens, window=window)
    want = defined(q, pool.keys, pool.values, q_lens, causal=True, window=window)
    assert (got.double() - want).abs().max() < WORST


def test_a_row_is_the_same_in_any_batch_and_under_any_bound():
    k_lens = (700, 30, 513)
    pool = Paged(k_lens, 16, 2, torch.float32)
    q = torch.randn(3, 4, 8)
    together = attend(pool, q, (1, 1, 1), k_lens)
    for row in range(3):
        alone = paged_attention(
            q[row : row + 1].to(DEVICE),
            pool.k_cache.to(DEVICE),
            pool.v_cache.to(DEVICE),
            cu_q=cumulative((1,)).to(DEVICE),
            kv_lens=torch.tensor([k_lens[row]], dtype=torch.int32, device=DEVICE),
            block_table=pool.table[row : row + 1].to(DEVICE),
            max_q=1,
            max_k=2048,  # as a captured graph has it
        ).cpu()
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("narrow", [torch.int8, torch.float8_e4m3fn])
def test_narrow_kv_is_scaled_by_token_and_head(narrow):
    q_lens, k_lens, page = (1, 6), (40, 9), 16
    pool = Paged(k_lens, page, 2, torch.float32)
    q = torch.randn(7, 4, 8)
    exact = {"k_cache": pool.k_cache, "v_cache": pool.v_cache}
    largest = 127.0 if narrow == torch.int8 else 448.0
    scales, codes, seen = {}, {}, {}
    for name, cache in exact.items():
        scale = cache.nan_to_num(1.0).abs().amax(-1) / largest
        code = cache.nan_to_num(0.0) / scale[..., None]
        code = (code.round() if narrow == torch.int8 else code).to(narrow)
        seen[name] = code.float() * scale[..., None]
        # Free slots: the scales may be anything too.
        scales[name] = torch.where(cache.isnan().all(-1), math.nan, scale)
        codes[name] = code
    got = paged_attention(
        q.to(DEVICE),
        codes["k_cache"].to(DEVICE),
        codes["v_cache"].to(DEVICE),
        cu_q=cumulative(q_lens).to(DEVICE),
        kv_lens=torch.tensor(k_lens, dtype=torch.int32, device=DEVICE),
        block_table=pool.table.to(DEVICE),
        max_q=6,
        max_k=40,
        key_scales=scales["k_cache"].to(DEVICE),
        value_scales=scales["v_cache"].to(DEVICE),
    ).cpu()

    def laid_out(cache):
        return [
            cache[pool.table[row, : -(-n // page)].long()].flatten(0, 1)[:n]
            for row, n in enumerate(k_lens)
        ]

    want = defined(
        q,
        laid_out(seen["k_cache"]),
        laid_out(seen["v_cache"]),
        q_lens,
        causal=True,
        window=ALL,
    )
    assert (got.double() - want).abs().max() < 5e-5


@pytest.mark.skipif(DEVICE == "cuda", reason="the pool of this test is in host memory")
@pytest.mark.parametrize("window", [None, 5])
def test_the_backend_stores_then_attends_over_the_strided_pool(window):
    got, want = attend_over_pool(
        TritonAttention(window=window),
        (1, 7, 1),
        (12, 7, 300),
        page=16,
        window=window,
        dtype=torch.float32,
    )
    assert (got.double() - want).abs().max() < WORST


@pytest.mark.skipif(DEVICE == "cuda", reason="the pool of this test is in host memory")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_the_backend_reads_and_writes_a_pool_of_codes(kv_dtype):
    got, want = attend_over_codes(
        TritonAttention(), (1, 7, 1), (12, 7, 300), page=16, kv_dtype=kv_dtype
    )
    assert (got.double() - want).abs().max() < 5e-5


def test_layouts_that_it_cannot_read_raise():
    pool = Paged((4,), 8, 2, torch.float32)
    q = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="no multiple"):
        attend(pool, q, (1,), (4,))
    pool.v_cache = pool.v_cache.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="laid out alike"):
        attend(pool, q[:, :2], (1,), (4,))


@pytest.mark.parametrize(
    ("group", "dim", "max_q", "itemsize"),
    list(itertools.product([1, 3, 8, 64], [64, 256], [1, 4, 100], [2, 4])),
)
def test_every_query_of_a_step_is_in_exactly_one_tile(group, dim, max_q, itemsize):
    cut = tiling(group, dim, max_q, 4096, itemsize)
    assert cut.rows & (cut.rows - 1) == 0
    assert cut.rows >= 16
    assert cut.queries >= 1
    assert cut.queries * group <= cut.rows
    assert SPLIT_KEYS % cut.keys == 0
    assert cut.num_splits == (8 if max_q <= triton_paged.MAX_SPLIT_QUERIES else 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability):
    script = Path(__file__).parents[2] / "support" / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env={**environment, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    taken = {line.split()[0]: int(line.split()[-1]) for line in done.stdout.splitlines()}
    assert len(taken) == (10 if capability >= 89 else 9)
    assert max(taken.values()) <= 99 * 1024, "the smaller chips have no more"
