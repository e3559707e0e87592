"""From one row of raw logits to the tokens that may be chosen, and their weights.

The order, which is also what the API promises:

    1. log-probabilities are taken from the raw logits (`top_logprobs`)
    2. float32 (float64 stays float64)
    3. `min_tokens` forbids EOS and stop ids, then `logit_bias`
    4. repetition penalty over prompt and output; frequency and presence penalty over output
    5. temperature 0 stops here: the largest logit, the lowest id if several are equal
    6. temperature
    7. min_p
    8. top_k; of equal logits at the border those with the lowest ids stay
    9. top_p over what is left, renormalised; equal logits count in the order of their ids
   10. the race of `engine.sampling.noise`

Steps 7 to 9 each keep the front of one ordering (logit descending, id ascending), so they are cuts
into one sorted list, and the list need only be as long as the first cut that binds.
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

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engine.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow for the same answer."""

# The front of the ordering is found through the maxima of this many neighbours: the k-th largest
# maximum is a lower bound of the k-th largest logit, at a fraction of the cost of a selection.
_GROUP = 64
# What top_p tries first before it looks at every token that could matter.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be chosen, likeliest first. Weights are not normalised."""

    ids: Tensor
    """`[n]` int64."""

    weights: Tensor
    """`[n]` float64, above or equal to 0, the first one 1."""


