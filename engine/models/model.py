"""What the engine asks of a model, and the value that says how its KV looks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.attention.backend import StepContext
    from engine.config import KVDType
    from engine.execution.pool import KVPool
    from engine.models.shard import Span


CodeType = Literal["int8", "float8_e4m3fn"]
"""What codes of keys and values are, as torch names it."""

SCALE_BYTES = 4
"""float32. Scales of 16 bits would save 3 % of the memory of heads of 64 and cost more: rounded to
the nearest it moves a whole row by up to 1 / 512, rounded up it leaves codes unused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one token's KV, and the identity of the weights that produced it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """What the pool holds: `float32`, `bfloat16`, `float64`, or a `CodeType`, with scales."""

    fingerprint: str
    """Hex digest over weights, dtype, rope and codes. Equal fingerprints make KV exchangeable."""

    @property
    def coded(self) -> bool:
        """Whether keys and values are codes, with a scale for each token's head (`kv_codes`)."""
        return self.dtype in ("int8", "float8_e4m3fn")

    @property
    def scale_dtype(self) -> str:
        """Of the scales; empty where there are none."""
        return "float32" if self.coded else ""

    @property
    def itemsize(self) -> int:
        if self.coded:
            return 1
        return {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def row_bytes(self) -> int:
        """One head of one token's key (or value), its scale included."""
        return self.head_dim * self.itemsize + (SCALE_BYTES if self.coded else 0)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes

    def kept_as(self, kv_dtype: KVDType) -> KVLayout:
        """The layout that a configuration's `kv_dtype` makes of this one, of numbers."""
        if kv_dtype == "int8":
            return self.as_codes()
        return self.as_codes("float8_e4m3fn") if kv_dtype == "fp8" else self

    def as_codes(self, dtype: CodeType = "int8") -> KVLayout:
        """The same keys and values as codes.

        The fingerprint is another one: it roots the hash chain and is what a receiver compares, so
        that codes are never taken for numbers, nor numbers for codes.
        """
        fingerprint = sha256(f"{self.fingerprint} kv {dtype}".encode()).hexdigest()
        return replace(self, dtype=dtype, fingerprint=fingerprint)


@dataclass(frozen=True, slots=True)
class KVPart:
    """A rectangle of a layout, in the model's own numbering."""

    layers: Span
    heads: Span


class Model(Protocol):
    """A decoder over paged KV. One implementation of ours, one fake, later others."""

    layout: KVLayout
    dtype: str
    """Of activations, and of the KV where it is not codes."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    weight_bytes: int
    """What the weights take in memory."""

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """Compute one flattened batch, storing its KV in `pool` at `step.slots`.

        ids, positions: `[tokens]` int64. Returns logits `[len(step.last), vocab_size]`, float32 or
        float64, of the rows `step.last` only.
        """
        ...
