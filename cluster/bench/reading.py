"""What a model says about a text, and how far another one is from it. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.bench.summary import significant
from engine.config import DType, ModelConfig
from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.models.load import load_model
from engine.models.model import Model
from engine.scheduling.plan import Chunk, StepPlan

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


def judge(reference: Reading, reading: Reading) -> dict[str, float]:
    """Perplexity as a multiple of the reference's, and KL divergence from it, nats a token."""
    return {
        "perplexity_ratio": round(reading.perplexity / reference.perplexity, 5),
        "kl": significant(reference.divergence(reading)),
    }


def weights(
    source: str, dtype: DType = "auto", quantisation: str = "keep", group: int | None = None
) -> ModelConfig:
    """A configuration that says how weights are kept."""
    return ModelConfig(
        name="bench",
        source=source,
        dtype=dtype,
        quantisation=quantisation,  # pyright: ignore[reportArgumentType]
        quantisation_group=group,
    )


def expanded(source: str, dtype: DType = "auto") -> Model:
    """The model with all of its weights as numbers of `dtype`: what others are judged by."""
    return load_model(weights(source, dtype, "none"))


def kept(source: str, dtype: DType = "auto") -> Model:
    """The model with its weights as they are stored."""
    return load_model(weights(source, dtype, "keep"))
