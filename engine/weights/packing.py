"""Chosen codes as GPTQ, AWQ and compressed-tensors store them: the way back of `packed`.

Layouts are described there. Nothing is lost: what is read again has the same codes, zeros, scales
(numbers that the stored type holds) and groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.weights.packed import AWQ_ORDER, Method, PackedMatrix


def pack(
    matrix: PackedMatrix, method: Method, stored: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """A matrix as the tensors that a checkpoint has for it, by the end of their names.

    stored: what scales are written in; of GPTQ and AWQ it is float16. AWQ takes 4 bits and groups
    of neighbours, pack-quantized groups of neighbours. GPTQ's zeros are stored one less, so that
    they are 1 or more.
    """
    scales = matrix.scales.to(stored)
    assert torch.equal(scales.float(), matrix.scales), f"scales that {stored} does not hold"
    ordered = not torch.equal(matrix.group_of, torch.sort(matrix.group_of).values)
    if method == "gptq":
        assert int(matrix.zeros.min()) >= 1, "GPTQ's format has no zero of 0"
        return {
            "qweight": pack_words(matrix.codes.T, matrix.bits, dim=0),
            "qzeros": pack_words(matrix.zeros.T - 1, matrix.bits, dim=1),
            "scales": scales.T.contiguous(),
            "g_idx": matrix.group_of.int(),
        }
    assert method in ("awq", "pack-quantized"), f"{method} is not written"
    assert not ordered, f"{method} has groups of neighbours"
    if method == "awq":
        return {
            "qweight": _pack_awq(matrix.codes),
            "qzeros": _pack_awq(matrix.zeros),
            "scales": scales.T.contiguous(),
        }
    middle = bool((matrix.zeros == 1 << (matrix.bits - 1)).all())
    parts = {
        "weight_packed": pack_words(matrix.codes, matrix.bits, dim=1),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not middle:
        parts["weight_zero_point"] = pack_words(matrix.zeros, matrix.bits, dim=0)
    return parts


def pack_words(values: Tensor, bits: int, *, dim: int) -> Tensor:
    """Whole numbers of `bits` bits into int32 words along `dim`, the first in the low bits."""
    per_word = 32 // bits
    moved = values.movedim(dim, -1).to(torch.int64)
    missing = -moved.shape[-1] % per_word
    padded = torch.nn.functional.pad(moved, (0, missing))
    grouped = padded.reshape(*moved.shape[:-1], -1, per_word)
    shifts = torch.arange(0, 32, bits)
    words = (grouped << shifts).sum(-1)
    # From 0 .. 2^32 - 1 to the int32 of the same bits.
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def _pack_awq(values: Tensor) -> Tensor:
    """`[out, n]` to `[n, out / 8]`."""
    columns = values.T.reshape(values.shape[1], -1, 8)[:, :, list(AWQ_ORDER)]
    return pack_words(columns.reshape(values.shape[1], -1), 4, dim=1)


def quantization_config(
    method: Method,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    ordered: bool,
    damping: float,
    quantiser: str,
) -> Mapping[str, Any]:
    """The section of a `config.json` that tells others how to read such a checkpoint."""
    if method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "damp_percent": damping,
            "desc_act": ordered,
            "static_groups": False,
            "sym": symmetric,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "meta": {"quantizer": [quantiser]},
        }
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": method,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
