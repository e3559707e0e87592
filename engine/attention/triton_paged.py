"""Attention over the paged pool as a Triton kernel, for what flash-attn refuses.

Any block size and head dimension, float32, soft-capped scores, int8 and fp8 KV with a scale a token
and head. One kernel serves prompts, decode rows and both in one batch:

    program (request, query block, KV head x split)
        rows of the tile: the block's queries times the heads that share this KV head
        loop over the keys that any of them can see, a tile at a time, softmax kept online

Where queries are few, the keys of a request are cut into splits of a fixed length whose results a
second kernel joins; the length does not depend on the batch, so neither does a row's result. Keys
and values past a sequence's length are never loaded, so NaN may be there; table entries past it
aren't either. Softmax is float32.

The online softmax over splits is that of Dao et al., "Flash-Decoding for long-context inference"
(2023). Runs in Triton's interpreter on a CPU: set TRITON_INTERPRET=1 before this is imported.
"""

# Triton's types are those of kernels: calls from Python give numbers for `constexpr`, and launches
# take more than the kernel does. It may also not be installed.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.backend import StepContext
from engine.attention.slots import Index, store, written
from engine.execution.pool import KVPool

SPLIT_KEYS = 512
"""Keys of one split. A multiple of every key tile."""

MAX_SPLIT_QUERIES = 16
"""Steps with more queries a request fill the device without splits."""


