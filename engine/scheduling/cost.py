"""How long a step takes, learnt from the steps that ran. Pure: no clock, observations come in.

With stages they are from its plan to its end, through all of them, behind the steps that are under
way in front of it: that is what a stream waits for its token.

A step's seconds are modelled as a sum of non-negative parts:

    base + per_row * rows + per_prompt_token * prompt_tokens + per_read * reads

`reads` are KV tokens that attention visits. Decode steps are bound by weights and KV read, prompts
by arithmetic, so four numbers describe both; what they are differs between models, machines and
neighbours on the same host, so they are fitted while serving (recursive least squares with
forgetting; Ljung, System Identification, 2nd ed., section 11.2).
"""

from __future__ import annotations

from dataclasses import dataclass

_FORGETTING = 0.99
"""Weight of an observation against the next one: about the last hundred steps count."""

_OUTLIER = 3.0
"""A step that took this many times its estimate was disturbed from outside: more is not counted."""

_ENOUGH = 8
"""Observations before an estimate is given."""

_UNIT = (1.0, 16.0, 256.0, 16_384.0)
"""Typical sizes of the four features: scaled by them the fit is well conditioned."""

_N = len(_UNIT)
_LARGEST_GAIN = 1e6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, as the cost model sees it."""

    rows: int = 0
    """Sequences that get one token."""

    prompt_tokens: int = 0
    """Tokens of longer chunks."""

    reads: int = 0
    """KV tokens visited by attention: the context of each row, and a chunk's mean context times its
    length, both summed."""

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.rows + other.rows,
            self.prompt_tokens + other.prompt_tokens,
            self.reads + other.reads,
        )


def row_work(context: int) -> StepWork:
    """One token of a sequence that has `context` tokens."""
    return StepWork(rows=1, reads=context)


def prompt_work(first_token: int, num_tokens: int) -> StepWork:
    """`num_tokens` of a prompt behind `first_token` computed ones."""
    reads = num_tokens * first_token + num_tokens * (num_tokens + 1) // 2
    return StepWork(prompt_tokens=num_tokens, reads=reads)


class StepCost:
    """Estimates seconds of a step. Knows nothing until it has seen a few."""

    def __init__(self) -> None:
        self._weights = [0.0] * _N
        self._inverse = [[1e3 if i == j else 0.0 for j in range(_N)] for i in range(_N)]
        self._seen = 0

    @property
    def known(self) -> bool:
        return self._seen >= _ENOUGH

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step of this much work took `seconds`. Raises ValueError below 0."""
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: a step cannot take less than 0")
        x = _features(work)
        if self.known:
            seconds = min(seconds, _OUTLIER * max(self.seconds(work), 1e-6))
        self._seen += 1
        inverse = self._inverse
        px = [sum(p * v for p, v in zip(line, x, strict=True)) for line in inverse]
        scale = _FORGETTING + sum(v * p for v, p in zip(x, px, strict=True))
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        for i in range(_N):
            gain = px[i] / scale
            self._weights[i] += gain * error
            line = inverse[i]
            for j in range(_N):
                line[j] = (line[j] - gain * px[j]) / _FORGETTING
        # Steps that are all alike say nothing about the other directions, whose variance forgetting
        # would let grow without end.
        largest = max(inverse[i][i] for i in range(_N))
        if largest > _LARGEST_GAIN:
            shrink = _LARGEST_GAIN / largest
            for line in inverse:
                for j in range(_N):
                    line[j] *= shrink

    def seconds(self, work: StepWork) -> float:
        """Estimate for a step of this much work. 0 before anything was observed."""
        parts = zip(self._weights, _features(work), strict=True)
        return sum(max(0.0, weight) * feature for weight, feature in parts)

    def prompt_tokens(self, seconds: float, first_token: int) -> float:
        """Tokens of a prompt that fit in `seconds`, behind `first_token` computed ones."""
        _, _, per_token, per_read = (
            max(0.0, weight) / unit for weight, unit in zip(self._weights, _UNIT, strict=True)
        )
        each = per_token + per_read * first_token
        return seconds / each if each > 0 else float("inf")


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.rows / _UNIT[1],
        work.prompt_tokens / _UNIT[2],
        work.reads / _UNIT[3],
    )
