"""AWQ: inputs that matter are made larger before their weights are rounded, and the layer before
them makes up for it.

Lin, Tang, Tang, Yang, Dang, Gan, Han: AWQ, Activation-aware Weight Quantization for LLM Compression
and Acceleration (2023). A scale `s` for each input of some matrices that read the same activations:

    x @ W.T  =  (x / s) @ (W * s).T

and whatever produces `x` is divided by `s`: the norm before q, k and v or before gate and up, the
rows of v before o, the rows of up before down. The function of the unrounded model is the same.

What a choice costs is measured at the output of those matrices, by the second moment of their
inputs; the authors' code runs the block on a sample of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from engine.models.architecture import Architecture
from engine.quantisation.grid import fit
from engine.weights.packed import PackedMatrix

_EXPONENTS: Final = 20
"""Strengths that are tried, from none to all of what the activations suggest."""

_JUDGED_ROWS: Final = 512
"""Outputs by which scales are judged: of large matrices every so many."""

CLIPS: Final = tuple(1.0 - step / 20 for step in range(11))
"""Shares of a group's range that are tried when codes are chosen: down to half of it."""


def search_scales(
    weights: Sequence[Tensor],
    magnitude: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool = False,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The scale of each input, `[in]`, that leaves the least error in the products.

    weights: matrices `[out, in]` that read the same inputs. magnitude: the inputs' mean absolute
    value, `[in]`. hessian: their second moment. Scales are `magnitude ** a`, and the same divided
    by the weights' own size to the power of `1 - a`; all 1 where nothing is better than that.
    shared: makes scales equal where they must be.
    """
    together = torch.cat([weight.float() for weight in weights])
    size = magnitude.shape[0]
    activity = magnitude.float().clamp(min=1e-5)
    grouped = together.abs().view(-1, size // group, group)
    share = grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)
    heaviness = share.view(-1, size).mean(0).clamp(min=1e-4)
    together = together[:: -(-together.shape[0] // _JUDGED_ROWS)]
    best = torch.ones(size)
    least = _error(together, best, hessian, bits, group, symmetric)
    for step in range(1, _EXPONENTS + 1):
        power = step / _EXPONENTS
        for raw in (activity**power, activity**power / heaviness ** (1 - power)):
            scales = raw if shared is None else shared(raw)
            scales = scales / (scales.max() * scales.min()).sqrt()
            error = _error(together, scales, hessian, bits, group, symmetric)
            if error < least:
                best, least = scales, error
    return best


def _error(
    weight: Tensor, scales: Tensor, hessian: Tensor, bits: int, group: int, symmetric: bool
) -> float:
    scaled = (weight * scales).view(weight.shape[0], -1, group)
    grid = fit(scaled, bits, symmetric=symmetric)
    off = (grid.nearest(scaled).view_as(weight) / scales).sub_(weight)
    return float((off @ hessian).mul_(off).sum())


def quantise_nearest(
    weight: Tensor,
    hessian: Tensor | None,
    *,
    bits: int,
    group: int,
    symmetric: bool = False,
    stored: torch.dtype = torch.float16,
) -> PackedMatrix:
    """The nearest codes of a weight `[out, in]`, group by group.

    hessian: the second moment of the inputs; each group's range is then cut where that costs least
    at the output (AWQ's clipping). None: the whole range (rounding to nearest). stored: what
    scales will be kept in.
    """
    out, size = weight.shape
    num_groups = size // group
    grouped = weight.float().view(out, num_groups, group)
    if hessian is None:
        grid = fit(grouped, bits, symmetric=symmetric, stored=stored)
    else:
        blocks = hessian.view(num_groups, group, num_groups, group)
        near = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, n, n]
        grid = fit(grouped, bits, symmetric=symmetric, shrinks=CLIPS, curvature=near, stored=stored)
    return PackedMatrix(
        bits=bits,
        codes=grid.codes(grouped).view(out, size).to(torch.uint8),
        scales=grid.scales,
        zeros=grid.zeros.to(torch.int32),
        group_of=torch.arange(size) // group,
    )


FOLDS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The products of a layer, in order, and the matrices of each that read the same inputs."""


def fold(
    layer: dict[str, Tensor],
    product: str,
    scales: Tensor,
    architecture: Architecture,
    stored: torch.dtype,
) -> None:
    """Multiply the inputs of a product's matrices by `scales`, and divide what comes before.

    layer: the tensors of one layer by their part's name, replaced in place. stored: the dtype in
    which norms are kept. The matrices take what a rounded norm really is less by, so that the
    function stays the same to the precision of their own dtype. Scales of `o` must be equal in all
    heads that share a value, see `shared_by_heads`.
    """
    if product in ("qkv", "gate_up"):
        name = "attn_norm" if product == "qkv" else "mlp_norm"
        old = layer[name]
        new = (old / scales).to(stored).to(old.dtype)
        layer[name] = new
        scales = torch.where(new == 0, 1.0, old / new).to(scales.dtype)
    elif product == "o":
        heads = scales.view(architecture.num_kv_heads, -1, architecture.head_dim)
        values = heads[:, 0].reshape(-1)
        layer["v"] = layer["v"] / values[:, None]
        if "v.bias" in layer:
            layer["v.bias"] = layer["v.bias"] / values
    else:
        layer["up"] = layer["up"] / scales[:, None]
    for name in FOLDS[product]:
        layer[name] = layer[name] * scales


def shared_by_heads(values: Tensor, architecture: Architecture) -> Tensor:
    """Of `[heads * head_dim]`, means over the heads that share keys and values, in their places."""
    heads = values.view(architecture.num_kv_heads, -1, architecture.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)
