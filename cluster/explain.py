"""`tailrace explain`: where one request's time went, or which requests took the longest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
import httpx

from cluster.chat import default_url
from cluster.cli import emit, json_option
from cluster.errors import ClusterError, NotRunning
from engine.errors import EngineError, RequestError

WIDTH = 44
"""Characters of the line that a request's whole time is drawn on."""

_COLUMNS = ("REQUEST", "MODEL", "TIER", "SECONDS", "TTFT", "TOKENS", "STATUS", "MOST IN")


class ExplainClient:
    """A gateway that explains."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            headers=headers, transport=transport, trust_env=False, timeout=15.0
        )

    def close(self) -> None:
        self._http.close()

    def explain(self, request_id: str) -> dict[str, Any]:
        """Raises RequestError for a request that no gateway remembers, ClusterError."""
        return self._get(f"/tailrace/explain/{quote(request_id, safe='')}", {})

    def requests(self, **query: Any) -> dict[str, Any]:
        """Raises RequestError, ClusterError."""
        return self._get("/tailrace/requests", {k: v for k, v in query.items() if v is not None})

    def _get(self, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.get(f"{self.url}{path}", params=dict(query))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRunning(
                f"{self.url}: nobody answers ({error}); start it with `tailrace up`, or give --url"
            ) from error
        try:
            body = answer.json()
        except ValueError as error:
            raise ClusterError(f"{self.url}{path}: not an answer of a Tailrace gateway") from error
        if answer.status_code == 200:
            return body
        raise _failure(answer.status_code, body)


def _failure(status: int, body: Any) -> EngineError:
    told = body.get("error") if isinstance(body, dict) else None
    message = str(told.get("message")) if isinstance(told, dict) else f"status {status}"
    if 400 <= status < 500:
        return RequestError(message, status=status)
    return ClusterError(f"the gateway failed ({status}): {message}")


def drawn(told: Mapping[str, Any], width: int = WIDTH) -> Iterator[str]:
    """An explanation for people, line by line."""
    own_s, total_s = told["duration_s"], told["total_s"]
    yield (
        f"{told['request_id']}  {told['model'] or '?'}  {told['tier']}  {told['outcome']}"
        + (f" {told['status']}" if told["status"] else "")
        + ("" if told["complete"] else "  (still running)")
    )
    usage = told["usage"]
    parts = [f"{_time(own_s)} in all"]
    if told["external_s"] > 0:
        parts.append(f"{_time(told['external_s'])} outside before it")
    if told["ttft_s"] is not None:
        parts.append(f"first token after {_time(told['ttft_s'])}")
    parts.append(f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out")
    yield ", ".join(parts)
    if told["dominant_phase"] is not None:
        share = told["dominant_s"] / total_s if total_s else 0.0
        line = f"most of it: {told['dominant_phase']}, {_time(told['dominant_s'])} ({share:.0%})"
        idle = told["idle"]
        if idle is not None:
            line += f"; on an idle cluster {_time(idle['total_s'])}"
            if told["most_delayed_phase"] is not None:
                line += (
                    f", {told['most_delayed_phase']} cost "
                    f"{_time(told['most_delayed_s'])} more than there"
                )
        yield line
    yield ""
    start_s = min((s["start_s"] for s in told["segments"]), default=0.0)
    for segment in told["segments"]:
        bar = _bar(segment["start_s"] - start_s, segment["duration_s"], total_s, width)
        name = f"{segment['name'][:16]:16}"
        yield f"  {name} {_time(segment['duration_s']):>9} |{bar}| {segment['where']}"
    yield (
        f"\naccounted for {told['accounted']:.2%}, unaccounted {_time(told['unaccounted_s'])}, "
        f"clocks within {_time(told['clock_uncertainty_s'])}"
    )
    yield from _sections(told)


def _sections(told: Mapping[str, Any]) -> Iterator[str]:
    queue = told.get("queue")
    if queue is not None:
        line = f"queue     waited {_time(queue['waited_s'])}"
        arrival = queue.get("at_arrival")
        if arrival is not None:
            line += (
                f", {arrival['ahead']} ahead of it among {_mix(arrival['waiting'])}"
                if arrival["waiting"]
                else ", nobody waited"
            )
            if queue["granted_before"]:
                line += f"; went first: {_mix(queue['granted_before'])}"
        yield line + (" (the queue was away)" if queue["without_queue"] else "")
    for role, route in (told.get("route") or {}).items():
        if route is not None:
            scores = ", ".join(f"{r} {s:g}" for r, s in (route["scores"] or {}).items())
            yield f"route     {role} {route['replica']}" + (
                f": {route['rule']} ({scores})" if scores else ""
            )
    prefix = told.get("prefix")
    if prefix is not None:
        yield (
            f"prefix    {prefix['local_hit_tokens'] or 0} tokens cached at decode, "
            f"{prefix['remote_hit_tokens'] or 0} at prefill, {prefix['computed_tokens']} computed"
        )
    prefill = told.get("prefill")
    if prefill is not None and prefill["num_chunks"]:
        shared = sum(1 for chunk in prefill["chunks"] if chunk["other_tokens"])
        yield (
            f"prefill   {prefill['num_chunks']} steps on {prefill['replica']} "
            f"({prefill['decision']}), {shared} shared with others"
        )
        for chunk in prefill["chunks"][:12]:
            yield (
                f"            {chunk['tokens']:5} tokens in {_time(chunk['duration_s'])}"
                f" at +{_time(chunk['start_s'])}, {chunk['other_tokens']} of others beside them"
            )
    transfer = told.get("transfer")
    if transfer is not None:
        yield (
            f"transfer  {transfer['bytes']} bytes from {transfer['replica']}: "
            f"{_time(transfer['hidden_s'])} hidden, {_time(transfer['exposed_s'])} exposed"
        )
    for pull in told.get("failed_pulls") or ():
        yield f"          from {pull['replica']}: {pull['stage']} after {_time(pull['seconds'])}"
    for choice in (told.get("decode") or {}).get("choices", ()):
        line = f"decode    choice {choice['choice']} on {choice['replica']}: "
        line += f"{choice['tokens']} tokens"
        if choice["mean_gap_s"] is not None:
            line += (
                f", mean gap {_time(choice['mean_gap_s'])}, worst {_time(choice['worst_gap_s'])}"
            )
        if choice["mean_rows"] is not None:
            line += f", {choice['mean_rows']:.1f} requests a step"
        yield line
        for stall in choice["stalls"]:
            step = stall["longest_step"]
            yield (
                f"            stalled {_time(stall['gap_s'])}: {stall['cause']}, {stall['steps']} "
                f"steps, the longest with {step['rows']} rows and {step['prompt_tokens']} tokens "
                f"of {step['prompts']} prompts"
            )
    if told.get("preemptions"):
        yield f"preempted {told['preemptions']} times"
    pressure = told.get("backpressure") or {}
    if pressure.get("blocked_s"):
        yield (
            f"client    {pressure['writes']} writes took {_time(pressure['blocked_s'])}, "
            f"the worst {_time(pressure['worst_s'])}"
        )
    for move in told.get("migrations") or ():
        yield (
            f"moved     from {move['replica']} to {move['to']} at +{_time(move['at_s'])}: "
            f"{move['why']}"
        )
    for note in told.get("degradations") or ():
        yield f"note      {note['kind']} at +{_time(note['at_s'])}"


def listed(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of requests."""
    table = [_COLUMNS, *(_row(row) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
    for line in table:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["request_id"],
        row["model"] or "",
        row["tier"],
        f"{row['duration_s']:.3f}",
        "" if row["ttft_s"] is None else f"{row['ttft_s']:.3f}",
        f"{row['prompt_tokens']}+{row['completion_tokens']}",
        str(row["status"] or row["outcome"]),
        row["dominant_phase"] or "",
    )


def _bar(start_s: float, length_s: float, whole_s: float, width: int) -> str:
    if whole_s <= 0:
        return " " * width
    first = min(width - 1, int(width * start_s / whole_s))
    count = max(1, round(width * length_s / whole_s))
    return (" " * first + "█" * min(count, width - first)).ljust(width)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if abs(seconds) >= 0.001 else f"{seconds * 1e6:.0f} µs"


def _mix(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {tier}" for tier, n in counts.items())


@click.command()
@click.argument("request_id", required=False)
@click.option("--url", help="Gateway to ask. Default: the running session, else port 8000.")
@click.option("--tier", help="List requests of this tier only.")
@click.option("--model", help="List requests of this model only.")
@click.option("--latest", is_flag=True, help="List the latest instead of the slowest.")
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    default=20,
    show_default=True,
    help="How many to list.",
)
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@json_option
def explain(
    request_id: str | None,
    url: str | None,
    tier: str | None,
    model: str | None,
    latest: bool,
    limit: int,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Say where the time of REQUEST_ID went: an answer's `id`, or its `x-request-id`.

    Without one, list the slowest requests that the gateways remember.
    """
    client = ExplainClient(url or default_url(), api_key=api_key)
    try:
        if request_id is not None:
            told = client.explain(request_id)
            lines = () if as_json else drawn(told)
        else:
            told = client.requests(
                slowest="false" if latest else "true", limit=limit, tier=tier, model=model
            )
            lines = () if as_json else listed(told["data"])
    finally:
        client.close()
    if as_json:
        emit(told)
    for line in lines:
        click.echo(line)
