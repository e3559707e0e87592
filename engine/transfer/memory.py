"""What transfers need of a KV pool, wherever its memory lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.models.model import KVLayout, KVPart
    from engine.models.shard import Span


class KVMemory(Protocol):
    """Blocks of KV, in one pool or in those of several ranks.

    Wire order: `engine.execution.wire_order`. Layers and heads are the model's, spans
    exclude their ends, and `heads` None means all.
    """

    layout: KVLayout
    num_blocks: int
    block_tokens: int

    @property
    def parts(self) -> tuple[KVPart, ...]:
        """What is stored apart: together every layer and head, each once."""
        ...

    def block_bytes(self, block: int, first_layer: int, last_layer: int) -> memoryview:
        """One whole block, all heads."""
        ...

    def piece(
        self, block: int, layers: Span, heads: Span, *, write: bool = False
    ) -> memoryview | None:
        """The bytes of one whole block where they lie, if they lie in one piece in wire order, and,
        for writing, nowhere else."""
        ...

    def gather(
        self,
        block: int,
        offset: int,
        num_tokens: int,
        first_layer: int,
        last_layer: int,
        heads: Span | None = None,
    ) -> memoryview:
        """A copy of some tokens of one block."""
        ...

    def scatter(
        self,
        blocks: tuple[int, ...],
        first_token: int,
        first_layer: int,
        last_layer: int,
        payload: bytearray,
        heads: Span | None = None,
    ) -> None:
        """Write a payload to position `first_token` on, across block borders."""
        ...

    def has_sound_scales(self, payload: memoryview, num_layers: int, num_heads: int) -> bool:
        """Whether every scale in a payload is one that codes can have."""
        ...
