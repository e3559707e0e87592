"""flash-attn 2.8.3's two calls for a CPU: the same signatures, the same meaning, any page size.

What a backend for GPUs is held to where there is none. Every argument of the originals is there,
and does what it does there; what makes a kernel read beyond its tensors raises here instead.

- causal is bottom-right aligned: query r of n sees keys `<= r + m - n` of m; no key gives 0 and a
  log-sum-exp of +inf;
- `window_size` is inclusive on both sides, -1 is unlimited;
- scores are scaled, then soft-capped, then masked; softmax is float32 or wider;
- slots past a sequence's length may hold anything, even NaN; table entries past it are never read;
- `num_splits` and `deterministic` change no result that a definition could tell.

Written for clarity, one sequence at a time. Source: Dao-AILab/flash-attention v2.8.3,
`flash_attn/flash_attn_interface.py` and `csrc/flash_attn/flash_api.cpp`.
"""

# Torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

Window = tuple[int, int]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: Window,
    softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence. q `[n, heads, dim]`; k, v `[m, kv_heads, dim]`; slopes `[heads]`.

    Returns `[n, heads, dim]` in q's dtype and the log-sum-exp `[heads, n]`.
    """
    n, heads, dim = q.shape
    m, kv_heads, _ = k.shape
    wide = _wide(q.dtype)
    if m == 0 or n == 0:
        return torch.zeros_like(q), torch.full((heads, n), math.inf, dtype=wide)
    group = heads // kv_heads
    folded = q.to(wide).view(n, kv_heads, group, dim)
    scores = torch.einsum("nkgd,mkd->kgnm", folded, k.to(wide)).reshape(heads, n, m) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(n)[:, None] + m - n
    key = torch.arange(m)[None, :]
    if slopes is not None:
        scores = scores - slopes.to(wide)[:, None, None] * (at - key).abs()
    seen = torch.ones(n, m, dtype=torch.bool)
    left, right = window
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [heads, n]
    empty = ~seen.any(dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty[:, None], 0.0)
    out = torch.einsum("kgnm,mkd->nkgd", weights.view(kv_heads, group, n, m), v.to(wide))
    return out.reshape(n, heads, dim).to(q.dtype), lse.masked_fill(empty, math.inf)


def _checked(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: they must be alike")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are no multiple of {k.shape[-2]} KV heads")
    for name, cache in (("k", k), ("v", v)):
        if cache.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dimension")


def _int32(name: str, values: Tensor, shape: tuple[int, ...]) -> list[int]:
    if values.dtype != torch.int32 or tuple(values.shape) != shape:
        raise ValueError(f"{name} is {values.dtype} {tuple(values.shape)}, not int32 {shape}")
    return values.tolist()


def _blocks(table: Tensor, row: int, count: int, num_blocks: int) -> Tensor:
    """The first `count` blocks of a row of the table. The kernels read what is there, unchecked."""
    if count > table.shape[1]:
        raise IndexError(f"{count} blocks wanted of a table of {table.shape[1]} columns")
    blocks = table[row, :count].to(torch.int64)
    if count and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise IndexError(
            f"the block table names a block outside [0, {num_blocks}): "
            f"{int(blocks.min())}..{int(blocks.max())}"
        )
    return blocks


def _paged(cache: Tensor, table: Tensor, row: int, length: int) -> Tensor:
    """`[length, kv_heads, dim]`: the keys or values of one row of the table."""
    page = cache.shape[1]
    blocks = _blocks(table, row, -(-length // page), cache.shape[0])
    return cache[blocks].reshape(-1, *cache.shape[2:])[:length]


def _slopes(slopes: Tensor | None, row: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[row]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over sequences of different lengths, laid end to end.

    q: `[total_q, heads, dim]`. k, v: `[total_k, kv_heads, dim]`, or paged with `block_table`
    `[batch, columns]` int32: `[num_blocks, page, kv_heads, dim]`. `cu_seqlens_*`: `[batch + 1]`
    int32; paged, only the differences of `cu_seqlens_k` count. Returns `[total_q, heads, dim]`,
    with `return_attn_probs` also the log-sum-exp `[heads, total_q]`. Raises ValueError on shapes
    and lengths that disagree and for dropout, IndexError on a used table entry out of range.
    """
    del deterministic
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p={dropout_p}: nothing is dropped while serving; use 0")
    _checked(q, k, v)
    batch = cu_seqlens_q.shape[0] - 1
    cu_q = _int32("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    cu_k = _int32("cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    q_lens = [end - begin for begin, end in pairwise(cu_q)]
    k_lens = [end - begin for begin, end in pairwise(cu_k)]
    if max(q_lens, default=0) > max_seqlen_q or max(k_lens, default=0) > max_seqlen_k:
        raise ValueError(
            f"max_seqlen_q={max_seqlen_q}, max_seqlen_k={max_seqlen_k} are less than the longest "
            f"sequence ({max(q_lens)}, {max(k_lens)})"
        )
    swapped = (
        max_seqlen_q == 1
        and q.shape[1] > k.shape[-2]
        and window_size[0] < 0
        and window_size[1] < 0
        and alibi_slopes is None
    )
    if swapped and any(n != 1 for n in q_lens):
        # The kernel puts the group into the query axis and takes row i for sequence i
        # (flash_api.cpp, l. 592): an empty sequence would shift all that follow.
        raise ValueError(
            "with max_seqlen_q=1 each sequence must have exactly one query: pad with 1"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = (window_size[0], 0) if causal else window_size
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), math.inf, dtype=_wide(q.dtype))
    for row in range(batch):
        mine = slice(cu_q[row], cu_q[row + 1])
        if block_table is None:
            keys, values = k[cu_k[row] : cu_k[row + 1]], v[cu_k[row] : cu_k[row + 1]]
        else:
            keys = _paged(k, block_table, row, k_lens[row])
            values = _paged(v, block_table, row, k_lens[row])
        out[mine], lse[:, mine] = _sequence(
            q[mine],
            keys,
            values,
            scale=scale,
            window=window,
            softcap=softcap,
            slopes=_slopes(alibi_slopes, row),
        )
    return (out, lse, None) if return_attn_probs else out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `2 * cos.shape[1]` dimensions. x `[n, heads, dim]`, positions `[n]`."""
    half = cos.shape[1]
    wide = _wide(x.dtype)
    c, s = cos[positions].to(wide)[:, None], sin[positions].to(wide)[:, None]
    turned = x[..., : 2 * half].to(wide)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((pairs.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _append(
    cache: Tensor, new: Tensor, batch_row: int, first: int, row: int, table: Tensor | None
) -> None:
    """Write `new` `[n, kv_heads, dim]` at position `first` on."""
    end = first + new.shape[0]
    if table is None:
        if end > cache.shape[1]:
            raise IndexError(f"appending up to {end}: the cache holds {cache.shape[1]} tokens")
        cache[batch_row, first:end] = new
        return
    page = cache.shape[1]
    if end > table.shape[1] * page:
        raise IndexError(f"appending up to {end}: the table holds {table.shape[1] * page} tokens")
    blocks = _blocks(table, row, -(-end // page), cache.shape[0])
    at = torch.arange(first, end)
    cache[blocks[at // page], at % page] = new


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of equally many new queries a sequence over a cache, appending to it on request.

    q: `[batch, queries, heads, dim]`. k_cache, v_cache: `[batch, capacity, kv_heads, dim]`, or
    paged with `block_table` `[batch, columns]` int32: `[num_blocks, page, kv_heads, dim]`. k, v:
    `[batch, new, kv_heads, dim]`, written in place behind the first `cache_seqlens` `[batch]` int32
    keys: with them that is the length before the append, without them the total. None is the whole
    cache. Rotation (`rotary_cos`, `rotary_sin` `[positions, rotary_dim / 2]`) is for calls with k
    and v. Returns the shape of q, with `return_softmax_lse` also `[batch, heads, queries]`.

    Raises ValueError on arguments that disagree, IndexError on a used table entry out of range.
    """
    del num_splits
    _checked(q, k_cache, v_cache)
    batch, n, heads, dim = q.shape
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError("a paged cache has neither cache_batch_idx nor cache_leftpad")
    if (k is None) != (v is None):
        raise ValueError("k and v go together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotation is for calls that append: give k and v")
    if isinstance(cache_seqlens, int):
        if block_table is not None:
            # 2.8.3 makes as many lengths of it as there are blocks (fixed later, #1795).
            raise ValueError(f"cache_seqlens={cache_seqlens}: a paged cache needs a tensor")
        lens = [cache_seqlens] * batch
    elif cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is missing: where do k and v go?")
        columns = 1 if block_table is None else block_table.shape[1]
        lens = [columns * k_cache.shape[1]] * batch
    else:
        lens = _int32("cache_seqlens", cache_seqlens, (batch,))
    rows = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    window = (window_size[0], 0) if causal else window_size
    local = causal or window_size != (-1, -1)
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads, n), math.inf, dtype=_wide(q.dtype))
    for row in range(batch):
        length, queries = lens[row], q[row]
        if k is not None and v is not None:
            fresh = k[row]
            if rotary_cos is not None and rotary_sin is not None:
                at = length + torch.arange(fresh.shape[0])
                fresh = _rotate(fresh, rotary_cos, rotary_sin, at, rotary_interleaved)
                at = length + (torch.arange(n) if local else torch.zeros(n, dtype=torch.int64))
                queries = _rotate(queries, rotary_cos, rotary_sin, at, rotary_interleaved)
            _append(k_cache, fresh, rows[row], length, row, block_table)
            _append(v_cache, v[row], rows[row], length, row, block_table)
            length += fresh.shape[0]
        if block_table is None:
            keys = k_cache[rows[row], pads[row] : length]
            values = v_cache[rows[row], pads[row] : length]
        else:
            keys = _paged(k_cache, block_table, row, length)
            values = _paged(v_cache, block_table, row, length)
        out[row], lse[row] = _sequence(
            queries,
            keys,
            values,
            scale=scale,
            window=window,
            softcap=softcap,
            slopes=_slopes(alibi_slopes, row),
        )
    return (out, lse) if return_softmax_lse else out


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: Window = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.13 in the same manner.

    Differs from flash-attn's call in this: heads must be equally many unless `enable_gqa`, a paged
    call takes its lengths from `seqused_k`, and needs `num_splits=1` (pytorch/pytorch#194167).
    Raises ValueError on arguments that disagree.
    """
    del return_aux
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ValueError(f"{query.shape[1]} and {key.shape[-2]} heads without enable_gqa")
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("block_table requires seqused_k")
        if num_splits != 1:
            raise ValueError(f"num_splits={num_splits}: split keys are wrong over pages; use 1")
        cu_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    if cu_seq_k is None:
        raise ValueError("cu_seq_k is missing")
    out = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        softmax_scale=scale,
        window_size=window_size,
        block_table=block_table,
    )
    assert isinstance(out, Tensor)
    return out
