"""What a replay comes to: one `Run`, and one `Outcome` a request that was offered.

A raw result is a file of JSON lines: the run first, the outcomes in the order in which they ended,
and the run's end last (absent when the replay was killed). `read_result` reads what `ResultWriter`
wrote. Times are seconds since the run began, so that differences and values both mean something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import orjson

from cluster.errors import ClusterError

SCHEMA = 1
"""Version of the raw result. Readers refuse others."""

Result = Literal["ok", "shed", "error", "timeout", "disconnected"]
RESULTS: tuple[Result, ...] = get_args(Result)


class ResultError(ClusterError):
    """A raw result that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One offered request. A request that was retried is one outcome."""

    index: int
    """Its place in the schedule, from 0."""

    source: str
    """The part of the mix that it belongs to."""

    session: str | None = None
    """The conversation, None for a request on its own."""

    turn: int = 0
    """Its place in the conversation, from 0."""

    tier: str = "default"
    tenant: str = "default"
    model: str = ""

    scheduled_s: float
    """When it was due. Latencies counted from here include what a late client would hide."""

    sent_s: float
    """When its first attempt began; connecting, where that was needed, comes after."""

    attempt_s: float
    """When its last attempt began; `sent_s` where there was no retry."""

    first_token_s: float | None = None
    """When the first chunk with content, reasoning or a tool call came. None without streaming
    and where none came."""

    end_s: float
    """When the last byte of the answer, the final failure or our own leaving happened."""

    chunk_times: tuple[float, ...] = ()
    """When each chunk with content came. Chunks of one read have the same time."""

    chunk_tokens: tuple[int, ...] | None = None
    """Tokens of each of these chunks, None where the server does not tell."""

    planned_input_tokens: int
    planned_output_tokens: int

    input_tokens: int | None = None
    """As the server counts them, like the next two; None where it does not tell."""

    output_tokens: int | None = None
    cached_tokens: int | None = None

    predicted_cached_tokens: int = 0
    """What an infinite prefix cache would have held when this was due: block arithmetic over the
    requests before it in the schedule, as if all of them had been served."""

    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase, from the server's `server-timing` header."""

    status: int | None = None
    """HTTP status of the last attempt, None where no answer came."""

    result: Result
    """`ok` is a whole answer, `shed` a refusal with 429 or 503 before any of it, `timeout` our
    patience running out or the server's saying so (408, 504), `disconnected` our leaving as
    planned, `error` everything else."""

    code: str | None = None
    """The server's error code, or the name of the client's own error."""

    message: str | None = None
    """What the error said, cut to 300 characters."""

    retries: int = 0
    finish_reason: str | None = None
    request_id: str | None = None

    @property
    def lateness_s(self) -> float:
        """How late the client was. Never the server's fault in an open loop."""
        return self.sent_s - self.scheduled_s

    def to_json(self) -> dict[str, Any]:
        """Plain values. `from_json` is the inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        """Raises ResultError for a field that is missing, unknown or not what it says."""
        arguments = dict(value)
        for name in ("chunk_times", "chunk_tokens"):
            if arguments.get(name) is not None:
                arguments[name] = tuple(arguments[name])
        if arguments.get("result") not in RESULTS:
            raise ResultError(
                f"result={arguments.get('result')!r} of an outcome: must be one of "
                f"{', '.join(RESULTS)}; read it with the version that wrote it"
            )
        try:
            return cls(**arguments)
        except TypeError as error:
            raise ResultError(f"not an outcome: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What is known when a run is over."""

    duration_s: float
    """From the run's beginning to its last outcome."""

    num_outcomes: int
    interrupted: bool = False
    """Ctrl-C: what was in flight has no outcome and is in no figure."""

    num_unfinished: int = 0
    """Requests of the schedule that have no outcome."""

    client_cpu_s: float = 0.0
    """CPU seconds of all processes that sent requests, from the run's beginning to its end."""

    client_wait_s: float | None = None
    """Seconds in which the client could have run but had no core: lateness that is the machine's.
    None where the system does not tell (Linux does)."""

    client_processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was offered to whom, from where: enough to do it again and to read it in a year."""

    label: str
    """What reports call it."""

    started_at: str
    """UTC, ISO 8601."""

    url: str
    endpoint: str
    """`chat` or `completions`."""

    stream: bool = True
    seed: int
    sources: tuple[Mapping[str, Any], ...] = ()
    """One a trace: name, file, sha256, format, rows read, requests offered."""

    mix: tuple[Mapping[str, Any], ...] = ()
    """One a part of the mix, as declared: source, share, tier, tenant, model, sampling, stops."""

    length_factor: float = 1.0
    """Token counts of the trace were multiplied by this."""

    time_factor: float | None = 1.0
    """Gaps between arrivals were multiplied by this; None where the trace's arrivals were not
    used (a closed loop, an arrival process)."""

    rate: float | None = None
    """Requests a second offered on average over the schedule; None in a closed loop."""

    loop: str = "open"
    """`open` or `closed`."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The rest of the workload: users, ramp, bursts, disconnects, retries, timeout, limits."""

    num_requests: int = 0
    """Requests in the schedule."""

    server: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What could be learned of the server: models, configuration, `server` header."""

    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    machine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the client: processor, cores, memory, system."""

    command: tuple[str, ...] = ()
    end: RunEnd | None = None
    """None while it runs, and where it was killed."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, `end` among them. `from_json` is the inverse."""
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        value["end"] = None if self.end is None else _plain(self.end)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        """Raises ResultError for a field that is missing or unknown."""
        arguments = dict(value)
        for name in ("sources", "mix", "command"):
            if name in arguments:
                arguments[name] = tuple(arguments[name])
        try:
            if arguments.get("end") is not None:
                arguments["end"] = RunEnd(**arguments["end"])
            return cls(**arguments)
        except TypeError as error:
            raise ResultError(f"not a run: {error}") from None


