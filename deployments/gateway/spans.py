"""What clients tell beside the OpenAI fields: time spent outside the model, a wish to be told, what
they could do without, how much of the prompt was retrieved.

```
x-tailrace-spans: [{"name": "search", "kind": "retrieval", "start_ms_ago": 420, "duration_ms": 400}]
x-tailrace-explain: 1
body:  "tailrace": {"spans": [...], "explain": true, "optional": true, "retrieved": 12}
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from deployments.explain.request import ExternalSpan
from deployments.metrics import Registry
from engine.errors import RequestError

MAX_SPANS = 64
MAX_HEADER_BYTES = 8192
DAY_MS = 86_400_000.0

SPAN_SECONDS = "tailrace_external_span_seconds"

_HEADER = "x-tailrace-spans"
_TRUE = frozenset({b"1", b"true", b"yes", b"on"})
_FALSE = frozenset({b"", b"0", b"false", b"no", b"off"})

Milliseconds = Annotated[float, Field(ge=0, le=DAY_MS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Span(_Strict):
    """Time that passed outside the model before the request was sent."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]
    kind: Literal["tool", "retrieval", "other"] = "other"
    start_ms_ago: Milliseconds | None = None
    """It began this long before the request's arrival."""

    start: Annotated[float, Field(ge=0, le=1e11)] | None = None
    """Or: it began then, in Unix seconds. Without either it ended as the request arrived."""

    duration_ms: Milliseconds

    @model_validator(mode="after")
    def _one_start(self) -> Span:
        if self.start is not None and self.start_ms_ago is not None:
            raise ValueError("start and start_ms_ago exclude each other; send one of them")
        return self

    def external(self, received_unix_s: float) -> ExternalSpan:
        """Placed before the arrival; what would reach past it ends there.

        Raises RequestError for a start that is after the arrival, or more than a day before it.
        """
        duration_s = self.duration_ms / 1000
        if self.start is not None:
            before_s = received_unix_s - self.start
        elif self.start_ms_ago is not None:
            before_s = self.start_ms_ago / 1000
        else:
            before_s = duration_s
        if before_s < 0 or before_s > DAY_MS / 1000:
            raise RequestError(
                f"span {self.name!r} began {before_s:.3f} s before this request arrived: it must "
                "have begun before it and at most a day ago; correct start or the clock, or send "
                "start_ms_ago",
                code="invalid_value",
                param="tailrace.spans",
            )
        return ExternalSpan(
            name=self.name,
            kind=self.kind,
            before_s=before_s,
            duration_s=min(duration_s, before_s),
        )


Spans = Annotated[tuple[Span, ...], Field(max_length=MAX_SPANS, strict=False)]


class Extension(_Strict):
    """The field `tailrace` of a request's body."""

    spans: Spans = ()
    explain: bool = False
    """Send the explanation with the answer."""

    optional: bool = False
    """The client can do without this answer: a tier that drops extras refuses it."""

    retrieved: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Passages of a retrieval in the prompt, for `limits.max_retrieved_chunks`."""


_LIST: TypeAdapter[tuple[Span, ...]] = TypeAdapter(Spans)


def spans_of_header(value: bytes) -> tuple[Span, ...]:
    """The value of `x-tailrace-spans`. Raises RequestError naming what is wrong with it."""
    if len(value) > MAX_HEADER_BYTES:
        raise _wrong(f"{len(value)} bytes, at most {MAX_HEADER_BYTES}; send fewer spans")
    try:
        return _LIST.validate_json(value)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        raise _wrong(f"{where.lstrip('.') or 'the list'}: {message}; correct it") from None


def _wrong(message: str) -> RequestError:
    return RequestError(f"{_HEADER}: {message}", code="invalid_value", param=_HEADER)


def asks_to_explain(value: bytes) -> bool:
    """The value of `x-tailrace-explain`. Raises RequestError for what is neither yes nor no."""
    word = value.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise RequestError(
        f"x-tailrace-explain: {word[:40]!r} is neither 1 nor 0; send 1 or leave it out",
        code="invalid_value",
        param="x-tailrace-explain",
    )


def told_by(
    headers: Mapping[bytes, bytes], body: Extension | None, received_unix_s: float
) -> tuple[tuple[ExternalSpan, ...], bool]:
    """Spans, and whether the explanation is wanted; from headers and body together.

    Raises RequestError.
    """
    told, asked = headers.get(b"x-tailrace-spans"), headers.get(b"x-tailrace-explain")
    spans: Sequence[Span] = () if told is None else spans_of_header(told)
    explain = asked is not None and asks_to_explain(asked)
    if body is not None:
        spans, explain = (*spans, *body.spans), explain or body.explain
    if len(spans) > MAX_SPANS:
        raise _wrong(f"{len(spans)} spans with those of the body, at most {MAX_SPANS}; send fewer")
    return tuple(span.external(received_unix_s) for span in spans), explain


def count(registry: Registry, model: str, tier: str, spans: Iterable[ExternalSpan]) -> None:
    """Into the histogram, by kind. Names stay out of it: they are the clients' own."""
    for span in spans:
        registry.histogram(SPAN_SECONDS, model=model, tier=tier, kind=span.kind).observe(
            span.duration_s
        )
