"""The seam between a model and whatever computes attention over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.execution.pool import KVPool


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Index tensors of one pass over a flattened batch of `requests` rows and `tokens` tokens."""

    slots: Tensor
    """`[tokens]` int64: block * block_tokens + offset, where each token's KV is stored."""

    cu_q: Tensor
    """`[requests + 1]` int32: where each request's tokens begin in the flattened batch."""

    kv_lens: Tensor
    """`[requests]` int32: KV length of each request, this step's tokens included."""

    block_table: Tensor
    """`[requests, columns]` int32, padded with 0."""

    last: Tensor
    """`[sampled]` int64: rows of the flattened batch whose logits are wanted."""

    max_q: int
    max_k: int
    uniform_q: int | None
    """Set when every request has the same number of tokens: the kv-cache kernel applies."""

    q_lens: tuple[int, ...]
    """Host copies of the lengths, so that no backend has to read tensors back."""

    k_lens: tuple[int, ...]


class AttentionBackend(Protocol):
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, pool: KVPool, step: StepContext
    ) -> Tensor:
        """Store k and v at `step.slots`, then attend causally (bottom-right aligned).

        q: `[tokens, heads, dim]`; k, v: `[tokens, kv_heads, dim]`. Returns `[tokens, heads, dim]`.
        """
        ...