class ResultWriter:
    """Writes a raw result line by line."""

    def __init__(self, file: IO[bytes], run: Run) -> None:
        self._file = file
        self._write({"kind": "run", "schema": SCHEMA, **run.to_json()})

    def outcome(self, outcome: Outcome) -> None:
        self._write({"kind": "outcome", **outcome.to_json()})

    def end(self, end: RunEnd) -> None:
        self._write({"kind": "end", **_plain(end)})
        self._file.flush()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(value) + b"\n")


def read_result(path: Path) -> tuple[Run, list[Outcome]]:
    """The run and its outcomes, in order of the schedule.

    Raises:
        ResultError: naming file and line; also for another version of the schema. A last line
            that was cut off by a kill is left out.
    """
    run: Run | None = None
    outcomes: list[Outcome] = []
    for number, value in _lines(path):
        kind = value.pop("kind", None)
        try:
            if kind == "run":
                schema = value.pop("schema", None)
                if schema != SCHEMA:
                    raise ResultError(
                        f"schema {schema!r}: this version reads {SCHEMA}; read it with the "
                        "version that wrote it"
                    )
                run = Run.from_json(value)
            elif run is None:
                raise ResultError("the first line must be the run: not a result of `replay`")
            elif kind == "outcome":
                outcomes.append(Outcome.from_json(value))
            elif kind == "end":
                run = replace(run, end=_end(value))
            else:
                raise ResultError(f"kind={kind!r}: must be run, outcome or end")
        except ResultError as error:
            raise ResultError(f"{path}:{number}: {error}") from None
    if run is None:
        raise ResultError(f"{path}: empty: not a result of `replay`")
    return run, sorted(outcomes, key=lambda outcome: outcome.index)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}: give the file that --out wrote") from None
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number > data.count(b"\n"):
                return  # cut off while it was written
            raise ResultError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ResultError(f"{path}:{number}: {type(value).__name__}: must be an object")
        yield number, cast("dict[str, Any]", value)


def _end(value: Mapping[str, Any]) -> RunEnd:
    try:
        return RunEnd(**value)
    except TypeError as error:
        raise ResultError(f"not a run's end: {error}") from None


def _plain(value: RunEnd) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}
