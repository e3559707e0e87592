"""The linear layers of torch's decoder alone: what no arrangement of the rest can beat.

(The native decoder runs its own, see `NativeDecoder.products`.)

They have weights of their own, of the same shapes and dtype and in the same packed layout, so that
as many bytes are read and as many products formed as in the model. Imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.models.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


class LinearLayers:
    """All products of one forward pass, in order and fused as the decoder fuses them."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self._architecture = architecture
        self._dtype = dtype
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        generator = torch.Generator().manual_seed(0)

        def linear(rows: int, columns: int) -> Linear:
            weight = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            return Linear((weight / columns**0.5).to(dtype))

        with torch.inference_mode():
            self._layers = [
                _Layer(
                    qkv=linear(architecture.q_size + 2 * architecture.kv_size, hidden),
                    o=linear(hidden, architecture.q_size),
                    gate_up=linear(2 * inner, hidden),
                    down=linear(hidden, inner),
                )
                for _ in range(architecture.num_layers)
            ]
            self._head = linear(architecture.vocab_size, hidden)
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, rows: int, sampled: int) -> None:
        """The products of a pass over `rows` tokens of which `sampled` are sampled from.

        As in the decoder, only sampled rows go on behind the attention of the last layer.
        """
        with torch.inference_mode():
            hidden, attended, inner = self._of(rows)
            for layer in self._layers[:-1]:
                layer.qkv(hidden)
                layer.o.add_to(hidden, attended)
                layer.gate_up(hidden)
                layer.down.add_to(hidden, inner)
            last = self._layers[-1]
            last.qkv(hidden)
            if sampled == 0:
                return
            hidden, attended, inner = self._of(sampled)
            last.o.add_to(hidden, attended)
            last.gate_up(hidden)
            last.down.add_to(hidden, inner)
            self._head(hidden)

    def _of(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of a pass: `[rows, hidden]`, `[rows, q_size]`, `[rows, intermediate]`."""
        inputs = self._inputs.get(rows)
        if inputs is None:
            sizes = self._architecture
            inputs = self._inputs[rows] = (
                torch.randn(rows, sizes.hidden_size).to(self._dtype),
                torch.randn(rows, sizes.q_size).to(self._dtype),
                torch.randn(rows, sizes.intermediate_size).to(self._dtype),
            )
        return inputs
