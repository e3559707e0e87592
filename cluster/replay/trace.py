"""A trace in common terms: who asked for how much, when, and which prompts begin alike."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import orjson

from cluster.errors import ClusterError


class TraceError(ClusterError):
    """A trace that cannot be read, or not for this purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float | None
    """Seconds since the trace's first request, None where the trace has no arrivals."""

    input_tokens: int
    output_tokens: int
    chain: tuple[int | str, ...] = ()
    """Ids of its prompt's blocks of `Trace.block_tokens`, first block first; the last may be a
    part of one. An equal id at an equal place behind equal ids is equal text."""

    session: str | None = None
    """Requests of a session are the turns of one conversation, in order. A turn's `input_tokens`
    count the whole prompt, earlier turns and their answers included."""

    tier: str | None = None
    tenant: str | None = None
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole trace, in order of arrival."""

    name: str
    path: Path
    format: str
    sha256: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 0
    """Tokens of a block of `TraceRequest.chain`; 0 where no request has one."""

    num_skipped: int = 0
    """Rows that were no request that can be made: failures without a length."""

    @property
    def has_arrivals(self) -> bool:
        return bool(self.requests) and self.requests[0].at_s is not None

    @property
    def span_s(self) -> float:
        """From the first arrival to the last. 0 without arrivals."""
        return (self.requests[-1].at_s or 0.0) if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Requests a second over the span. Raises TraceError where there is none."""
        if self.span_s <= 0:
            raise TraceError(
                f"{self.path}: no span of time between its arrivals: give --arrivals poisson and "
                "--rate"
            )
        return (len(self.requests) - 1) / self.span_s

    def repeated(self, times: int) -> Trace:
        """The trace `times` times in a row. Prefixes and conversations are shared within a
        repetition, never across."""
        round_s = self.span_s + 1 / self.rate if times > 1 and self.has_arrivals else 0.0
        requests = list(self.requests)
        for number in range(1, times):
            requests += (
                replace(
                    request,
                    at_s=None if request.at_s is None else request.at_s + number * round_s,
                    chain=tuple(f"{number}/{block}" for block in request.chain),
                    session=request.session and f"{number}/{request.session}",
                )
                for request in self.requests
            )
        return replace(self, requests=tuple(requests))


class Row:
    """One line of a trace: typed fields, and errors that say where it stands."""

    def __init__(self, path: Path, line: int, values: Mapping[str, Any]) -> None:
        self._path = path
        self.line = line
        self.values = values

    def error(self, message: str) -> TraceError:
        return TraceError(f"{self._path}:{self.line}: {message}")

    def get(self, *names: str) -> tuple[str, Any]:
        """The first of these fields that is there and not null. Raises TraceError."""
        for name in names:
            value = self.values.get(name)
            if value is not None and value != "":
                return name, value
        raise self.error(
            f"no {' or '.join(names)}: here are {', '.join(map(str, self.values)) or 'no fields'}"
        )

    def count(self, *names: str, minimum: int = 0) -> int:
        """A whole number of `minimum` or more."""
        name, value = self.get(*names)
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not number.is_integer() or number < minimum:
            raise self.error(f"{name}={value!r}: must be a whole number of {minimum} or more")
        return int(number)

    def seconds(self, *names: str, scale: float = 1.0) -> float:
        """A finite number, times `scale`."""
        name, value = self.get(*names)
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(f"{name}={value!r}: must be a number")
        return number * scale

    def text(self, *names: str) -> str | None:
        """None where it is missing or empty. A number is taken as its digits."""
        for name in names:
            value = self.values.get(name)
            if value is None or value == "":
                continue
            if isinstance(value, str | int) and not isinstance(value, bool):
                return str(value)
            raise self.error(f"{name}={value!r}: must be a string")
        return None


def json_rows(path: Path) -> Iterator[Row]:
    """Lines of JSON objects, empty lines left out. Raises TraceError."""
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}: {_shown(line)}") from None
        if not isinstance(value, dict):
            raise TraceError(f"{path}:{number}: {_shown(line)}: must be an object")
        yield Row(path, number, cast("dict[str, Any]", value))


def csv_rows(path: Path) -> Iterator[Row]:
    """Lines under a header. Raises TraceError."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 ({error}): must be CSV") from None
    reader = csv.reader(text.splitlines())
    header = next(reader, None)
    if header is None:
        raise TraceError(f"{path}: empty")
    for values in reader:
        if not values:
            continue
        if len(values) != len(header):
            raise TraceError(
                f"{path}:{reader.line_num}: {len(values)} fields, but the header has {len(header)}"
            )
        yield Row(path, reader.line_num, dict(zip(header, values, strict=True)))


def read_bytes(path: Path) -> bytes:
    """Raises TraceError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}: give the file of a trace") from None


def digest(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace"))
