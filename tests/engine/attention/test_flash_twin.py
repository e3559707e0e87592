"""The twins of flash-attn's calls against the definition, over the whole contract."""

import inspect
import itertools
import math

import pytest
import torch
from attention import SHAPES, Paged, cumulative, defined, definition

from engine.attention.flash_twin import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    varlen_attn,
)

DIM = 8
WORST = {torch.float64: 1e-12, torch.float32: 5e-6}
HEADS = [(4, 2), (3, 1), (2, 2)]
ALL = (-1, -1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


VARLEN = """
    q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal
    window_size softcap alibi_slopes deterministic return_attn_probs block_table
"""
WITH_KVCACHE = """
    q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad
    block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits
    return_softmax_lse
"""


@pytest.mark.parametrize(
    ("twin", "names"),
    [(flash_attn_varlen_func, VARLEN), (flash_attn_with_kvcache, WITH_KVCACHE)],
)
def test_the_signatures_are_those_of_flash_attn_2_8_3(twin, names):
    assert list(inspect.signature(twin).parameters) == names.split()


def test_the_signature_of_varlen_attn_is_torchs():
    from torch.nn.attention import varlen

    assert list(inspect.signature(varlen_attn).parameters) == list(
        inspect.signature(varlen.varlen_attn).parameters
    )


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [ALL, (3, 0), (4, 2), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [8, 256])
def test_varlen_computes_the_definition(page, causal, window, softcap, paged):
    for (heads, kv_heads), (q_lens, k_lens), dtype in itertools.product(HEADS, SHAPES, WORST):
        pool = Paged(k_lens, page, kv_heads, dtype)
        q = torch.randn(sum(q_lens), heads, DIM, dtype=dtype)
        got, lse, _ = flash_attn_varlen_func(
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
            return_attn_probs=True,
        )
        assert got.dtype == dtype
        want = [
            definition(part, k, v, causal=causal, window=window, softcap=softcap)
            for part, k, v in zip(q.split(q_lens), pool.keys, pool.values, strict=True)
        ]
        assert (got.double() - torch.cat([w[0] for w in want])).abs().max() < WORST[dtype]
        wanted = torch.cat([w[1] for w in want], dim=1)
        assert torch.equal(lse.isinf(), wanted.isinf())
        assert (lse.double() - wanted).nan_to_num(0.0).abs().max() < WORST[dtype]


@pytest.mark.parametrize("page", [8, 256])
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("window", [ALL, (3, 0)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_kvcache_without_append_takes_the_total_length(page, num_queries, window, softcap):
    k_lens = (5, 9, 40, 2)
    pool = Paged(k_lens, page, 2, torch.float64)
    q = torch.randn(4, num_queries, 4, DIM, dtype=torch.float64)
    results = [
        flash_attn_with_kvcache(
            q,
            pool.k_cache,
            pool.v_cache,
            cache_seqlens=torch.tensor(k_lens, dtype=torch.int32),
            block_table=pool.table,
            causal=True,
            window_size=window,
            softcap=softcap,
            num_splits=splits,
            return_softmax_lse=True,
        )
        for splits in (0, 1, 7)
    ]
    got, lse = results[0]
    assert all(torch.equal(got, other) for other, _ in results), "num_splits changes no result"
    for row in range(4):
        want, wanted = definition(
            q[row], pool.keys[row], pool.values[row], causal=True, window=window, softcap=softcap
        )
        assert (got[row] - want).abs().max() < 1e-12
        assert torch.allclose(lse[row], wanted, atol=1e-12)


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
        want, _ = definition(q[row], keys, values, causal=True, window=ALL)
        assert (got[row] - want).abs().max() < 1e-12
        for i in range(2):
            at = n + i
            stored = k_cache[table[row, at // page], at % page] if paged else k_cache[row, at]
            assert torch.equal(stored, k[row, i])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_kvcache_rotates_what_it_appends_and_the_queries(interleaved, causal):
    lens, new, rotary = (3, 6), 2, 4
    angles = torch.randn(32, rotary // 2, dtype=torch.float64)

    def turned(x, positions):
        out = x.clone()
        for i, at in enumerate(positions):
            for pair in range(rotary // 2):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
                c, s = torch.cos(angles[at, pair]), torch.sin(angles[at, pair])
                out[i, :, a] = x[i, :, a] * c - x[i, :, b] * s
                out[i, :, b] = x[i, :, a] * s + x[i, :, b] * c
        return out

    q, k, v = (torch.randn(2, new, h, DIM, dtype=torch.float64) for h in (2, 1, 1))
    k_cache = torch.randn(2, 16, 1, DIM, dtype=torch.float64)
    v_cache = torch.randn(2, 16, 1, DIM, dtype=torch.float64)
    before = k_cache.clone()
    got = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        cache_seqlens=torch.tensor(lens, dtype=torch.int32),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    for row, n in enumerate(lens):
        keys = torch.cat([before[row, :n], turned(k[row], range(n, n + new))])
        # Without a mask all queries count as being at the first new position.
        at = range(n, n + new) if causal else [n] * new
        want, _ = definition(
            turned(q[row], at), keys, v_cache[row, : n + new], causal=causal, window=ALL
        )
        assert (got[row] - want).abs().max() < 1e-12


def test_kvcache_follows_batch_indices_and_leaves_out_left_padding():
    cache_k = torch.randn(4, 12, 1, DIM, dtype=torch.float64)
    cache_v = torch.randn(4, 12, 1, DIM, dtype=torch.float64)
    cache_k[2, :3] = math.nan
    q = torch.randn(2, 2, 2, DIM, dtype=torch.float64)
    got = flash_attn_with_kvcache(
        q,
        cache_k,
        cache_v,
        cache_seqlens=torch.tensor([9, 5], dtype=torch.int32),
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32),
        cache_leftpad=torch.tensor([3, 0], dtype=torch.int32),
        causal=True,
    )
    for row, (at, keys) in enumerate([(2, slice(3, 9)), (0, slice(0, 5))]):
        want, _ = definition(q[row], cache_k[at, keys], cache_v[at, keys], causal=True, window=ALL)
        assert (got[row] - want).abs().max() < 1e-12


@pytest.mark.parametrize("per_sequence", [True, False])
def test_linear_biases_and_scales_are_those_of_the_definition(per_sequence):
    q_lens, k_lens = (2, 3), (7, 3)
    pool = Paged(k_lens, 8, 2, torch.float64)
    q = torch.randn(5, 4, DIM, dtype=torch.float64)
    slopes = torch.rand(2, 4) if per_sequence else torch.rand(4)
    got = flash_attn_varlen_func(
        q,
        torch.cat(pool.keys),
        torch.cat(pool.values),
        cumulative(q_lens),
        cumulative(k_lens),
        3,
        7,
        causal=True,
        softmax_scale=0.3,
        alibi_slopes=slopes,
    )
    want = torch.cat(
        [
            definition(
                part,
                pool.keys[row],
                pool.values[row],
                causal=True,
                window=ALL,
                scale=0.3,
                slopes=slopes[row] if per_sequence else slopes,
            )[0]
            for row, part in enumerate(q.split(q_lens))
        ]
    )
    assert (got - want).abs().max() < 1e-6  # slopes are float32


def test_torchs_call_takes_its_lengths_apart():
    q_lens, k_lens = (1, 7), (12, 21)
    pool = Paged(k_lens, 256, 1, torch.float64)
    q = torch.randn(8, 2, DIM, dtype=torch.float64)
    got = varlen_attn(
        q,
        pool.k_cache,
        pool.v_cache,
        cumulative(q_lens),
        None,
        7,
        21,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=torch.tensor(k_lens, dtype=torch.int32),
        block_table=pool.table,
        num_splits=1,
    )
    want = defined(q, pool.keys, pool.values, q_lens, causal=True, window=ALL)
    assert (got - want).abs().max() < 1e-12


def arguments(**changed):
    pool = Paged((20,), 8, 1, torch.float32)
    return {
        "q": torch.randn(1, 1, 2, DIM),
        "k_cache": pool.k_cache,
        "v_cache": pool.v_cache,
        "cache_seqlens": torch.tensor([20], dtype=torch.int32),
        "block_table": pool.table,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"cache_seqlens": torch.tensor([100], dtype=torch.int32)}, IndexError, "columns"),
        ({"cache_seqlens": torch.tensor([20])}, ValueError, "not int32"),
        ({"cache_seqlens": 20}, ValueError, "needs a tensor"),
        ({"cache_batch_idx": torch.tensor([0])}, ValueError, "neither"),
        ({"k": torch.randn(1, 1, 1, DIM)}, ValueError, "go together"),
        ({"rotary_cos": torch.randn(32, 2)}, ValueError, "calls that append"),
        ({"q": torch.randn(1, 1, 2, DIM).double()}, ValueError, "must be alike"),
    ],
)
def test_arguments_that_disagree_raise(changed, error, message):
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments(**changed))


@pytest.mark.parametrize("block", [-1, 1000])
def test_a_used_table_entry_out_of_range_raises(block):
    given = arguments()
    given["block_table"][0, 1] = block
    with pytest.raises(IndexError, match="outside"):
        flash_attn_with_kvcache(**given)


def test_an_empty_row_in_a_batch_of_single_queries_raises_as_the_kernel_would_misplace_it():
    pool = Paged((5, 6, 7), 8, 1, torch.float32)
    with pytest.raises(ValueError, match="exactly one query"):
        flash_attn_varlen_func(
            torch.randn(2, 2, DIM),
            pool.k_cache,
            pool.v_cache,
            torch.tensor([0, 1, 1, 2], dtype=torch.int32),
            cumulative((5, 6, 7)),
            1,
            7,
            causal=True,
            block_table=pool.table,
        )


def test_appending_beyond_a_cache_raises():
    q, k, v = (torch.randn(1, 3, h, DIM) for h in (2, 1, 1))
    with pytest.raises(IndexError, match="the cache holds 4"):
        flash_attn_with_kvcache(
            q,
            torch.zeros(1, 4, 1, DIM),
            torch.zeros(1, 4, 1, DIM),
            k,
            v,
            cache_seqlens=torch.tensor([2], dtype=torch.int32),
        )