@triton.jit
def _tile_step(
    acc,
    total,
    top,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    start,
    stop,
    kv_head,
    at,
    offset_d,
    scale,
    softcap,
    kv_block,
    kv_token,
    kv_head_stride,
    scale_block,
    scale_token,
    scale_head,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys `[start, start + BLOCK_N)` below `stop` to the running softmax of a tile."""
    position = start + tl.arange(0, BLOCK_N)
    real = position < stop
    if PAGE % BLOCK_N == 0:
        block = tl.load(table + start // PAGE).to(tl.int64)
        place = block * kv_block + (position % PAGE).to(tl.int64) * kv_token
        scale_place = block * scale_block + (position % PAGE).to(tl.int64) * scale_token
    else:
        blocks = tl.load(table + position // PAGE, mask=real, other=0).to(tl.int64)
        place = blocks * kv_block + (position % PAGE).to(tl.int64) * kv_token
        scale_place = blocks * scale_block + (position % PAGE).to(tl.int64) * scale_token
    place += kv_head * kv_head_stride
    inside = offset_d < DIM
    k = tl.load(
        keys + place[None, :] + offset_d[:, None], mask=real[None, :] & inside[:, None], other=0.0
    )
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
    if SCALED:
        scale_place += kv_head * scale_head
        scores *= tl.load(key_scales + scale_place, mask=real, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2 x) - 1: Triton's own tanh is a device library's, the interpreter
        # has none.
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    seen = real[None, :]
    if LEFT >= 0:
        seen = seen & (position[None, :] >= at[:, None] - LEFT)
    if RIGHT >= 0:
        seen = seen & (position[None, :] <= at[:, None] + RIGHT)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet stays at -inf; 0 in its place keeps exp() free of NaN.
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - anchor[:, None])
    shrink = tl.exp(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(
        values + place[:, None] + offset_d[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    if SCALED:
        weights *= tl.load(value_scales + scale_place, mask=real, other=0.0).to(tl.float32)[None, :]
    part = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
    return acc * shrink[:, None] + part, total, highest


@triton.jit
def _attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    part_out,
    part_total,
    part_top,
    table,
    cu_q,
    kv_lens,
    scale,
    softcap,
    q_token,
    q_head,
    out_token,
    out_head,
    kv_block,
    kv_token,
    kv_head_stride,
    scale_block,
    scale_token,
    scale_head,
    table_row,
    num_splits,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_Q
    kv_head = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    begin = tl.load(cu_q + row)
    q_len = tl.load(cu_q + row + 1) - begin
    if first >= q_len:
        return
    k_len = tl.load(kv_lens + row)
    shift = k_len - q_len

    member = tl.arange(0, BLOCK_M)
    query = first + member // GROUP
    head = kv_head * GROUP + member % GROUP
    mine = (member < BLOCK_Q * GROUP) & (query < q_len)
    at = query + shift
    token = (begin + query).to(tl.int64)
    offset_d = tl.arange(0, BLOCK_D)
    inside = mine[:, None] & (offset_d < DIM)[None, :]
    tile = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + offset_d[None, :],
        mask=inside,
        other=0.0,
    )

    low = 0
    high = k_len
    if LEFT >= 0:
        low = tl.maximum(low, first + shift - LEFT)
    if RIGHT >= 0:
        last = tl.minimum(first + BLOCK_Q, q_len) - 1
        high = tl.minimum(high, last + shift + RIGHT + 1)
    if SPLIT:
        low = tl.maximum(low, split * SPLIT_SIZE)
        high = tl.minimum(high, (split + 1) * SPLIT_SIZE)
    low = low // BLOCK_N * BLOCK_N

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for start in range(low, high, BLOCK_N):
        acc, total, top = _tile_step(
            acc,
            total,
            top,
            tile,
            keys,
            values,
            key_scales,
            value_scales,
            table + row.to(tl.int64) * table_row,
            start,
            high,
            kv_head,
            at,
            offset_d,
            scale,
            softcap,
            kv_block,
            kv_token,
            kv_head_stride,
            scale_block,
            scale_token,
            scale_head,
            LEFT,
            RIGHT,
            SOFTCAP,
            SCALED,
            PAGE,
            DIM,
            BLOCK_N,
            PRECISION,
        )
    if SPLIT:
        place = (token * (tl.num_programs(2) // num_splits * GROUP) + head) * num_splits + split
        tl.store(part_out + place[:, None] * BLOCK_D + offset_d[None, :], acc, mask=mine[:, None])
        tl.store(part_total + place, total, mask=mine)
        tl.store(part_top + place, top, mask=mine)
    else:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + token[:, None] * out_token + head[:, None] * out_head + offset_d[None, :],
            result.to(out.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _join(
    out,
    part_out,
    part_total,
    part_top,
    out_token,
    out_head,
    num_splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = (token * tl.num_programs(1) + head) * num_splits
    offset_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = 0.0
    top = float("-inf")
    for split in range(0, num_splits):
        part = tl.load(part_top + place + split)
        highest = tl.maximum(top, part)
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        old, new = tl.exp(top - anchor), tl.exp(part - anchor)
        total = total * old + tl.load(part_total + place + split) * new
        acc = acc * old + tl.load(part_out + (place + split) * BLOCK_D + offset_d) * new
        top = highest
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + token * out_token + head * out_head + offset_d,
        result.to(out.dtype.element_ty),
        mask=offset_d < DIM,
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch."""

    queries: int
    """Query tokens of a tile."""

    rows: int
    """Rows of a tile: queries times the heads of a group, and what is left of a power of two."""

    keys: int
    num_splits: int


def tiling(group: int, head_dim: int, max_q: int, max_k: int, itemsize: int = 2) -> Tiling:
    """How a step is cut. Pure: a function of the shapes alone, never of the batch.

    `itemsize` of q, bytes: tiles of float32 are smaller, so that they fit the 99 KiB that the
    smaller chips have for a program.
    """
    least = max(16, triton.next_power_of_2(group))  # tensor cores take 16 rows or more
    large = head_dim > 128
    wanted = 16 if max_q <= MAX_SPLIT_QUERIES else 64 if large else 128
    if itemsize > 2:
        wanted = min(wanted, 16 if large else 32)
    rows = max(least, min(wanted, triton.next_power_of_2(max_q * group)))
    num_splits = -(-max_k // SPLIT_KEYS) if max_q <= MAX_SPLIT_QUERIES else 1
    return Tiling(
        queries=rows // group,
        rows=rows,
        keys=(32 if large else 64) // (2 if itemsize > 2 else 1),
        num_splits=max(1, num_splits),
    )


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, 0),
    softcap: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attention of `[tokens, heads, dim]` queries over a paged cache, bottom-right aligned.

    keys, values: `[num_blocks, page, kv_heads, dim]`, strided as they like but for the last
    dimension; of q's type, or of a narrower one with `key_scales`, `value_scales` `[num_blocks,
    page, kv_heads]`. cu_q: `[requests + 1]`, kv_lens: `[requests]`, block_table: `[requests,
    columns]`, all int32. max_q, max_k: bounds of the lengths, which decide the launch; with static
    ones it can be captured. window: keys seen to the left and right, inclusive, -1 for all.
    Returns `[tokens, heads, dim]`; a query without keys gets 0.
    """
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if keys.stride() != values.stride():
        raise ValueError("keys and values must be laid out alike")
    if q.stride(-1) != 1 or keys.stride(-1) != 1:
        raise ValueError("the last dimension of q, keys and values must be contiguous")
    group = heads // kv_heads
    cut = tiling(group, dim, max_q, max_k, q.element_size())
    block_d = max(16, triton.next_power_of_2(dim))
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    split = cut.num_splits > 1
    places = (tokens, heads, cut.num_splits) if split else (1, 1, 1)
    part_out = torch.empty((*places, block_d), dtype=torch.float32, device=q.device)
    part_total = torch.empty(places, dtype=torch.float32, device=q.device)
    part_top = torch.empty(places, dtype=torch.float32, device=q.device)
    scaled = key_scales is not None
    scale_strides = key_scales.stride() if key_scales is not None else (0, 0, 0)
    grid = (kv_lens.shape[0], -(-max_q // cut.queries), kv_heads * cut.num_splits)
    _attend[grid](
        q,
        keys,
        values,
        key_scales if scaled else part_top,
        value_scales if scaled else part_top,
        out,
        part_out,
        part_total,
        part_top,
        block_table,
        cu_q,
        kv_lens,
        dim**-0.5 if softmax_scale is None else softmax_scale,
        softcap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        *scale_strides,
        block_table.stride(0),
        cut.num_splits,
        LEFT=window[0],
        RIGHT=window[1],
        SOFTCAP=softcap > 0,
        SCALED=scaled,
        SPLIT=split,
        SPLIT_SIZE=SPLIT_KEYS,
        PAGE=keys.shape[1],
        DIM=dim,
        BLOCK_D=block_d,
        GROUP=group,
        BLOCK_Q=cut.queries,
        BLOCK_M=cut.rows,
        BLOCK_N=cut.keys,
        # float32 is asked for by those who want float32, not tf32.
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4 if cut.rows <= 64 else 8,
        num_stages=2,
    )
    if split:
        _join[(tokens, heads)](
            out,
            part_out,
            part_total,
            part_top,
            out.stride(0),
            out.stride(1),
            cut.num_splits,
            DIM=dim,
            BLOCK_D=block_d,
        )
    return out


class TritonAttention:
    """`AttentionBackend` over the KV pool, for one model's layers."""

    def __init__(
        self,
        *,
        window: int | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        """`window`: tokens each token sees, itself included (transformers' `sliding_window`)."""
        self._window = (-1, 0) if window is None else (window - 1, 0)
        self._scale = softmax_scale
        self._softcap = softcap
        self._step: StepContext | None = None
        self._at: Index | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, pool: KVPool, step: StepContext
    ) -> Tensor:
        """Store k and v, then attend: see `AttentionBackend`."""
        if step is not self._step or layer == 0:
            self._at = written(step, pool.block_tokens)
            self._step = step
        assert self._at is not None
        store(k, v, layer, pool, self._at)
        coded = pool.layout.coded
        return paged_attention(
            q,
            pool.keys(layer),
            pool.values(layer),
            cu_q=step.cu_q,
            kv_lens=step.kv_lens,
            block_table=step.block_table,
            max_q=step.max_q,
            max_k=step.max_k,
            softmax_scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            key_scales=pool.key_scales(layer) if coded else None,
            value_scales=pool.value_scales(layer) if coded else None,
        )
