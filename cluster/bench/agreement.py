"""`tailrace bench agreement`: whether other clients, our client and our server say the same.

Each client offers the same shape of load at the same rate on a run of its own: AIPerf, guidellm and
that of `tailrace replay`. Beside each run stands what the server said in the same window, as
differences of its histograms and from the lines of its request log. Two figures agree within the
larger of 5 % and 5 ms.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.bench.load_tools import (
    AIPerf,
    GuideLLM,
    Latency,
    LoadTool,
    Measured,
    Offered,
    run_tool,
)
from cluster.bench.stack import GATEWAY_BUILDER, Stack
from cluster.bench.summary import percentile, significant
from cluster.errors import ClusterError, NotRunning
from cluster.replay.load import Patience
from cluster.replay.mix import Part
from cluster.replay.outcome import Outcome
from cluster.replay.replay import Prepared, Spec, offer, prepare
from cluster.replay.retry import RetryPolicy
from cluster.replay.trace import Trace, TraceRequest
from cluster.replay.workload import Factors
from cluster.report.figures import duration_of, itl_s, num_output_tokens, ttft_s
from engine.errors import EngineError

Say = Callable[[str], None]

WITHIN_RATIO = 0.05
WITHIN_MS = 5.0

OURS = "replay"
TTFT = "tailrace_request_ttft_seconds"
ITL = "tailrace_request_itl_seconds"

SETTLE_S = 2.5
"""Until the request log is written and a gateway's figures are up to date."""

