"""`tailrace bench quality`: what a way of keeping weights costs, on text nobody trained on.

Imports torch.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch

from cluster.bench.held_out import HELD_OUT
from cluster.bench.reading import expanded, judge, kept, read, weights
from cluster.bench.summary import significant
from cluster.errors import ClusterError
from engine.config import DType
from engine.models.load import build_decoder, compute_dtype, load_model
from engine.models.model import Model
from engine.quantisation.codes import CodedMatrix
from engine.text.text_model import load_text
from engine.weights.checkpoint import Checkpoint, Lazy
from engine.weights.gguf_blocks import coded_matrix
from engine.weights.load import load_checkpoint

Say = Callable[[str], None]

GGUF_FORMATS = ("q8_0", "q4_1", "q4_0")
FORMATS = (
    *("float32", "keep", "int8", "int8/64", "int8/128", "int4", "int4/64"),
    *GGUF_FORMATS,
    "kv-int8",
)
"""Of weights; a number behind the stroke is the group. `keep` is what the source stores, `float32`
the same weights expanded and computed in float32; `kv-int8` has expanded weights too, and keys and
values as codes."""

CALIBRATED = ("gptq-int4", "awq-int4", "gptq-int8", "rtn-int4", "rtn-int8")
"""Formats that `tailrace quantize` writes; made for this, which takes minutes each."""

_CALIBRATED_NAME = re.compile(r"(gptq|awq|rtn)-int([48])(?:/(\d+|row))?")


def bench_quality(
    source: str,
    formats: Sequence[str],
    *,
    checkpoints: Sequence[Path] = (),
    dtype: DType = "auto",
    text: str = HELD_OUT,
    say: Say,
) -> dict[str, Any]:
    """Perplexity and KL divergence of each format against the weights expanded to `dtype`.

    checkpoints: quantised versions of the model that exist already, reported by their directory's
    name.

    Raises:
        ConfigError: the model cannot be loaded.
        ClusterError: a format nobody knows.
    """
    unknown = [
        name for name in formats if name not in FORMATS and not _CALIBRATED_NAME.fullmatch(name)
    ]
    if unknown:
        raise ClusterError(
            f"formats {', '.join(unknown)}: choose from {', '.join((*FORMATS, *CALIBRATED))}"
        )
    encoded = load_text(source).tokenizer.encode(text)
    say(f"reading {len(encoded)} tokens with the weights expanded")
    model = expanded(source, dtype)
    reference = read(model, encoded)
    out: dict[str, Any] = {
        "model": source,
        "dtype": str(compute_dtype(dtype)).removeprefix("torch."),
        "tokens": reference.following.numel(),
        "perplexity": significant(reference.perplexity),
        "quality": {},
    }

    def report(name: str, model: Model) -> None:
        row = out["quality"][name] = judge(reference, read(model, encoded))
        say(f"{name}: perplexity {row['perplexity_ratio']:.4f} times, KL {row['kl']:.5f}")

    for name in formats:
        if name in FORMATS:
            report(name, _model(source, dtype, name))
            continue
        with tempfile.TemporaryDirectory() as made:
            report(name, _quantised(source, dtype, name, Path(made) / "model", say))
    for directory in checkpoints:
        report(directory.resolve().name, kept(str(directory), dtype))
    return out


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{result['model']}  {result['dtype']}  {result['tokens']} tokens  "
        f"perplexity {result['perplexity']:.2f}",
        f"{'format':16}{'perplexity ratio':>18}{'KL, nats a token':>18}",
    ]
    for name, row in result["quality"].items():
        lines.append(f"{name:16}{row['perplexity_ratio']:18.4f}{row['kl']:18.5f}")
    return lines


def _model(source: str, dtype: DType, name: str) -> Model:
    if name == "float32":
        return expanded(source, "float32")
    if name == "kv-int8":
        return load_model(replace(weights(source, dtype, "none"), kv_dtype="int8"))
    if name not in GGUF_FORMATS:
        kind, _, group = name.partition("/")
        return load_model(weights(source, dtype, kind, int(group) if group else None))
    compute = compute_dtype(dtype)
    checkpoint = load_checkpoint(source, torch.float32)
    return build_decoder(
        weights(source, dtype, "keep"),
        checkpoint.architecture,
        load_checkpoint(source, compute).tensors,
        _as_gguf(checkpoint, name.upper()),
        compute,
        checkpoint.fingerprint,
    )


def _quantised(source: str, dtype: DType, name: str, out: Path, say: Say) -> Model:
    """The model as `tailrace quantize` writes it."""
    from cluster.quantize.run import recipe, write_quantized

    named = _CALIBRATED_NAME.fullmatch(name)
    assert named is not None, name
    method, bits, group = named.groups()
    chosen = recipe(
        method, bits=int(bits), group=-1 if group == "row" else int(group) if group else 32
    )
    write_quantized(source, out, chosen, requantize=True, say=say)
    return kept(str(out), dtype)


def _as_gguf(checkpoint: Checkpoint, type_name: str) -> Mapping[str, CodedMatrix]:
    """Every matrix as llama.cpp's plain types store it; the head is q8_0, as in most files."""
    a = checkpoint.architecture
    head = "embed" if a.tied_embeddings else "head"

    def coded(name: str) -> CodedMatrix:
        stored = "Q8_0" if name == head else type_name
        weight = checkpoint.tensors[name]
        packed = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[stored])
        return coded_matrix(stored, torch.from_numpy(packed), tuple(weight.shape))

    names = {n for n, shape in a.tensor_shapes().items() if len(shape) == 2 and n != "embed"}
    return Lazy({name: functools.partial(coded, name) for name in names | {head}})
