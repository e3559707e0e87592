"""What a request is, as values. They cross processes as plain lists and numbers (`to_wire`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any

from engine.errors import RequestError

RequestId = str
"""Unique within one engine. The choice `i` of a submit `s` is `s/i`."""


class FinishReason(str, Enum):
    """Why a request ended. `STOP` and `LENGTH` are the OpenAI values of the same name."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


_MASK64 = (1 << 64) - 1


def derive_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice`: choice 0 keeps the client's, others are spread by splitmix64."""
    if choice == 0:
        return seed & _MASK64
    z = (seed + choice * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise RequestError(f"{name}={value}: must lie between {low:g} and {high:g}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Order of the processors: see `engine.sampling`.

    Raises `RequestError` (naming field, value and limit) when constructed out of range.
    """

    max_tokens: int
    """Tokens to generate in all for this request, those emitted before a migration included."""

    seed: int = 0
    """Unsigned 64 bit. The gateway draws one when the client sent none."""

    temperature: float = 1.0
    """0 is greedy."""

    top_k: int = 0
    """0 keeps the whole vocabulary."""

    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none. k: the chosen token's raw log-probability and the k most likely."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens={self.max_tokens}: must be 1 or more", param="max_tokens"
            )
        if self.min_tokens < 0 or self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens}: must be 0 to max_tokens={self.max_tokens}",
                param="min_tokens",
            )
        if self.top_k < 0:
            raise RequestError(f"top_k={self.top_k}: must be 0 (off) or more", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p}: must be above 0 and at most 1", param="top_p")
        _between("temperature", self.temperature, 0.0, 2.0)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Logits are divided by it: close to 0 it would turn them into infinities.
        _between("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise RequestError(
                    f"logit_bias: token id {token_id} is negative", param="logit_bias"
                )
            _between("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise RequestError(
                f"top_logprobs={self.logprobs}: must lie between 0 and 20", param="top_logprobs"
            )
        if len(self.stop) > 16 or any(not s for s in self.stop):
            raise RequestError("stop: at most 16 strings, none of them empty", param="stop")
        if not 0 <= self.seed <= _MASK64:
            raise RequestError(f"seed={self.seed}: must fit in 64 bits", param="seed")

    def to_wire(self) -> list[Any]:
        return [getattr(self, name) for name in _names()]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> SamplingParams:
        """Inverse of `to_wire`. Raises RequestError on a value out of range."""
        values: dict[str, Any] = dict(zip(_names(), wire, strict=True))
        values["logit_bias"] = tuple([(int(t), float(b)) for t, b in values["logit_bias"]])
        values["stop"] = tuple(values["stop"])
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
        return cls(**values)

    def for_choice(self, choice: int) -> SamplingParams:
        seed = derive_seed(self.seed, choice)
        return self if seed == self.seed else replace(self, seed=seed)


@cache
def _names() -> tuple[str, ...]:
    """Fields of `SamplingParams` in the order they have on the wire."""
    return tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to compute, resolved: token ids, numbers, no names to look up.

    # |<------- prompt_ids ------->|<-- output_ids -->|<-- to be generated -->|
    # 0                      num_prompt        first position sampled
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    """Tokens already emitted elsewhere (after a migration). Counted in max_tokens."""

    priority: int = 0
    """Lower is served first."""

    salt: str = ""
    """Isolation domain of the prefix cache, derived from the authenticated tenant."""

    itl_target_ms: int | None = None
    """Gap between two tokens that its tier promises. None: nobody watches it."""

    first_token_ms: int | None = None
    """Time left until its tier's promise of a first token is broken, at the moment this was sent.
    May be negative. None: nobody waits for it."""

    preemptible: bool = True
    """It makes way for more urgent requests, and comes back later."""

    def __post_init__(self) -> None:
        if self.itl_target_ms is not None and self.itl_target_ms < 1:
            raise RequestError(f"itl_target_ms={self.itl_target_ms}: must be 1 or more")
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens: send at least one", param="messages")
        if len(self.output_ids) >= self.params.max_tokens:
            raise RequestError(
                f"{len(self.output_ids)} tokens were already emitted of max_tokens="
                f"{self.params.max_tokens}: nothing is left to generate",
                param="max_tokens",
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def to_wire(self) -> list[Any]:
        return [
            self.request_id,
            self.prompt_ids,
            self.params.to_wire(),
            self.output_ids,
            self.priority,
            self.salt,
            self.itl_target_ms,
            self.first_token_ms,
            self.preemptible,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Request:
        request_id, prompt_ids, params, output_ids, priority, salt, *promise = wire
        itl_target_ms, first_token_ms, preemptible = promise
        return cls(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams.from_wire(params),
            output_ids=tuple(output_ids),
            priority=priority,
            salt=salt,
            itl_target_ms=itl_target_ms,
            first_token_ms=first_token_ms,
            preemptible=preemptible,
        )


@dataclass(slots=True)
class SampledToken:
    """One sampled token. Log-probabilities are of the raw distribution, before any processor.

    Never changed. Not frozen all the same: every row of every step makes one, which would take
    twice as long.
    """

    token_id: int
    logprob: float | None = None
    """None unless the request asked for logprobs."""

    top: tuple[tuple[int, float], ...] = ()
    """`(token id, logprob)`, most likely first."""

    def to_wire(self) -> list[Any]:
        return [self.token_id, self.logprob, self.top]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> SampledToken:
        token_id, logprob, top = wire
        return cls(token_id, logprob, tuple((t, p) for t, p in top))
