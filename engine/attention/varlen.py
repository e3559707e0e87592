"""Attention by torch's own `varlen_attn` (2.13), for GPUs where flash-attn is not installed.

The kernel behind it is flash-attn's as torch compiles it: the same rules for types, heads and
blocks, and no softcap. Blocks of a multiple of 256 tokens are read in place through the table;
others are gathered first, which costs a copy of the step's KV a layer and cannot be captured.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention.backend import StepContext
from engine.attention.slots import Index, cumulative, read, store, written
from engine.execution.pool import KVPool

KERNEL_BLOCK = 256


class VarlenAttn(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`, as far as it is used here."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor | None,
        block_table: Tensor | None,
        num_splits: int | None,
    ) -> Tensor: ...


def varlen_attn() -> VarlenAttn:
    """The kernel of torch."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn  # pyright: ignore[reportReturnType]


class VarlenAttention:
    """`AttentionBackend` over the KV pool, for one model's layers."""

    def __init__(
        self, call: VarlenAttn, *, window: int | None = None, softmax_scale: float | None = None
    ) -> None:
        """`window`: tokens each token sees, itself included (transformers' `sliding_window`)."""
        self._call = call
        # (-1, 0) is how this call spells "causal".
        self._window = (-1, 0) if window is None else (window - 1, 0)
        self._scale = softmax_scale
        self._step: StepContext | None = None
        self._at: Index | None = None
        self._cu_k: Tensor | None = None
        self._all: Index | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, pool: KVPool, step: StepContext
    ) -> Tensor:
        """Store k and v, then attend: see `AttentionBackend`."""
        page = pool.block_tokens
        paged = page % KERNEL_BLOCK == 0
        if step is not self._step or layer == 0:
            self._at = written(step, page)
            self._cu_k = cumulative(step.kv_lens)
            self._all = None if paged else read(step, self._cu_k, page)
            self._step = step
        assert self._at is not None
        store(k, v, layer, pool, self._at)
        keys, values = pool.keys(layer), pool.values(layer)
        if self._all is not None:
            keys, values = keys[self._all], values[self._all]
        return self._call(
            q,
            keys,
            values,
            step.cu_q,
            self._cu_k,
            step.max_q,
            step.max_k,
            scale=self._scale,
            window_size=self._window,
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=step.kv_lens if paged else None,
            block_table=step.block_table if paged else None,
            # Split keys give silently wrong results over pages (pytorch/pytorch#194167).
            num_splits=1,
        )
