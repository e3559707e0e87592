"""From a model to a quantised checkpoint on disk, a layer at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.quantisation.calibration import LayerQuantiser, Measured, embedded
from engine.quantisation.recipe import Recipe
from engine.weights.checkpoint import Checkpoint
from engine.weights.packed import Method
from engine.weights.packing import pack, quantization_config
from engine.weights.writing import SafetensorsFile, stored_name, stored_tensor_name

_MOST_PARTS = 4
"""Tensors that a format has for one matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a model."""

    measured: tuple[Measured, ...]
    num_bytes: int
    num_bytes_before: int
    """What the same tensors take in the model's own dtype."""

    kept: tuple[str, ...]
    """What was not quantised, in words."""


def file_format(recipe: Recipe) -> Method:
    """How the recipe's matrices are stored."""
    if recipe.method in ("gptq", "awq"):
        return recipe.method  # pyright: ignore[reportReturnType]
    # int-quantized is for rounded activations too, by what compressed-tensors makes of it.
    return "pack-quantized"


def stored_dtype(method: Method, own: torch.dtype) -> torch.dtype:
    """Scales and what is not quantised are stored in this; own: the model's.

    AutoGPTQ and AutoAWQ load a model in float16 before anything else, so that scales and the rest
    are float16, `config.json` says so, and their kernels compute in it (`WQLinear_GEMM`).
    """
    return torch.float16 if method in ("gptq", "awq") else own


def quantise_checkpoint(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    recipe: Recipe,
    directory: Path,
    *,
    config: Mapping[str, Any],
    stored: torch.dtype,
    quantiser: str,
    progress: Callable[[int, int, Sequence[Measured]], None],
) -> Written:
    """Write `model.safetensors` and `config.json` into an existing directory.

    checkpoint: with tensors in float32. windows: token ids of the calibration text, each sequence
    by itself. config: the model's own `config.json`, to which the quantisation is added. stored:
    the model's dtype, in which scales and what is not quantised are stored where the format has
    none of its own. quantiser: name and version, for the record. progress: called behind each layer
    with its number from 1, their number, and how its matrices came out.

    Raises ConfigError where the recipe, or the format's dtype, does not suit the model.
    """
    architecture = checkpoint.architecture
    recipe.check(architecture)
    method = file_format(recipe)
    before = stored
    stored = stored_dtype(method, before)
    measured: list[Measured] = []
    shapes = architecture.tensor_shapes()
    with SafetensorsFile(directory / "model.safetensors", len(shapes) * _MOST_PARTS) as file:
        for name, tensor in _top(checkpoint, stored):
            file.add(name, tensor)
        streams = embedded(windows, checkpoint.tensors["embed"]) if recipe.calibrated else []
        layers = LayerQuantiser(architecture, recipe, streams, stored=stored)
        for i in range(architecture.num_layers):
            at = f"layers.{i}"
            layer = {
                name.removeprefix(f"{at}."): checkpoint.tensors[name]
                for name in shapes
                if name.startswith(f"{at}.")
            }
            plain, matrices, came_out = layers.quantise(i, layer)
            for part, tensor in plain.items():
                name = stored_tensor_name(f"{at}.{part}")
                file.add(name, _narrowed(name, tensor, stored))
            for part, matrix in matrices.items():
                for end, tensor in pack(matrix, method, stored).items():
                    file.add(f"{stored_name(f'{at}.{part}')}.{end}", tensor)
            measured += came_out
            progress(i + 1, architecture.num_layers, came_out)
    section = quantization_config(
        method,
        bits=recipe.bits,
        group=recipe.group,
        symmetric=recipe.symmetric or (recipe.bits == 8 and recipe.method == "rtn"),
        ordered=recipe.method == "gptq" and recipe.order == "groups",
        damping=recipe.damping,
        quantiser=quantiser,
    )
    # `torch_dtype` is its name before transformers 5.
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    named = dict.fromkeys(names, str(stored).removeprefix("torch."))
    (directory / "config.json").write_text(
        json.dumps({**config, **named, "quantization_config": section}, indent=1) + "\n"
    )
    return Written(
        measured=tuple(measured),
        num_bytes=file.num_bytes,
        num_bytes_before=sum(
            before.itemsize * torch.Size(shape).numel() for shape in shapes.values()
        ),
        kept=kept_whole(architecture),
    )


def kept_whole(architecture: Architecture) -> tuple[str, ...]:
    """What is not quantised, in words."""
    head = (
        ("embeddings, which are the head too (tied)",)
        if architecture.tied_embeddings
        else ("embeddings", "head")
    )
    biases = ("biases of q, k and v",) if architecture.qkv_bias else ()
    return (*head, "norms", *biases)


def _top(checkpoint: Checkpoint, stored: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.architecture.tensor_shapes():
        if not name.startswith("layers."):
            at = stored_tensor_name(name)
            yield at, _narrowed(at, checkpoint.tensors[name], stored)


def _narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(narrow).all():
        raise ConfigError(
            f"{name} has {float(tensor.abs().max()):g}, and GPTQ and AWQ are stored in float16, "
            f"at most {torch.finfo(dtype).max:g}: use --method rtn"
        )
    return narrow
