"""Offers every side the same traffic, in turn, and keeps what came of it.

Sides take turns forwards and backwards (A B B A ...), one at a time, so that a machine that grows
slower or faster meanwhile favours nobody. Each time a side starts anew and is warmed up. Runs of a
round have equal schedules and texts; no two runs of a side share a text, so that no prefix cache
knows one from before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from cluster.bench.cpu import Bystanders
from cluster.compare.sides import Say, Served, Side
from cluster.errors import ClusterError
from cluster.replay.arrivals import Profile
from cluster.replay.outcome import Outcome, Run, read_result
from cluster.replay.replay import Spec, offer, prepare
from cluster.replay.trace import Trace
from cluster.replay.workload import Factors
from cluster.report.pools import PoolSampler

RUNS_DIRECTORY = "runs"
CONTEST_FILE = "contest.json"

_WARM_UP_REQUESTS = 8
_WARM_UP_USERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is offered. One of `multiple`, `rate`, `users`, or nothing: the trace's own."""

    multiple: float | None = None
    """Of the first side's capacity."""

    rate: float | None = None
    """Requests a second."""

    users: int | None = None
    """A closed loop."""

    @property
    def name(self) -> str:
        if self.multiple is not None:
            return f"{self.multiple:g} × capacity"
        if self.rate is not None:
            return f"{self.rate:g} requests a second"
        return f"{self.users} users" if self.users is not None else "the trace's own rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One run of one side."""

    side: str
    load: str
    round: int
    """From 0."""

    file: str
    """Raw result, below the contest's directory."""

    others_cpu_share: float | None = None
    """Of the machine, that neither the side nor the client used; None where it is not known."""

    pools: Sequence[dict[str, Any]] = ()


