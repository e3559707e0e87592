"""Attention by flash-attn 2.8.3: varlen for mixed batches, the kv-cache call for decode and verify.

Both calls read the paged pool in place. Keys and values are stored first and lengths are totals, so
`cache_seqlens` means what `kv_lens` means. What the kernels want of a model is in
`engine.attention.capabilities` and was checked when this was chosen.

The kernel cuts long sequences of decode rows into as many parts as fill the device, so that a row's
result differs in its last bits from batch to batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from torch import Tensor

from engine.attention.backend import StepContext
from engine.attention.slots import Index, cumulative, store, written
from engine.errors import ConfigError
from engine.execution.pool import KVPool

RELEASE = "2.8.3"
"""The next one reads a length back on the paged path, which no graph capture survives
(Dao-AILab/flash-attention#2711)."""

MAX_QUERIES = 16
"""Longer uniform batches are prompts: the single-pass varlen kernel is made for them, the split one
for few queries over many keys (vllm-project/flash-attention#176)."""


class Varlen(Protocol):
    """`flash_attn.flash_attn_varlen_func`, as far as it is used here."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
    ) -> Tensor: ...


class WithKVCache(Protocol):
    """`flash_attn.flash_attn_with_kvcache`, as far as it is used here."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FlashCalls:
    """The two kernels, or what stands for them on a CPU (`engine.attention.flash_twin`)."""

    varlen: Varlen
    with_kvcache: WithKVCache


def flash_unavailable() -> str | None:
    """Why flash-attn cannot be used here; None: it can."""
    try:
        found = version("flash_attn")
    except PackageNotFoundError:
        return "flash-attn is not installed (pip install 'tailrace[gpu]')"
    if found.split(".post")[0] != RELEASE:
        return f"flash-attn {found} is installed, only {RELEASE} is known to be capturable"
    try:
        import_module("flash_attn")
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash-attn {found} cannot be imported: {error}"
    return None


def flash_calls() -> FlashCalls:
    """The CUDA kernels. Raises ConfigError where they cannot be had."""
    reason = flash_unavailable()
    if reason is not None:
        raise ConfigError(f"attention='flash': {reason}: install it, or use attention: auto")
    module = import_module("flash_attn")
    return FlashCalls(module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


class FlashAttention:
    """`AttentionBackend` over the KV pool, for one model's layers."""

    def __init__(
        self,
        calls: FlashCalls,
        *,
        window: int | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        """`window`: tokens each token sees, itself included (transformers' `sliding_window`)."""
        self._calls = calls
        self._window = (-1, -1) if window is None else (window - 1, 0)
        self._scale = softmax_scale
        self._softcap = softcap
        self._step: StepContext | None = None
        self._at: Index | None = None
        self._cu_k: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, pool: KVPool, step: StepContext
    ) -> Tensor:
        """Store k and v, then attend: see `AttentionBackend`."""
        # A graph's static context is the same object with other contents: layer 0 starts a step.
        if step is not self._step or layer == 0:
            self._at = written(step, pool.block_tokens)
            self._cu_k = None
            self._step = step
        assert self._at is not None
        store(k, v, layer, pool, self._at)
        keys, values = pool.keys(layer), pool.values(layer)
        queries = step.uniform_q
        if queries is not None and queries <= MAX_QUERIES:
            batch = step.kv_lens.shape[0]
            out = self._calls.with_kvcache(
                q.view(batch, queries, *q.shape[1:]),
                keys,
                values,
                cache_seqlens=step.kv_lens,
                block_table=step.block_table,
                softmax_scale=self._scale,
                causal=True,
                window_size=self._window,
                softcap=self._softcap,
            )
            return out.view(q.shape)
        if self._cu_k is None:
            self._cu_k = cumulative(step.kv_lens)
        return self._calls.varlen(
            q,
            keys,
            values,
            step.cu_q,
            self._cu_k,
            step.max_q,
            step.max_k,
            softmax_scale=self._scale,
            causal=True,
            window_size=self._window,
            softcap=self._softcap,
            block_table=step.block_table,
        )
