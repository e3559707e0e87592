"""What the engine asks of a model, and the value that says how its KV looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.attention.backend import StepContext
    from engine.execution.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one token's KV, and the identity of the weights that produced it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """`float32`, `bfloat16`, `float64`, ..."""

    fingerprint: str
    """Hex digest over weights, dtype and rope. Equal fingerprints make KV exchangeable."""

    @property
    def itemsize(self) -> int:
        return {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


class Model(Protocol):
    """A decoder over paged KV. One implementation of ours, one fake, later others."""

    layout: KVLayout
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    device: torch.device

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """Compute one flattened batch, storing its KV in `pool` at `step.slots`.

        ids, positions: `[tokens]` int64. Returns logits `[len(step.last), vocab_size]`, float32 or
        float64, of the rows `step.last` only.
        """
        ...