@dataclass(slots=True, kw_only=True)
class Record:
    """A contest as it is kept: enough to make the report again."""

    sides: list[dict[str, Any]]
    loads: list[str]
    taken: list[Taken] = field(default_factory=list[Taken])
    capacity: dict[str, float] = field(default_factory=dict[str, float])
    """Requests a second that each side answered in a closed loop."""

    ready_s: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    capacity_users: int | None = None
    interrupted: bool = False

    def save(self, directory: Path) -> None:
        value = {
            "sides": self.sides,
            "loads": self.loads,
            "taken": [
                {name: getattr(each, name) for name in Taken.__dataclass_fields__}
                for each in self.taken
            ],
            "capacity": self.capacity,
            "ready_s": self.ready_s,
            "capacity_users": self.capacity_users,
            "interrupted": self.interrupted,
        }
        (directory / CONTEST_FILE).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))

    @classmethod
    def load(cls, directory: Path) -> Record:
        """Raises ClusterError."""
        try:
            value = orjson.loads((directory / CONTEST_FILE).read_bytes())
            return cls(**{**value, "taken": [Taken(**each) for each in value["taken"]]})
        except (OSError, orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise ClusterError(
                f"{directory / CONTEST_FILE}: not a contest ({error}); give the directory that "
                "`tailrace compare` wrote"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is offered."""

    spec: Spec
    loads: tuple[Load, ...]
    rounds: int = 2
    api_key: str | None = None
    capacity_users: int = 16
    capacity_requests: int = 64
    """Of the closed loop that finds the capacity; only where a load is a multiple of it."""

    @property
    def needs_capacity(self) -> bool:
        return any(load.multiple is not None for load in self.loads)


class Contest:
    """One comparison. May be held once."""

    def __init__(
        self,
        sides: Sequence[Side],
        plan: Plan,
        directory: Path,
        say: Say,
        on_run: Callable[[], None],
    ) -> None:
        """`on_run` is called after each run, which takes signal handlers over and drops them.

        Raises ClusterError for two sides of one name.
        """
        names = [side.name for side in sides]
        if len(set(names)) < len(names) or len(names) < 2:
            raise ClusterError(
                f"sides {', '.join(names)}: need two or more, each with its own name"
            )
        self._sides = list(sides)
        self._plan = plan
        self._directory = directory
        self._say = say
        self._on_run = on_run
        self.record = Record(
            sides=[side.describe() for side in sides],
            loads=[load.name for load in plan.loads],
            capacity_users=plan.capacity_users if plan.needs_capacity else None,
        )

    def hold(self) -> Record:
        """All rounds. Ctrl-C during a run ends it after that run, with what there is.

        Raises ClusterError, ConfigError.
        """
        try:
            (self._directory / RUNS_DIRECTORY).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(
                f"--out {self._directory}: {error.strerror}; give another directory"
            ) from error
        for number, side in self._turns():
            self._say(f"round {number + 1} of {self._plan.rounds}: {side.name}")
            try:
                with side.serving(self._say) as served:
                    self._turn(number, side, served)
            except ClusterError as error:
                if self.record.taken:
                    error.args = (
                        f"{error}\nwhat was measured before is kept: "
                        f"tailrace compare --again {self._directory}",
                    )
                raise
            finally:
                self.record.save(self._directory)
            if self.record.interrupted:
                break
        return self.record

    def _turns(self) -> Iterator[tuple[int, Side]]:
        for number in range(self._plan.rounds):
            for side in self._sides if number % 2 == 0 else reversed(self._sides):
                yield number, side

    def _turn(self, number: int, side: Side, served: Served) -> None:
        record, plan = self.record, self._plan
        if served.ready_s is not None:
            record.ready_s.setdefault(side.name, []).append(served.ready_s)
        self._run(served, self._closed(_WARM_UP_USERS, _WARM_UP_REQUESTS, seed=number), None)
        if plan.needs_capacity and side.name not in record.capacity and not record.interrupted:
            spec = self._closed(plan.capacity_users, plan.capacity_requests, seed=500 + number)
            _, outcomes = self._run(served, spec, None)
            record.capacity[side.name] = closed_loop_rate(outcomes, plan.capacity_users)
            self._say(f"{side.name}: {record.capacity[side.name]:.2f} requests a second at most")
        for place, load in enumerate(plan.loads):
            if record.interrupted:
                return
            self._say(f"{side.name}, {load.name}")
            name = f"{number + 1}-{_slug(side.name)}-{_slug(load.name)}.jsonl"
            path = self._directory / RUNS_DIRECTORY / name
            spec = self._spec(load, seed=1000 * (number + 1) + place, label=side.name)
            others = Bystanders(served.processes) if served.ready_s is not None else None
            with PoolSampler(served.url, names=served.replicas) as sampler:
                run, _ = self._run(served, spec, path)
            duration_s = run.end.duration_s if run.end else 0.0
            record.taken.append(
                Taken(
                    side=side.name,
                    load=load.name,
                    round=number,
                    file=f"{RUNS_DIRECTORY}/{name}",
                    others_cpu_share=None if others is None else round(others.share(), 4),
                    pools=sampler.during(duration_s),
                )
            )

    def _run(self, served: Served, spec: Spec, path: Path | None) -> tuple[Run, list[Outcome]]:
        if served.block_tokens is not None and spec.factors.block_tokens == 1:
            spec = replace(spec, factors=replace(spec.factors, block_tokens=served.block_tokens))
        prepared = prepare(spec, served.url, api_key=self._plan.api_key)
        with open(path or os.devnull, "wb") as raw:
            run, outcomes = offer(prepared, raw=raw, say=self._say)
        self._on_run()
        if run.end is not None and run.end.interrupted:
            self.record.interrupted = True
        return run, outcomes

    def _spec(self, load: Load, *, seed: int, label: str) -> Spec:
        base = self._plan.spec
        rate = load.rate
        if load.multiple is not None:
            capacity = self.record.capacity[self._sides[0].name]
            rate = load.multiple * capacity
        factors = replace(base.factors, seed=base.factors.seed + seed)
        if rate is not None:
            factors = at_rate(factors, base.traces, rate)
        if load.users is not None:
            factors = replace(factors, users=load.users, rate=None)
        return replace(base, factors=factors, label=label)

    def _closed(self, users: int, num_requests: int, *, seed: int) -> Spec:
        base = self._plan.spec
        factors = replace(
            base.factors,
            users=users,
            max_requests=num_requests,
            max_duration_s=None,
            rate=None,
            time=1.0,
            arrivals="trace",
            seed=base.factors.seed + 100_000 + seed,
        )
        return replace(base, factors=factors, label="closed loop")


def at_rate(factors: Factors, traces: Sequence[Trace], rate: float) -> Factors:
    """So that `rate` requests a second are offered within `max_duration_s`.

    A trace is no even stream: its first minute may have half its mean rate. So the time factor is
    that of the requests that are offered, which keep their pattern, not that of the whole trace.
    Where there is no such window (a mix, arrivals that are made) the rate is the mean of the whole.
    """
    whole = replace(factors, rate=rate, time=1.0)
    duration_s = factors.max_duration_s
    if factors.arrivals != "trace" or len(traces) != 1 or duration_s is None:
        return whole
    if not traces[0].has_arrivals or factors.profile != Profile():
        return whole
    times = [each.at_s for each in traces[0].requests if each.at_s is not None]
    times = [at_s for at_s in times if at_s >= factors.skip_s]
    count = max(2, round(rate * duration_s))
    if factors.max_requests is not None:
        count = min(count, factors.max_requests)
    if len(times) < count or times[count - 1] <= times[0]:
        return whole
    span_s = times[count - 1] - times[0]
    return replace(
        factors,
        rate=None,
        time=(count - 1) / rate / span_s,
        max_requests=count,
        max_duration_s=None,
    )


def closed_loop_rate(outcomes: Sequence[Outcome], users: int) -> float:
    """Requests a second while every user was busy: from the end of the first wave to the last
    sending.

    Raises ClusterError where too few were answered to say it.
    """
    ends = sorted(each.end_s for each in outcomes if each.result == "ok")
    if len(ends) < 2 * users:
        failed = next((e.message or e.code for e in outcomes if e.result != "ok"), None)
        raise ClusterError(
            f"capacity: only {len(ends)} of {len(outcomes)} requests of a closed loop with {users} "
            f"users were answered{f' ({failed})' if failed else ''}; give --rate instead of --loads"
        )
    first_s = ends[users - 1]
    last_s = max(each.sent_s for each in outcomes)
    counted = sum(1 for end in ends if first_s < end <= last_s)
    if last_s <= first_s or not counted:
        raise ClusterError(
            f"capacity: {len(outcomes)} requests are too few for {users} users; raise "
            "--capacity-requests"
        )
    return counted / (last_s - first_s)


def rounds_of(
    record: Record, directory: Path
) -> dict[str, dict[str, dict[int, tuple[Taken, Run, list[Outcome]]]]]:
    """Raw results by load, side and round. Raises ResultError."""
    found: dict[str, dict[str, dict[int, tuple[Taken, Run, list[Outcome]]]]] = {}
    for taken in record.taken:
        run, outcomes = read_result(directory / taken.file)
        by_side = found.setdefault(taken.load, {})
        by_side.setdefault(taken.side, {})[taken.round] = (taken, run, outcomes)
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-") or "side"
