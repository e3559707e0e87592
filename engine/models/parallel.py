"""What a decoder asks of the other ranks of its stage."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorGroup(Protocol):
    """The ranks that share each layer. Every rank makes the same calls in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks, on every rank. May be done in place."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's `x`, of equal shapes, in the order of ranks on the first; None elsewhere."""
        ...
