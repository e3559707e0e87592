"""GPTQ: codes chosen one input at a time, each error made good by the inputs that follow.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, Accurate Post-Training Quantization for Generative
Pre-trained Transformers (2022), with the grid of its authors' code and two steps that find a lower
minimum of the same error afterwards: scales by least squares (`refit_scales`), and codes by
coordinate descent (Behdin et al.: QuantEase, 2023; `descend`).

The error of a matrix is what it does to the product over the calibration text:
`trace((W - Q) H (W - Q)^T)`, where `H` is the second moment of the inputs (`Moments.hessian`).
"""

# torch.linalg and `tolist` are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor

from engine.quantisation.grid import SHRINKS, Grid, fit
from engine.weights.packed import PackedMatrix

Order = Literal["off", "static", "groups"]
"""In which order inputs are taken. `off`: as they are. `static`: the most active first, groups are
of neighbours all the same. `groups`: the most active first, and groups are made in that order (what
a `g_idx` is stored for)."""

_BLOCK: Final = 128
"""About so many inputs' errors are handed on to the rest by one product."""


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The second moment with `damping` times its mean diagonal added to its diagonal.

    Inputs that were always zero count as the mean does, so that their weights are rounded.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(hessian.dtype).tiny)
    more = torch.where(diagonal == 0, mean, mean * damping)
    return hessian + torch.diag(more)


def quantise_gptq(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool = False,
    order: Order = "static",
) -> PackedMatrix:
    """Codes for a weight `[out, in]`.

    hessian: `[in, in]`, positive definite (see `damped`). group: inputs that share a scale; it must
    divide their number.
    """
    out, size = weight.shape
    assert size % group == 0, (size, group)
    taken = torch.arange(size, device=weight.device)
    if order != "off":
        taken = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    group_of = taken // group if order != "groups" else torch.arange(size) // group
    members = [(group_of == g).nonzero().flatten() for g in range(size // group)]

    # Inputs are rows here, so that what belongs to one of them is one run of memory.
    rest = weight.float().T[taken].contiguous()  # [in, out]
    sorted_hessian = hessian[taken][:, taken]
    factor = _inverse_factor(sorted_hessian)
    scales = torch.empty(size // group, out)
    zeros = torch.empty_like(scales)
    codes = torch.empty(size, out)

    def choose(g: int) -> None:
        at = members[g]
        near = sorted_hessian[at][:, at]
        grid = fit(rest[at].T, bits, symmetric=symmetric, shrinks=SHRINKS, curvature=near)
        scales[g], zeros[g] = grid.scales, grid.zeros

    if order == "static":
        for g in range(len(members)):
            choose(g)
    groups = group_of.tolist()
    block = _block(group)
    for first in range(0, size, block):
        last = min(first + block, size)
        errors = torch.empty(last - first, out)
        for i in range(first, last):
            g = groups[i]
            if order != "static" and i % group == 0:
                choose(g)
            grid = Grid(bits, scales[g], zeros[g])
            codes[i] = grid.codes(rest[i])
            error = (rest[i] - grid.values(codes[i])) / factor[i, i]
            errors[i - first] = error
            rest[i + 1 : last].addr_(factor[i, i + 1 : last], error, alpha=-1.0)
        rest[last:] -= factor[first:last, last:].T @ errors
    back = torch.argsort(taken)
    return PackedMatrix(
        bits=bits,
        codes=codes[back].T.to(torch.uint8).contiguous(),
        scales=scales.T.contiguous(),
        zeros=zeros.T.to(torch.int32).contiguous(),
        group_of=group_of[back],
    )


def _block(group: int) -> int:
    """Inputs between two products. A group begins where all errors before it have arrived: its grid
    is fitted to what its weights have become."""
    if group <= _BLOCK:
        return _BLOCK // group * group
    return _BLOCK if group % _BLOCK == 0 else group


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular `U` with `U^T U = hessian^-1`; in double, which small damping needs."""
    lower = torch.linalg.cholesky(hessian.double())
    inverse = torch.cholesky_inverse(lower)
    return torch.linalg.cholesky(inverse, upper=True).float()


def refit_scales(matrix: PackedMatrix, weight: Tensor, hessian: Tensor) -> PackedMatrix:
    """The same codes and zeros with the scales that leave the least error.

    A row's error is a square form of its scales, so that the best ones solve a linear system of as
    many equations as it has groups. Rows that float16 or the system's condition would make worse
    keep theirs.
    """
    group_of = matrix.group_of
    num_groups = matrix.scales.shape[1]
    columns = [(group_of == g).nonzero().flatten() for g in range(num_groups)]
    taken = torch.cat(columns)
    group = taken.shape[0] // num_groups
    inner = hessian[taken][:, taken]
    target = weight.float()[:, taken]
    units = (matrix.codes.float() - matrix.zeros.float()[:, group_of])[:, taken]
    out = weight.shape[0]
    system = torch.empty(out, num_groups, num_groups)
    for g in range(num_groups):
        part = slice(g * group, (g + 1) * group)
        reached = (units[:, part] @ inner[part]).mul_(units)  # [out, in]
        system[:, g] = reached.view(out, num_groups, group).sum(-1)
    right = (target @ inner).mul_(units).view(out, num_groups, group).sum(-1)
    # A group whose codes are all zero has no say.
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += diagonal.mean(-1, keepdim=True) * 1e-6 + torch.finfo(torch.float32).tiny
    found = torch.linalg.solve(system.double(), right.double()).float().half().float()
    sound = torch.isfinite(found) & (found > 0)
    found = torch.where(sound, found, matrix.scales)

    def error(scales: Tensor) -> Tensor:
        off = units * scales.repeat_interleave(group, dim=1) - target
        return (off @ inner).mul_(off).sum(-1)

    better = error(found) < error(matrix.scales)
    return replace(matrix, scales=torch.where(better[:, None], found, matrix.scales))


def descend(matrix: PackedMatrix, weight: Tensor, hessian: Tensor) -> PackedMatrix:
    """One sweep of coordinate descent: each input's codes become the best ones beside the others.

    The error never rises: codes are the nearest to where a row's error is least, on a grid.
    """
    group_of = matrix.group_of.tolist()
    scales, zeros = matrix.scales.T.contiguous(), matrix.zeros.float().T.contiguous()
    codes = matrix.codes.T.float()  # [in, out]
    lined = matrix.group_of
    values = (codes - zeros[lined]) * scales[lined]
    size = values.shape[0]
    # Of each input, half the slope of the error along it.
    slope = hessian @ (values - weight.float().T)
    diagonal = hessian.diagonal().tolist()
    block = _BLOCK
    for first in range(0, size, block):
        last = min(first + block, size)
        moves = torch.empty(last - first, values.shape[1])
        for i in range(first, last):
            grid = Grid(matrix.bits, scales[group_of[i]], zeros[group_of[i]])
            codes[i] = grid.codes(values[i] - slope[i] / diagonal[i])
            now = grid.values(codes[i])
            move = now - values[i]
            values[i] = now
            moves[i - first] = move
            slope[i:last].addr_(hessian[i:last, i], move)
        slope[last:] += hessian[last:, first:last] @ moves
    return replace(matrix, codes=codes.T.to(torch.uint8).contiguous())


def output_error(matrix: PackedMatrix, weight: Tensor, hessian: Tensor) -> float:
    """What the codes do to the product: `trace((W - Q) H (W - Q)^T)`."""
    off = matrix.expand(torch.float32) - weight.float()
    return float((off @ hessian).mul_(off).sum())
