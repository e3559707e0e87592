"""`tailrace bench quality`: what a way of keeping weights costs, on text nobody trained on.

Imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from torch import Tensor

from cluster.bench.held_out import HELD_OUT
from cluster.bench.summary import significant
from cluster.errors import ClusterError
from engine.config import DType, ModelConfig
from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.models.load import build_decoder, compute_dtype, load_model
from engine.models.model import Model
from engine.quantisation.codes import CodedMatrix
from engine.scheduling.plan import Chunk, StepPlan
from engine.text.text_model import load_text
from engine.weights.checkpoint import Checkpoint, Lazy
from engine.weights.gguf_blocks import coded_matrix
from engine.weights.load import load_checkpoint

Say = Callable[[str], None]

GGUF_FORMATS = ("q8_0", "q4_1", "q4_0")
FORMATS = ("float32", "keep", "int8", "int8/64", "int8/128", "int4", "int4/64", *GGUF_FORMATS)
"""Of weights; a number behind the stroke is the group. `keep` is what the source stores, `float32`
the same weights expanded and computed in float32."""

WINDOW_TOKENS = 512
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model says about a text: log-probabilities `[tokens, vocab]` of what comes next."""

    log_probabilities: Tensor
    following: Tensor
    """`[tokens]`: what did come next."""

    @property
    def perplexity(self) -> float:
        chosen = self.log_probabilities.gather(1, self.following[:, None])
        return math.exp(-float(chosen.double().mean()))

    def divergence(self, other: Reading) -> float:
        """KL divergence of `other` from this, nats a token."""
        mine = self.log_probabilities
        return float((mine.exp() * (mine - other.log_probabilities)).sum(-1).double().mean())


def bench_quality(
    source: str,
    formats: Sequence[str],
    *,
    dtype: DType = "auto",
    text: str = HELD_OUT,
    say: Say,
) -> dict[str, Any]:
    """Perplexity and KL divergence of each format against the weights expanded to `dtype`.

    Raises:
        ConfigError: the model cannot be loaded.
        ClusterError: a format nobody knows.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ClusterError(f"formats {', '.join(unknown)}: choose from {', '.join(FORMATS)}")
    encoded = load_text(source).tokenizer.encode(text)
    say(f"reading {len(encoded)} tokens with the weights expanded")
    model = load_model(_config(source, dtype, "none"))
    reference = read(model, encoded)
    out: dict[str, Any] = {
        "model": source,
        "dtype": model.layout.dtype,
        "tokens": reference.following.numel(),
        "perplexity": significant(reference.perplexity),
        "quality": {},
    }
    for name in formats:
        reading = read(_model(source, dtype, name), encoded)
        ratio = reading.perplexity / reference.perplexity
        divergence = reference.divergence(reading)
        out["quality"][name] = {"perplexity_ratio": round(ratio, 5), "kl": significant(divergence)}
        say(f"{name}: perplexity {ratio:.4f} times, KL {divergence:.5f}")
    return out


def read(model: Model, encoded: Sequence[int]) -> Reading:
    """Read in windows of 512 tokens; each token is predicted from those before it in its window."""
    parts: list[Tensor] = []
    following: list[Tensor] = []
    blocks = WINDOW_TOKENS // BLOCK_TOKENS
    pool = KVPool(model.layout, blocks + 1, BLOCK_TOKENS)
    for first in range(0, len(encoded) - 1, WINDOW_TOKENS):
        window = tuple(encoded[first : first + WINDOW_TOKENS])
        count = min(len(window), len(encoded) - 1 - first)
        chunk = Chunk(
            request_id="text",
            first_token=0,
            token_ids=window[:count],
            blocks=tuple(range(1, blocks + 1)),
            sample=True,
        )
        ids, positions, step = step_inputs(StepPlan(chunks=(chunk,)), BLOCK_TOKENS)
        step.last = torch.arange(count)
        with torch.inference_mode():
            logits = model.forward(ids, positions, pool, step).float()
            parts.append(torch.log_softmax(logits, -1))
        following.append(torch.tensor(encoded[first + 1 : first + 1 + count]))
    return Reading(torch.cat(parts), torch.cat(following))


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{result['model']}  {result['dtype']}  {result['tokens']} tokens  "
        f"perplexity {result['perplexity']:.2f}",
        f"{'format':12}{'perplexity ratio':>18}{'KL, nats a token':>18}",
    ]
    for name, row in result["quality"].items():
        lines.append(f"{name:12}{row['perplexity_ratio']:18.4f}{row['kl']:18.5f}")
    return lines


def _config(source: str, dtype: DType, quantisation: str, group: int | None = None) -> ModelConfig:
    return ModelConfig(
        name="bench",
        source=source,
        dtype=dtype,
        quantisation=quantisation,  # pyright: ignore[reportArgumentType]
        quantisation_group=group,
    )


def _model(source: str, dtype: DType, name: str) -> Model:
    if name == "float32":
        return load_model(_config(source, "float32", "none"))
    if name not in GGUF_FORMATS:
        kind, _, group = name.partition("/")
        return load_model(_config(source, dtype, kind, int(group) if group else None))
    compute = compute_dtype(dtype)
    checkpoint = load_checkpoint(source, torch.float32)
    return build_decoder(
        _config(source, dtype, "keep"),
        checkpoint.architecture,
        load_checkpoint(source, compute).tensors,
        _as_gguf(checkpoint, name.upper()),
        compute,
        checkpoint.fingerprint,
    )


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
