"""Attention on the CPU over the KV pool.

A step is planned once on the host: which keys each group of requests reads (`_plan`). Each layer
then runs that plan:

- causal is bottom-right aligned: query r of n sees keys `<= r + m - n` of m; no key gives 0;
- slots past a sequence's real length may hold anything, even NaN: they are zeroed after the gather;
- table entries past the real length are never read; a used entry out of range raises `IndexError`;
- scores and softmax are computed in float32 or more; float64 stays float64;
- keys and values that the pool holds as codes are rounded when they are stored, those of this step
  too, and attended as what the codes stand for.

The query heads of one KV head are folded into the query axis, [keys, dim] x [group * queries, dim]:
torch's `enable_gqa` is about ten times slower on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import StepContext
from engine.attention.slots import store
from engine.execution.pool import KVPool

_SPAN_TOKENS = 64
"""Queries of a long chunk attended in one call: a causal chunk skips the keys it can't see."""

_BATCH_TOKENS = 16
"""Chunks up to this long are attended together with others of their length."""

_WASTE_KEYS = 256
"""Padding keys a group may gather before another call (about 50 µs) becomes the cheaper choice."""

_GROUP_KEYS = 32768
"""Keys one group may gather: bounds the scratch memory."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Queries `[q_start, q_stop)` of each request in a tile, against keys `[k_start, k_stop)`."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    mask: Tensor | None
    """Additive, `[requests, 1, (q_stop - q_start) * group, k_stop - k_start]`."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Requests with equally many query tokens, attended together."""

    tokens: slice | Tensor
    """Their rows of the flattened batch, request by request."""

    num_requests: int
    num_queries: int
    """Query tokens of each."""

    num_keys: int
    """Keys gathered for each: whole blocks."""

    blocks: Tensor
    """`[requests * columns]` int64."""

    stale: Tensor | None
    """Rows of the gathered `[requests * num_keys]` that lie past their request's length."""

    spans: tuple[_Span, ...]


def _groups(q_lens: Sequence[int], k_lens: Sequence[int]) -> list[list[int]]:
    """Requests to attend together: equally many queries, nearly as many keys."""
    groups: list[list[int]] = []
    batched: dict[int, list[int]] = {}
    for row, q_len in enumerate(q_lens):
        if q_len > _BATCH_TOKENS:
            groups.append([row])
        elif q_len:
            batched.setdefault(q_len, []).append(row)
    for rows in batched.values():
        if len(rows) > 1:
            longest, shortest = max(k_lens[r] for r in rows), min(k_lens[r] for r in rows)
            padded = longest * len(rows)
            if (longest - shortest) * len(rows) > _WASTE_KEYS or padded > _GROUP_KEYS:
                rows.sort(key=lambda r: -k_lens[r])
                waste, start = 0, 0
                for i, row in enumerate(rows):
                    waste += k_lens[rows[start]] - k_lens[row]
                    if waste > _WASTE_KEYS or (i - start + 1) * k_lens[rows[start]] > _GROUP_KEYS:
                        if i > start:
                            groups.append(rows[start:i])
                        waste, start = 0, i
                groups.append(rows[start:])
                continue
        groups.append(rows)
    return groups


