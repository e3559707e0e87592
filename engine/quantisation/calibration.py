"""Quantising a decoder layer by layer, each on what the quantised layers before it really say.

The calibration text runs through what has been quantised so far; a matrix is chosen by the second
moment of what it reads there. Where it is to make up for what the matrices before have changed, a
second stream runs through the weights as they are, and tells how far that is. No more is held than
one layer, what its matrices read, and the streams between layers.
"""

# torch.linalg is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.architecture import Architecture
from engine.quantisation.awq import (
    FOLDS,
    fold,
    quantise_nearest,
    search_scales,
    shared_by_heads,
)
from engine.quantisation.gptq import (
    Order,
    damped,
    descend,
    output_error,
    quantise_gptq,
    refit_scales,
)
from engine.quantisation.layer import LayerFunction
from engine.quantisation.recipe import Recipe
from engine.weights.packed import PackedMatrix

Layer = dict[str, Tensor]
Stage = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


class Moments:
    """What the matrices of one product read, summed up over the tokens of the calibration text."""

    def __init__(self, size: int) -> None:
        self._square = torch.zeros(size, size)
        self._shift = torch.zeros(size, size)
        self._behind: Tensor | None = None
        self._magnitude = torch.zeros(size)
        self.num_tokens = 0

    def add(self, read: Tensor, exact: Tensor | None = None, behind: Tensor | None = None) -> None:
        """Count tokens in.

        read: `[tokens, in]` of the quantised stream. exact: the same of the other one. behind:
        `[tokens, out]`, what the quantised stream lacks where the product is added to it.
        """
        self._square.addmm_(read.T, read)
        self._magnitude += read.abs().sum(0)
        if exact is not None:
            self._shift.addmm_((exact - read).T, read)
        if behind is not None:
            if self._behind is None:
                self._behind = torch.zeros(behind.shape[1], read.shape[1])
            self._behind.addmm_(behind.T, read)
        self.num_tokens += read.shape[0]

    @property
    def hessian(self) -> Tensor:
        """The second moment, `[in, in]`."""
        return self._square / max(self.num_tokens, 1)

    @property
    def magnitude(self) -> Tensor:
        """The mean absolute value of each input."""
        return self._magnitude / max(self.num_tokens, 1)

    def corrected(self, weight: Tensor, damping: float, share: float) -> Tensor:
        """The weight that makes `share` of the difference of the streams good, by least squares.

        `W + share * (W E[(x - y) y^T] + E[behind y^T]) E[y y^T]^-1`, y what is read and x what
        should be (compare Li et al.: GPTAQ, 2025).
        """
        if share == 0.0:
            return weight
        lacking = weight @ self._shift
        if self._behind is not None:
            lacking += self._behind
        lacking /= max(self.num_tokens, 1)
        square = damped(self.hessian, damping)
        found = torch.linalg.solve(square.double(), lacking.T.double())
        return weight + share * found.T.float()


@dataclass(frozen=True, slots=True)
class Measured:
    """How one matrix came out."""

    name: str
    error: float
    """What quantising did to the product over the calibration text, as a share of the product."""


def embedded(windows: Sequence[Sequence[int]], table: Tensor) -> list[Tensor]:
    """The streams' beginning: `[tokens, hidden]` of each window."""
    return [table[torch.tensor(window)] for window in windows]