class TokenCounts:
    """Which tokens a request has seen and how often it has emitted them.

    Size grows with the number of distinct tokens, never with the vocabulary.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys([*prompt_ids, *output_ids])
        self._slots: dict[int, int] = {token_id: slot for slot, token_id in enumerate(distinct)}
        room = max(64, 2 * len(distinct))
        self._ids = np.zeros(room, dtype=np.int64)
        self._ids[: len(distinct)] = list(distinct)
        self._emitted = np.zeros(room, dtype=np.int32)
        for token_id in output_ids:
            self._emitted[self._slots[token_id]] += 1

    def add(self, token_id: int) -> None:
        """Count one more emitted token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._emitted = np.concatenate([self._emitted, np.zeros_like(self._emitted)])
        self._ids[slot] = token_id
        self._emitted[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output, `[n]`."""
        return self._ids[: len(self._slots)]

    @property
    def emitted(self) -> NDArray[np.int32]:
        """How often each of `ids` was emitted, `[n]`. 0 for those only the prompt has."""
        return self._emitted[: len(self._slots)]


def edits_logits(params: SamplingParams) -> bool:
    """Whether `edit_logits` can change anything for these parameters."""
    return bool(params.min_tokens or params.logit_bias) or needs_counts(params)


def needs_counts(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def edit_logits(
    row: Tensor,
    params: SamplingParams,
    *,
    forbidden_ids: Sequence[int],
    num_output_tokens: int,
    counts: TokenCounts | None,
) -> Tensor:
    """Steps 3 and 4 on a copy of `row` (`[vocab]`, float32 or float64).

    forbidden_ids: EOS and stop ids, which `min_tokens` holds back. They are held back under
    `ignore_eos` too: whoever sets both wants neither the stop nor the token.
    """
    row = row.clone()
    if num_output_tokens < params.min_tokens and forbidden_ids:
        row[torch.tensor(forbidden_ids, device=row.device)] = -math.inf
    if params.logit_bias:
        ids = torch.tensor([token_id for token_id, _ in params.logit_bias], device=row.device)
        bias = [bias for _, bias in params.logit_bias]
        row.index_add_(0, ids, torch.tensor(bias, dtype=row.dtype, device=row.device))
    if counts is None:
        return row
    ids = torch.from_numpy(counts.ids).to(row.device)
    seen = row[ids]
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        seen = torch.where(seen < 0, seen * penalty, seen / penalty)
    if params.frequency_penalty or params.presence_penalty:
        emitted = torch.from_numpy(counts.emitted).to(device=row.device, dtype=row.dtype)
        seen = seen - params.frequency_penalty * emitted
        seen = seen - params.presence_penalty * (emitted > 0)
    row[ids] = seen
    return row


def keeps_everything(params: SamplingParams, vocab_size: int) -> bool:
    """Whether steps 7 to 9 are all off."""
    return params.min_p <= 0.0 and params.top_p >= 1.0 and not 0 < params.top_k < vocab_size


def candidates(row: Tensor, params: SamplingParams) -> Candidates:
    """Steps 6 to 9 on edited logits (`[vocab]`), whose largest is finite. Temperature above 0."""
    vocab_size = len(row)
    temperature = params.temperature
    largest = float(row.amax())
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size

    outside = 0.0
    if top_k < vocab_size:
        ids = front(row, top_k)
    elif params.min_p > 0.0:
        # The exact comparison follows on the weights; a little more is let in here.
        ids = _at_least(row, largest + temperature * (math.log(params.min_p) - 1e-3))
    elif params.top_p < 1.0:
        ids, outside = _nucleus_superset(row, largest, temperature, params.top_p)
    else:
        ids = torch.arange(vocab_size, device=row.device)

    logits = row[ids]
    logits, order = torch.sort(logits, descending=True, stable=True)
    ids = ids[order]
    weights = _weights(logits.to(torch.float64), largest, temperature)
    if params.min_p > 0.0:
        kept = int((weights >= params.min_p).sum())
        ids, weights = ids[:kept], weights[:kept]
    ids, weights = ids[:top_k], weights[:top_k]
    if params.top_p < 1.0:
        mass = torch.cumsum(weights, 0)
        total = float(mass[-1]) + outside
        # A token stays while those before it have not yet reached top_p; the first always does.
        kept = 1 + int((mass[:-1] < params.top_p * total).sum())
        ids, weights = ids[:kept], weights[:kept]
    return Candidates(ids, weights)


def top_logprobs(row: Tensor, token_id: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token_id`, and the `n` most likely tokens as `(id, logprob)`.

    row: raw logits, `[vocab]`. Impossible tokens are left out of the `n`.
    """
    logprobs = torch.log_softmax(row, dim=-1)
    chosen = float(logprobs[token_id])
    if n == 0:
        return chosen, ()
    ids = front(row, n)
    ids = ids[torch.sort(row[ids], descending=True, stable=True).indices[:n]]
    pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    return chosen, tuple((i, logprob) for i, logprob in pairs if logprob > -math.inf)


def front(row: Tensor, k: int) -> Tensor:
    """Ids, ascending, of at least the `k` largest entries of `row`, ties at the border included."""
    k = min(k, len(row))
    groups = len(row) // _GROUP
    if k <= groups // 2:
        maxima = row[: groups * _GROUP].view(groups, _GROUP).amax(dim=-1)
        return _at_least(row, float(torch.topk(maxima, k, sorted=False).values.amin()))
    return _at_least(row, float(torch.topk(row, k, sorted=False).values.amin()))


def _nucleus_superset(
    row: Tensor, largest: float, temperature: float, top_p: float
) -> tuple[Tensor, float]:
    """Ids that surely contain the nucleus, and the mass of all others."""
    weights = _weights(row, largest, temperature)
    total = float(weights.sum(dtype=torch.float64))
    # What may be left outside: 1 - top_p, less the rounding between these weights and exact ones.
    spare = max(1.0 - top_p - 2e-6, 0.0) * total
    ids = front(row, _NUCLEUS_GUESS)
    outside = total - float(weights[ids].sum(dtype=torch.float64))
    if outside < spare:
        return ids, outside
    ids = _at_least(weights, spare / len(row))
    while True:
        # Those already outside and all inside that are lighter than `bound` weigh less than `spare`
        # together, so none of them is in the nucleus. Each round makes the bound larger.
        inside = weights[ids]
        outside = total - float(inside.sum(dtype=torch.float64))
        bound = max(spare - outside, 0.0) / len(ids)
        heavier = ids[_at_least(inside, bound)]
        if len(heavier) > 0.75 * len(ids):
            return ids, max(outside, 0.0)
        ids = heavier


def _weights(logits: Tensor, largest: float, temperature: float) -> Tensor:
    """exp((logits - largest) / temperature), in the precision of `logits`."""
    weights = logits - largest
    if temperature != 1.0:
        weights /= temperature
    if weights.device.type == "cpu":
        values: NDArray[Any] = weights.numpy()
        np.exp(values, out=values)
        return weights
    return weights.exp_()


def _at_least(row: Tensor, bound: float) -> Tensor:
    """Ids, ascending, of entries that are `bound` or more."""
    if row.device.type == "cpu":
        values: NDArray[Any] = row.numpy()
        return torch.from_numpy(np.flatnonzero(values >= values.dtype.type(bound)))
    return (row >= bound).nonzero().squeeze(-1)


def all_weights(row: Tensor, temperature: float) -> Tensor:
    """Step 6 alone: weights of the whole vocabulary in float64, the largest 1."""
    return _weights(row.to(torch.float64), float(row.amax()), temperature)