def _plan(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    table: NDArray[np.int64],
    *,
    block_tokens: int,
    num_blocks: int,
    group: int,
    left: int,
    dtype: torch.dtype,
) -> list[_Tile]:
    """Decide which keys each request reads. `left`: keys before its own that a query sees, -1 for
    all."""
    starts = np.concatenate(([0], np.cumsum(q_lens)))
    tiles: list[_Tile] = []
    for rows in _groups(q_lens, k_lens):
        q_len = q_lens[rows[0]]
        lens = np.array([k_lens[r] for r in rows], dtype=np.int64)
        # |<- blocks no query can see ->|<------ keys ------>|<- padding ->|
        # 0                           first               first + own    first + num_keys
        first = np.zeros_like(lens)
        if left >= 0:
            first = np.maximum(lens - q_len - left, 0) // block_tokens * block_tokens
        own = lens - first
        columns = -(-int(own.max()) // block_tokens)
        num_keys = columns * block_tokens
        column = np.arange(columns)
        used = column[None, :] < -(-own // block_tokens)[:, None]
        at = np.where(used, column[None, :] + (first // block_tokens)[:, None], 0)
        if columns and int(at.max()) >= table.shape[1]:
            raise IndexError(
                f"{int(lens.max())} keys of {block_tokens} a block need more columns than the "
                f"block table's {table.shape[1]}"
            )
        blocks = np.zeros(used.shape, dtype=np.int64)
        blocks[used] = table[np.array(rows)[:, None], at][used]
        if blocks.size and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
            raise IndexError(
                f"the block table names a block outside [0, {num_blocks}): "
                f"{int(blocks.min())}..{int(blocks.max())}"
            )
        stale = np.flatnonzero(np.arange(num_keys)[None, :] >= own[:, None])
        tiles.append(
            _Tile(
                tokens=_token_rows(rows, starts, q_len),
                num_requests=len(rows),
                num_queries=q_len,
                num_keys=num_keys,
                blocks=torch.as_tensor(blocks.ravel()),
                stale=torch.as_tensor(stale) if stale.size else None,
                spans=_spans(q_len, lens - first - q_len, own, left, group, dtype),
            )
        )
    return tiles


def _token_rows(rows: list[int], starts: NDArray[np.int64], q_len: int) -> slice | Tensor:
    begin = int(starts[rows[0]])
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(begin, begin + len(rows) * q_len)
    return torch.as_tensor((starts[rows][:, None] + np.arange(q_len)).ravel())


def _spans(
    q_len: int,
    shift: NDArray[np.int64],
    own: NDArray[np.int64],
    left: int,
    group: int,
    dtype: torch.dtype,
) -> tuple[_Span, ...]:
    """Split the queries and draw each span's mask.

    Query i of request r sits at key position `i + shift[r]`; `own[r]` keys are real.
    """
    spans: list[_Span] = []
    longest = int(own.max())
    for q_start in range(0, q_len, _SPAN_TOKENS):
        q_stop = min(q_start + _SPAN_TOKENS, q_len)
        k_start, k_stop = 0, min(longest, int(shift.max()) + q_stop)
        if left >= 0:
            k_start = max(0, int(shift.min()) + q_start - left)
        if k_stop <= k_start:
            spans.append(_Span(q_start, q_stop, 0, 0, None))
            continue
        query = (np.arange(q_start, q_stop)[None, :] + shift[:, None])[:, :, None]
        key = np.arange(k_start, k_stop)[None, None, :]
        seen = (key < own[:, None, None]) & (key <= query)
        if left >= 0:
            seen = seen & (key >= query - left)
        mask = None
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=dtype)
            mask.masked_fill_(torch.as_tensor(~seen), -math.inf)
            mask = mask.repeat_interleave(group, dim=1)[:, None]
        spans.append(_Span(q_start, q_stop, k_start, k_stop, mask))
    return tuple(spans)


def _run_span(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """q `[n, kv_heads, queries, dim]`, k and v `[n, kv_heads, keys, dim]` to the shape of q."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores += mask
    # A row without any key is all -inf: softmax gives NaN there, the contract says 0.
    weights = torch.softmax(scores, -1).nan_to_num_(nan=0.0)
    return torch.matmul(weights, v.to(wide)).to(q.dtype)


def _run_tile(tile: _Tile, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> Tensor:
    """Attend one tile: q `[tokens, heads, dim]`, its own rows; k, v `[n, keys, kv_heads, dim]`."""
    n, q_len, kv_heads, dim = tile.num_requests, tile.num_queries, k.shape[2], q.shape[-1]
    mine = q.view(n, q_len, kv_heads, -1, dim)
    group = mine.shape[3]
    folded = mine.transpose(1, 2).reshape(n, kv_heads, q_len * group, dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    parts: list[Tensor] = []
    for span in tile.spans:
        queries = folded[:, :, span.q_start * group : span.q_stop * group]
        if span.k_stop == span.k_start:
            parts.append(torch.zeros_like(queries))
            continue
        keys = slice(span.k_start, span.k_stop)
        found_k, found_v = k[:, :, keys], v[:, :, keys]
        parts.append(_run_span(queries, found_k, found_v, span.mask, scale, softcap))
    result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    result = result.view(n, kv_heads, q_len, group, dim).transpose(1, 2)
    return result.reshape(n * q_len, kv_heads * group, dim)


def _gather(cache: Tensor, tile: _Tile, scratch: Tensor) -> Tensor:
    """The tile's blocks of one layer, `[n, keys, kv_heads, dim]`, stale rows zeroed."""
    shape = (tile.blocks.numel(), *cache.shape[1:])
    found = scratch[: math.prod(shape)].view(shape)
    torch.index_select(cache, 0, tile.blocks, out=found)
    if tile.stale is not None:
        found.view(-1, cache.shape[2] * cache.shape[3]).index_fill_(0, tile.stale, 0)
    return found.view(tile.num_requests, tile.num_keys, *cache.shape[2:])


def _gather_codes(codes: Tensor, scales: Tensor, tile: _Tile, scratch: Tensor) -> Tensor:
    """`_gather` of codes: the numbers that they stand for, in the dtype of `scratch`.

    codes: `[blocks, page, kv_heads, dim]`; scales: `[blocks, page, kv_heads]`.
    """
    # As bytes: not every operation knows fp8.
    picked = torch.index_select(codes.view(torch.uint8), 0, tile.blocks).view(codes.dtype)
    if codes.dtype != torch.int8:
        picked = picked.to(scratch.dtype)
    units = torch.index_select(scales, 0, tile.blocks).to(scratch.dtype).unsqueeze(-1)
    found = torch.mul(picked, units, out=scratch[: picked.numel()].view(picked.shape))
    if tile.stale is not None:
        found.view(-1, codes.shape[2] * codes.shape[3]).index_fill_(0, tile.stale, 0)
    return found.view(tile.num_requests, tile.num_keys, *codes.shape[2:])


def _checked(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads for each KV head. Raises ValueError as flash-attn's own checks do."""
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: they must be alike")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    return heads // kv_heads


class CpuAttention:
    """`AttentionBackend` over the KV pool, for one model's layers.

    A step is planned at the first layer that sees it and the plan serves the others: an instance
    computes one pass at a time. It holds scratch memory for gathered keys and values, grown on
    demand: fresh allocations of that size cost page faults in each layer.
    """

    def __init__(
        self,
        *,
        window: int | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        """`window`: tokens each token sees, itself included (transformers' `sliding_window`)."""
        self._left = -1 if window is None else window - 1
        self._scale = softmax_scale
        self._softcap = softcap
        self._step: StepContext | None = None
        self._tiles: list[_Tile] = []
        self._slots: tuple[Tensor, Tensor] | None = None
        self._scratch = (torch.empty(0), torch.empty(0))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, pool: KVPool, step: StepContext
    ) -> Tensor:
        """Store k and v, then attend: see `AttentionBackend`. Raises IndexError on bad tables."""
        group, dtype = _checked(q, k, v), q.dtype
        if pool.layout.coded and dtype != torch.float64:
            q = q.to(torch.float32)  # codes times scales are rounded to nothing less
        if step is not self._step or layer == 0:
            self._prepare(q, pool, step, group)
        assert self._slots is not None
        store(k, v, layer, pool, self._slots)
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        out: Tensor | None = None
        for tile in self._tiles:
            found_k, found_v = self._find(tile, layer, pool)
            mine = q[tile.tokens]
            attended = _run_tile(tile, mine, found_k, found_v, scale, self._softcap).to(dtype)
            if isinstance(tile.tokens, slice) and attended.shape[0] == q.shape[0]:
                return attended  # the whole batch, in its own order: nothing to put together
            if out is None:
                out = torch.empty_like(q, dtype=dtype)
            out[tile.tokens] = attended
        return torch.zeros_like(q, dtype=dtype) if out is None else out

    def _find(self, tile: _Tile, layer: int, pool: KVPool) -> tuple[Tensor, Tensor]:
        """The tile's keys and values, `[n, keys, kv_heads, dim]` each."""
        keys, values = pool.keys(layer), pool.values(layer)
        first, second = self._scratch
        if not pool.layout.coded:
            return _gather(keys, tile, first), _gather(values, tile, second)
        return (
            _gather_codes(keys, pool.key_scales(layer), tile, first),
            _gather_codes(values, pool.value_scales(layer), tile, second),
        )

    def _prepare(self, q: Tensor, pool: KVPool, step: StepContext, group: int) -> None:
        capacity = pool.num_blocks * pool.block_tokens
        if (
            step.slots.numel()
            and not 0 <= int(step.slots.min()) <= int(step.slots.max()) < capacity
        ):
            # torch takes -1 for the last row: it would overwrite someone's KV silently.
            raise IndexError(f"slots outside [0, {capacity})")
        self._slots = (step.slots // pool.block_tokens, step.slots % pool.block_tokens)
        self._tiles = _plan(
            step.q_lens,
            step.k_lens,
            step.block_table.numpy(),
            block_tokens=pool.block_tokens,
            num_blocks=pool.num_blocks,
            group=group,
            left=self._left,
            dtype=q.dtype,
        )
        layout = pool.layout
        needed = max((tile.num_requests * tile.num_keys for tile in self._tiles), default=0)
        needed *= layout.num_kv_heads * layout.head_dim
        if self._scratch[0].numel() < needed or self._scratch[0].dtype != q.dtype:
            with torch.inference_mode(False):
                self._scratch = (
                    torch.empty(needed, dtype=q.dtype),
                    torch.empty(needed, dtype=q.dtype),
                )
        self._step = step