class LayerQuantiser:
    """Quantises layers in order. Owns the streams.

    architecture: of the model. streams: what the first layer reads, `[tokens, hidden]` float32 of
    each sequence. stored: the dtype in which what is not quantised will be
    kept, and without calibration the scales too (GPTQ and AWQ store them in float16).
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        streams: Sequence[Tensor],
        *,
        stored: torch.dtype,
    ) -> None:
        self._a = architecture
        self._recipe = recipe
        self._stored = stored
        self._function = LayerFunction(architecture, torch.float32)
        self._seen = list(streams)
        corrected = recipe.gptq_choice and recipe.correction > 0.0
        self._exact = list(streams) if corrected else None

    @torch.inference_mode()
    def quantise(
        self, index: int, layer: Layer
    ) -> tuple[Layer, dict[str, PackedMatrix], list[Measured]]:
        """Take the next layer, float32 tensors by part.

        Returns what stays in numbers (norms and biases, scales folded in), the matrices, and how
        they came out.
        """
        layer = dict(layer)
        if self._recipe.awq_scales:
            self._fold_scales(layer)
        # What the text runs through: the same tensors until they are quantised.
        done = dict(layer)
        matrices: dict[str, PackedMatrix] = {}
        measured: list[Measured] = []
        for product, stage in self._stages():
            read = [stage(seen, done) for seen in self._seen]
            should = None if self._exact is None else [stage(x, layer) for x in self._exact]
            moments = self._moments(product, read, should)
            for part in FOLDS[product]:
                matrix, error = self._choose(layer[part], moments)
                matrices[part] = matrix
                done[part] = matrix.expand(torch.float32)
                if error is not None:
                    measured.append(Measured(f"layers.{index}.{part}", error))
            if product in ("o", "down"):
                _add(self._seen, read, done[product])
                if self._exact is not None and should is not None:
                    _add(self._exact, should, layer[product])
        plain = {part: tensor for part, tensor in layer.items() if part not in matrices}
        return plain, matrices, measured

    def _stages(self) -> Iterator[tuple[str, Stage]]:
        f = self._function
        yield "qkv", f.read_by_qkv
        yield "o", lambda x, layer: f.read_by_o(f.read_by_qkv(x, layer), layer)
        yield "gate_up", f.read_by_gate_up
        yield "down", lambda x, layer: f.read_by_down(f.read_by_gate_up(x, layer), layer)

    def _moments(self, product: str, read: list[Tensor], should: list[Tensor] | None) -> Moments:
        moments = Moments(read[0].shape[1] if read else 0)
        for i, one in enumerate(read):
            if self._exact is None or should is None:
                moments.add(one)
                continue
            added = product in ("o", "down")
            behind = self._exact[i] - self._seen[i] if added else None
            moments.add(one, should[i], behind)
        return moments

    def _choose(self, weight: Tensor, moments: Moments) -> tuple[PackedMatrix, float | None]:
        recipe = self._recipe
        options: dict[str, Any] = {
            "bits": recipe.bits,
            "group": recipe.group_for(weight.shape[1]),
            "symmetric": recipe.symmetric or (recipe.bits == 8 and recipe.method == "rtn"),
        }
        if not recipe.calibrated:
            return quantise_nearest(weight, None, stored=self._stored, **options), None
        plain = moments.hessian
        if not recipe.gptq_choice:
            matrix = quantise_nearest(weight, plain, **options)
        else:
            hessian = damped(plain, recipe.damping)
            wanted = moments.corrected(weight, recipe.damping, recipe.correction)
            order: Order = recipe.order  # pyright: ignore[reportAssignmentType]
            matrix = quantise_gptq(wanted, hessian, order=order, **options)
            for _ in range(recipe.sweeps):
                matrix = refit_scales(matrix, wanted, hessian)
                matrix = descend(matrix, wanted, hessian)
        size = float((weight @ plain).mul_(weight).sum())
        return matrix, output_error(matrix, weight, plain) / max(size, 1e-30)

    def _fold_scales(self, layer: Layer) -> None:
        """Find AWQ's scales of all four products on the unrounded layer, and fold them in."""
        recipe = self._recipe
        for product, stage in self._stages():
            moments = Moments(layer[FOLDS[product][0]].shape[1])
            for seen in self._stream_at(product, layer):
                moments.add(stage(seen, layer))
            heads = product == "o"
            scales = search_scales(
                [layer[part] for part in FOLDS[product]],
                moments.magnitude,
                moments.hessian,
                bits=recipe.bits,
                group=recipe.group_for(moments.magnitude.shape[0]),
                symmetric=recipe.symmetric,
                shared=(lambda x: shared_by_heads(x, self._a)) if heads else None,
            )
            fold(layer, product, scales, self._a, self._stored)

    def _stream_at(self, product: str, layer: Layer) -> Iterator[Tensor]:
        """The text where a product's norm reads it, with the layer unrounded."""
        stage = dict(self._stages())["o"]
        for seen in self._seen:
            if product in ("qkv", "o"):
                yield seen
            else:
                yield seen + F.linear(stage(seen, layer), layer["o"])


def _add(streams: list[Tensor], read: Sequence[Tensor], weight: Tensor) -> None:
    """Bring streams behind the product that is added to them."""
    for i, one in enumerate(read):
        streams[i] = streams[i] + F.linear(one, weight)