_SUM_OR_COUNT = re.compile(rf"^({TTFT}|{ITL})_(sum|count)(\{{[^}}]*\}})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The load of every run."""

    rate: float = 10.0
    seconds: float = 15.0
    input_tokens: int = 128
    output_tokens: int = 64

    @property
    def num_requests(self) -> int:
        return max(2, round(self.rate * self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One client's run, and the server in the same window."""

    client: str
    measured: Measured
    histograms: Measured | None = None
    """None where the server has no such histograms, or counts other requests than this run's."""

    request_log: Measured | None = None
    """None where there is none that can be read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure, said by two."""

    figure: str
    first: str
    second: str
    values: tuple[float, float]
    counts: bool = True
    """Whether it is part of the verdict. The p99 of two runs is not: of so few requests it is the
    one or two slowest, and each run has its own."""

    @property
    def agrees(self) -> bool:
        first, second = self.values
        slack = WITHIN_RATIO * max(abs(first), abs(second))
        if self.figure.endswith("_ms") or "_ms." in self.figure:
            slack = max(slack, WITHIN_MS)
        return abs(second - first) <= slack

    def to_json(self) -> dict[str, Any]:
        first, second = self.values
        return {
            "figure": self.figure,
            "first": self.first,
            "second": self.second,
            "values": [significant(first), significant(second)],
            "difference": significant(second - first),
            "agrees": self.agrees,
            "in_verdict": self.counts,
        }


def bench_agreement(
    url: str | None,
    *,
    model: str | None,
    shape: Shape,
    aiperf: str | None,
    guidellm: str | None,
    request_log: Path | None,
    tokenizer: str | None,
    api_key: str | None,
    keep: Path | None,
    say: Say,
) -> dict[str, Any]:
    """Run every client in turn. Paths of tools that are None are looked for on PATH.

    Raises:
        EngineError: nobody answers, a tool is not there or failed, requests failed.
    """
    tools = _tools(aiperf, guidellm)
    base = (url or _session_url()).rstrip("/").removesuffix("/v1")
    log = request_log or _request_log_of(url)
    directory = Path(tempfile.mkdtemp(prefix="tailrace-agreement-")) if keep is None else keep
    seed = time.time_ns() % 2**31
    runs: list[Run] = []
    served = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clients: list[LoadTool | None] = [None, *tools]
        for number, tool in enumerate(clients):
            name = OURS if tool is None else tool.name
            prepared = _prepared(base, shape, model, tokenizer, api_key, seed + number)
            served = prepared.schedule.offers[0].model
            say(f"{name}: {shape.num_requests} requests at {shape.rate:g} a second")
            before, began_unix_s = _histograms(base), time.time()
            if tool is None:
                measured = from_outcomes(offer(prepared)[1])
            else:
                offered = _offered(prepared, base, shape, api_key)
                measured = run_tool(tool, offered, directory / name)
            if measured.num_requests != shape.num_requests:
                raise ClusterError(
                    f"{name} counts {measured.num_requests} answers to {shape.num_requests} "
                    "requests: no comparison of runs with failures"
                )
            time.sleep(SETTLE_S)
            lines = [] if log is None else _lines_since(log, began_unix_s)
            runs.append(
                Run(
                    client=name,
                    measured=measured,
                    histograms=from_histograms(before, _histograms(base), shape.num_requests),
                    request_log=from_request_log(lines, shape.num_requests),
                )
            )
    except BaseException:
        if keep is None:
            say(f"what the tools left: {directory}")
        raise
    if keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    found = differences(runs)
    return {
        "url": base,
        "model": served,
        "rate": shape.rate,
        "num_requests": shape.num_requests,
        "input_tokens": shape.input_tokens,
        "output_tokens": shape.output_tokens,
        "within": {"ratio": WITHIN_RATIO, "ms": WITHIN_MS},
        "runs": {
            run.client: {
                "client": run.measured.to_json(),
                "histograms": None if run.histograms is None else run.histograms.to_json(),
                "request_log": None if run.request_log is None else run.request_log.to_json(),
            }
            for run in runs
        },
        "differences": [difference.to_json() for difference in found],
        "agrees": all(difference.agrees for difference in found if difference.counts),
    }


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Each client beside its server, then each other client beside ours."""
    found: list[Difference] = []
    for run in runs:
        for name, said in (("histograms", run.histograms), ("request log", run.request_log)):
            if said is not None:
                found += _between(run.client, run.measured, f"{name} ({run.client})", said)
    ours = next((run for run in runs if run.client == OURS), None)
    for run in runs:
        if ours is not None and run is not ours:
            found += _between(OURS, ours.measured, run.client, run.measured, across_runs=True)
    return found


def _between(
    first: str, one: Measured, second: str, other: Measured, *, across_runs: bool = False
) -> Iterator[Difference]:
    for figure, value in _figures(one):
        beside = dict(_figures(other)).get(figure)
        if beside is not None:
            yield Difference(
                figure=figure,
                first=first,
                second=second,
                values=(value, beside),
                counts=not (across_runs and figure.endswith("p99")),
            )


def _figures(measured: Measured) -> Iterator[tuple[str, float]]:
    for name, latency in (("ttft_ms", measured.ttft_ms), ("itl_ms", measured.itl_ms)):
        for part in ("mean", "p50", "p99"):
            value = getattr(latency, part)
            if value is not None:
                yield f"{name}.{part}", value
    for name in ("requests_per_s", "tokens_per_s"):
        value = getattr(measured, name)
        if value is not None:
            yield name, value


# What each says


def from_outcomes(outcomes: Sequence[Outcome]) -> Measured:
    """Of our own client. Raises ClusterError where none was answered."""
    whole = [outcome for outcome in outcomes if outcome.result == "ok"]
    if not whole:
        first = next((outcome.message for outcome in outcomes), "nothing was sent")
        raise ClusterError(f"no request was answered in full; the first: {first}")
    seconds = duration_of(whole)
    return Measured(
        num_requests=len(whole),
        ttft_ms=_latency([ttft_s(outcome) for outcome in whole]),
        itl_ms=_latency([itl_s(outcome) for outcome in whole]),
        requests_per_s=len(whole) / seconds,
        tokens_per_s=sum(num_output_tokens(outcome) for outcome in whole) / seconds,
    )


def from_histograms(
    before: Mapping[str, tuple[float, float]],
    after: Mapping[str, tuple[float, float]],
    num_requests: int,
) -> Measured | None:
    """Means between two scrapes, each `(sum in seconds, count)` by name. None where others asked
    meanwhile too, or the scrapes reached different gateways."""
    spent: dict[str, float] = {}
    for name in (TTFT, ITL):
        total, count = after.get(name, (0.0, 0.0))
        was_total, was_count = before.get(name, (0.0, 0.0))
        if count <= was_count:
            return None
        if name == TTFT and count - was_count != num_requests:
            return None
        spent[name] = 1000 * (total - was_total) / (count - was_count)
    return Measured(
        num_requests=num_requests,
        ttft_ms=Latency(mean=spent[TTFT]),
        itl_ms=Latency(mean=spent[ITL]),
    )


def scraped(text: str) -> dict[str, tuple[float, float]]:
    """`(sum, count)` of both histograms over all labels, in Prometheus' text format."""
    found = {TTFT: [0.0, 0.0], ITL: [0.0, 0.0]}
    for name, part, _, value in _SUM_OR_COUNT.findall(text):
        found[name][part == "count"] += float(value)
    return {name: (total, count) for name, (total, count) in found.items() if count}


def from_request_log(lines: Sequence[Mapping[str, Any]], num_requests: int) -> Measured | None:
    """Of the lines of one window. None where they are not exactly this run's."""
    whole = [line for line in lines if line["outcome"] == "finished"]
    if len(whole) != num_requests:
        return None
    began = min(line["at"] for line in whole)
    seconds = max(line["at"] + line["duration_s"] for line in whole) - began
    return Measured(
        num_requests=len(whole),
        ttft_ms=_latency([line["ttft_s"] for line in whole]),
        itl_ms=_latency([_logged_gap_s(line) for line in whole]),
        requests_per_s=len(whole) / seconds,
        tokens_per_s=sum(line["completion_tokens"] for line in whole) / seconds,
    )


def _logged_gap_s(line: Mapping[str, Any]) -> float | None:
    tokens = line["completion_tokens"]
    if line["ttft_s"] is None or tokens < 2:
        return None
    return (line["duration_s"] - line["ttft_s"]) / (tokens - 1)


def _latency(seconds: Sequence[float | None]) -> Latency:
    values = [1000 * value for value in seconds if value is not None]
    if not values:
        return Latency()
    return Latency(
        mean=sum(values) / len(values), p50=percentile(values, 50), p99=percentile(values, 99)
    )


# The load


def _prepared(
    url: str, shape: Shape, model: str | None, tokenizer: str | None, api_key: str | None, seed: int
) -> Prepared:
    """A schedule of our client; others get its prompts. Each run has a seed of its own, so that
    no prefix cache helps the later ones."""
    row = TraceRequest(
        at_s=None, input_tokens=shape.input_tokens, output_tokens=shape.output_tokens
    )
    trace = Trace(
        name="agreement",
        path=Path("agreement"),
        format="constant",
        sha256="",
        requests=(row,) * shape.num_requests,
    )
    spec = Spec(
        traces=(trace,),
        mix=(Part(source=trace.name, sampling={"temperature": 0}),),
        factors=Factors(rate=shape.rate, arrivals="constant", seed=seed),
        patience=Patience(retry=RetryPolicy(max_retries=0)),
        endpoint="completions",
        model=model,
        tokenizer=tokenizer,
    )
    return prepare(spec, url, api_key=api_key)


def _offered(prepared: Prepared, url: str, shape: Shape, api_key: str | None) -> Offered:
    offers = prepared.schedule.offers
    return Offered(
        url=url,
        model=offers[0].model,
        rate=shape.rate,
        prompts=tuple(prepared.writers[each.model].text(each.segments) for each in offers),
        input_tokens=shape.input_tokens,
        output_tokens=shape.output_tokens,
        api_key=api_key,
    )


def _tools(aiperf: str | None, guidellm: str | None) -> list[LoadTool]:
    found: list[LoadTool] = []
    if path := aiperf or shutil.which("aiperf"):
        found.append(AIPerf(path))
    if path := guidellm or shutil.which("guidellm"):
        found.append(GuideLLM(path))
    if not found:
        raise ClusterError(
            "neither aiperf nor guidellm is on PATH: install them in environments of their own and "
            "give --aiperf PATH, --guidellm PATH"
        )
    return found


# The server


def _session_url() -> str:
    from cluster.chat import default_url

    return default_url()


def _histograms(url: str) -> dict[str, tuple[float, float]]:
    """Empty for a server without /metrics."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False)
    except httpx.HTTPError:
        return {}
    return scraped(answer.text) if answer.status_code == 200 else {}


def _request_log_of(url: str | None) -> Path | None:
    """Where our own session's gateway writes it; None if it does not, or is not our session."""
    try:
        configs = Stack.running(url).configs()
    except (NotRunning, EngineError):
        return None
    for config in configs:
        if config.get("import_path") == GATEWAY_BUILDER:
            for deployment in config.get("deployments", ()):
                settings = (deployment.get("user_config") or {}).get("request_log")
                if settings:
                    return Path(settings["path"]).expanduser()
    return None


def _lines_since(path: Path, unix_s: float) -> list[dict[str, Any]]:
    """Raises ClusterError where the file cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ClusterError(f"--request-log {path}: {error.strerror}") from error
    read = (json.loads(line) for line in lines)
    return [line for line in read if line["at"] >= unix_s]


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{result['num_requests']} requests at {result['rate']:g} a second, "
        f"{result['input_tokens']} tokens in, {result['output_tokens']} out",
        f"{'':32}{'ttft ms':^27}{'itl ms':^27}",
        f"{'':32}{'mean':>9}{'p50':>9}{'p99':>9}{'mean':>9}{'p50':>9}{'p99':>9}"
        f"{'req/s':>9}{'tok/s':>9}",
    ]
    for client, run in result["runs"].items():
        for who, said in run.items():
            name = client if who == "client" else f"  server's {who.replace('_', ' ')}"
            if said is None:
                lines.append(f"{name:32}{'unknown':>9}")
                continue
            values = [said[kind][part] for kind in ("ttft_ms", "itl_ms") for part in _PARTS]
            values += [said["requests_per_s"], said["tokens_per_s"]]
            lines.append(f"{name:32}" + "".join(f"{_cell(value):>9}" for value in values))
    for each in result["differences"]:
        if not each["agrees"]:
            first, second = each["values"]
            note = "" if each["in_verdict"] else " (of two runs; not in the verdict)"
            lines.append(
                f"differs: {each['figure']}: {each['first']} {first}, {each['second']} {second}"
                + note
            )
    lines.append("all agree" if result["agrees"] else "they do not agree")
    return lines


_PARTS = ("mean", "p50", "p99")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
