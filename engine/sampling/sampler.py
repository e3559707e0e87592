"""Chooses the next token of every row of a step.

The token of a row is a function of its logits, its request's parameters and history, its seed and
its position: rows are computed one by one, so the rest of the batch cannot enter into it.
"""

# Torch and numpy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import EngineError, RequestError
from engine.request import RequestId, SampledToken, SamplingParams
from engine.sampling.noise import VocabularyRace, exponential, noise_key
from engine.sampling.processors import (
    GREEDY_BELOW,
    TokenCounts,
    all_weights,
    candidates,
    edit_logits,
    edits_logits,
    keeps_everything,
    needs_counts,
    top_logprobs,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class UnusableLogits(EngineError):
    """A row has no token to choose: NaN, +inf, or everything forbidden. Only its request fails."""

    def __init__(self, request_id: RequestId, position: int, largest: float) -> None:
        super().__init__(
            f"request {request_id}: the largest logit for position {position} is {largest}, it "
            f"must be finite; end this request and sample the step's other rows again"
        )
        self.request_id = request_id
        self.position = position
        self.largest = largest


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """What only the vocabulary's size can tell. Cheap enough for every submit.

    Raises RequestError naming the token id and the limit.
    """
    for token_id, _ in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token_id} is not in the vocabulary: it must lie between "
                f"0 and {vocab_size - 1}",
                param="logit_bias",
            )
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids: token id {token_id} is not in the vocabulary: it must lie "
                f"between 0 and {vocab_size - 1}",
                param="stop_token_ids",
            )


@dataclass(slots=True)
class _Entry:
    """What one request's rows need."""

    params: SamplingParams
    num_prompt_tokens: int
    forbidden_ids: tuple[int, ...]
    greedy: bool
    edits: bool
    counts: TokenCounts | None


class Sampler:
    """Keeps the sampling state of the requests that run, and samples their rows.

    vocab_size: width of the logits. eos_token_ids: what `min_tokens` holds back, beside stop ids.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._entries: dict[RequestId, _Entry] = {}
        self._race = VocabularyRace(vocab_size)

    def validate(self, params: SamplingParams) -> None:
        """Raise RequestError for token ids outside the vocabulary."""
        validate_params(params, self._vocab_size)

    def enter(
        self,
        request_id: RequestId,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """A request starts to run, or runs again after preemption or a migration.

        token_ids: everything known, prompt and output. Replaces what was known of the request.
        Raises RequestError for token ids outside the vocabulary.
        """
        self.validate(params)
        counts: TokenCounts | None = None
        if needs_counts(params):
            if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
                raise RequestError(
                    f"token ids {min(token_ids)} to {max(token_ids)}: they must lie between 0 and "
                    f"{self._vocab_size - 1}",
                    param="prompt",
                )
            with_prompt = params.repetition_penalty != 1.0
            prompt_ids = token_ids[:num_prompt_tokens] if with_prompt else ()
            counts = TokenCounts(prompt_ids, token_ids[num_prompt_tokens:])
        self._entries[request_id] = _Entry(
            params=params,
            num_prompt_tokens=num_prompt_tokens,
            forbidden_ids=tuple(dict.fromkeys(self._eos_token_ids + params.stop_token_ids)),
            greedy=params.temperature < GREEDY_BELOW,
            edits=edits_logits(params),
            counts=counts,
        )

    def leave(self, request_id: RequestId) -> None:
        """Forget a request. Unknown ones are fine."""
        self._entries.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    def sample(
        self, logits: Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> list[SampledToken]:
        """Choose one token a row and count it for penalties.

        logits: `[rows, vocab]`, float32 or float64 (anything narrower is widened); not changed.
        positions: absolute position of the token being sampled. Each request at most once.

        Raises UnusableLogits for a row without a finite largest logit. Nothing has been counted
        then, so the other rows can be sampled again without it.
        """
        rows, width = logits.shape
        assert width == self._vocab_size, f"{width} logits for {self._vocab_size} tokens"
        assert rows == len(request_ids) == len(positions), "one request and position a row"
        if rows == 0:
            return []
        logits = logits.detach()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.to(torch.float32)
        logits = logits.contiguous()
        entries = [self._entries[request_id] for request_id in request_ids]

        likeliest, largest = _argmax_rows(logits)
        sampled: list[SampledToken] = []
        for i, entry in enumerate(entries):
            if not math.isfinite(largest[i]):
                raise UnusableLogits(request_ids[i], positions[i], largest[i])
            if entry.greedy and not entry.edits and entry.params.logprobs is None:
                sampled.append(SampledToken(likeliest[i]))
                continue
            token_id = self._choose(entry, logits[i], likeliest[i], request_ids[i], positions[i])
            if entry.params.logprobs is None:
                sampled.append(SampledToken(token_id))
            else:
                logprob, top = top_logprobs(logits[i], token_id, entry.params.logprobs)
                sampled.append(SampledToken(token_id, logprob, top))
        for entry, token in zip(entries, sampled, strict=True):
            if entry.counts is not None:
                entry.counts.add(token.token_id)
        return sampled

    def _choose(
        self, entry: _Entry, row: Tensor, likeliest: int, request_id: RequestId, position: int
    ) -> int:
        params = entry.params
        if entry.edits:
            row = edit_logits(
                row,
                params,
                forbidden_ids=entry.forbidden_ids,
                num_output_tokens=position - entry.num_prompt_tokens,
                counts=entry.counts,
            )
            (likeliest,), (largest,) = _argmax_rows(row.unsqueeze(0))
            if not math.isfinite(largest):
                raise UnusableLogits(request_id, position, largest)
        if entry.greedy:
            return likeliest
        if not keeps_everything(params, self._vocab_size):
            kept = candidates(row, params)
            noise = exponential(params.seed, position, kept.ids)
            return int(kept.ids[int((kept.weights / noise).argmax())])
        if row.device.type == "cpu":
            key = noise_key(params.seed, position)
            return self._race.winner(key, row.numpy(), params.temperature, likeliest)
        weights = all_weights(row, params.temperature)
        ids = torch.arange(self._vocab_size, device=row.device)
        return int((weights / exponential(params.seed, position, ids)).argmax())


def _argmax_rows(logits: Tensor) -> tuple[list[int], list[float]]:
    """Each row's first largest entry (NaN counts as largest) and its value."""
    if logits.device.type == "cpu":
        # Ten times as fast as torch's argmax on a CPU.
        values: NDArray[Any] = logits.numpy()
        ids = values.argmax(axis=-1)
        return ids.tolist(), values[np.arange(len(ids)), ids].tolist()
    ids = logits.argmax(dim=-1)
    largest = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    # Two lists in one copy off the device; float64 holds every token id exactly.
    both = torch.stack([ids.to(torch.float64), largest.to(torch.float64)]).tolist()
    return [int(i) for i in both[0]], both[1]
