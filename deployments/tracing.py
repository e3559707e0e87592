"""OpenTelemetry: a request's spans, made from its waterfall after it ended. Off by default.

```
parent of the client's
└── chat smollm2-135m                      root, one a request
    ├── tokenize   ├── queue   ├── route
    ├── prefill    ├── kv_transfer         prefill and decode are siblings
    ├── decode     └── stream
└── tool ..., retrieval ...                time that the client told of, before the root
```

Attributes are those of the GenAI conventions (`gen_ai.*`, OpenTelemetry semantic-conventions-genai,
status Development) and `tailrace.*`. Context comes in as W3C `traceparent` and goes out in the
answer's header of the same name. Nothing of it runs while a request is answered but reading that
header and drawing two numbers.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deployments.explain.waterfall import Phase, Segment, Waterfall
from engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

Trace = tuple[str, str, str | None, bool]
"""`RequestRecord.trace`: trace id, own span id, the parent's span id, sampled."""

_TRACEPARENT = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_SPANS = {
    Phase.TOKENIZE: "tokenize",
    Phase.QUEUE: "queue",
    Phase.ROUTE: "route",
    Phase.PREFILL: "prefill",
    Phase.TRANSFER: "kv_transfer",
    Phase.DECODE: "decode",
    Phase.STREAM: "stream",
    Phase.RECOVERY: "recovery",
    Phase.UNACCOUNTED: "unaccounted",
}


def parent_of(headers: Mapping[bytes, bytes]) -> tuple[str, str, bool] | None:
    """Trace id, span id and the sampled flag of the `traceparent` header; None where there is no
    valid one (W3C Trace Context, level 1: an invalid one is ignored)."""
    match = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").strip())
    if match is None or match["version"] == b"ff":
        return None
    if match["version"] == b"00" and match[5] is not None:
        return None
    trace, span = match["trace"].decode(), match["span"].decode()
    if not int(trace, 16) or not int(span, 16):
        return None
    return trace, span, bool(int(match["flags"], 16) & 1)


class Tracer:
    """Decides what is traced, and exports it. Close it when done."""

    def __init__(
        self,
        endpoint: str,
        *,
        sample: float,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        delay_s: float = 5.0,
        instance: str = "",
    ) -> None:
        """`endpoint` is an OTLP/HTTP collector (`http://host:4318`); without a path, spans go to
        `/v1/traces` there. `sample` is the share of requests that bring no context of their own;
        with one, its sampled flag decides.

        Raises ConfigError where the extra `tracing` is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint={endpoint!r}: {error.name} is not installed; "
                "pip install 'tailrace[tracing]' on the gateways' nodes, or leave tracing out"
            ) from error
        self.endpoint = endpoint
        self.sample = sample
        self._resource = Resource.create(
            {"service.name": "tailrace", **({"service.instance.id": instance} if instance else {})}
        )
        self._scope = InstrumentationScope("tailrace")
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(
                endpoint=_with_path(endpoint), headers=dict(headers or {}), timeout=timeout_s
            ),
            schedule_delay_millis=delay_s * 1000,
        )

    def begin(self, headers: Mapping[bytes, bytes]) -> Trace:
        """A request came in."""
        parent = parent_of(headers)
        own = f"{random.getrandbits(64) or 1:016x}"
        if parent is not None:
            trace, span, sampled = parent
            return trace, own, span, sampled
        bits = random.getrandbits(128) or 1
        # As the SDK's TraceIdRatioBased decides, so that services on the same ratio agree.
        sampled = bits & ((1 << 64) - 1) < round(self.sample * (1 << 64))
        return f"{bits:032x}", own, None, sampled

    def export(self, waterfall: Waterfall) -> None:
        """Queue the spans of a request that is sampled; they leave on a thread of their own."""
        for span in spans(waterfall, self._resource, self._scope):
            self._processor.on_end(span)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything queued was sent. Blocks."""
        return self._processor.force_flush(int(timeout_s * 1000))

    def close(self) -> None:
        """Send what is queued, then end. Blocks for up to the exporter's timeout."""
        self._processor.shutdown()


def traceparent(trace: Trace) -> bytes:
    """The answer's header: the request's own span, for whoever traces further."""
    trace_id, own, _, sampled = trace
    return f"00-{trace_id}-{own}-{'01' if sampled else '00'}".encode()


def spans(waterfall: Waterfall, resource: Any, scope: Any) -> list[ReadableSpan]:
    """A request's spans, root first. Its record's `trace` is set."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    record = waterfall.record
    assert record.trace is not None, "a request without a trace has no spans"
    trace_id, own, parent, _ = record.trace
    flags = TraceFlags(TraceFlags.SAMPLED)

    def context(span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(trace_id, 16), span_id, is_remote=remote, trace_flags=flags)

    def at(seconds: float) -> int:
        return int((record.received_unix_s + seconds) * 1e9)

    root = context(int(own, 16))
    above = None if parent is None else context(int(parent, 16), remote=True)
    failed = record.outcome != "finished"
    operation = _OPERATIONS.get(record.endpoint, record.endpoint)
    made = [
        ReadableSpan(
            name=f"{operation} {record.model}".strip(),
            context=root,
            parent=above,
            resource=resource,
            instrumentation_scope=scope,
            kind=SpanKind.SERVER,
            attributes=_root_attributes(waterfall, operation),
            status=Status(StatusCode.ERROR, record.code) if failed else Status(StatusCode.UNSET),
            start_time=at(0.0),
            end_time=at(waterfall.ends_s),
        )
    ]
    for part in _parts(waterfall):
        external = part.start_s < 0
        name = part.name if external else _SPANS.get(part.phase, part.name)
        events: list[Event] = []
        if name == "decode":
            events = [
                Event("stall", _flat(stall), timestamp=at(stall["at_s"]))
                for stall in _stalls(waterfall)
                if part.start_s <= stall["at_s"] <= part.start_s + part.duration_s
            ]
        made.append(
            ReadableSpan(
                name=name,
                context=context(random.getrandbits(64) or 1),
                parent=(above or root) if external else root,
                resource=resource,
                instrumentation_scope=scope,
                kind=SpanKind.INTERNAL,
                attributes=_part_attributes(waterfall, part, name),
                events=events,
                start_time=at(part.start_s),
                end_time=at(part.start_s + part.duration_s),
            )
        )
    return made


def _parts(waterfall: Waterfall) -> list[Segment]:
    """One part for each run of segments of one phase. The transfer begins where it was hidden
    behind the prefill; spans of the client's keep their own names."""
    parts: list[Segment] = []
    for segment in waterfall.segments:
        last = parts[-1] if parts else None
        if segment.start_s < 0 or (segment.phase is Phase.CLIENT):
            if segment.phase is not Phase.CLIENT:
                parts.append(segment)
        elif last is not None and last.phase is segment.phase and last.start_s >= 0:
            longer = segment.start_s + segment.duration_s - last.start_s
            parts[-1] = Segment(last.name, last.phase, last.start_s, longer, segment.where)
        else:
            parts.append(segment)
    transfer = waterfall.details.get("transfer")
    if transfer:
        for i, part in enumerate(parts):
            if part.phase is Phase.TRANSFER:
                hidden_s = min(transfer["hidden_s"], max(0.0, part.start_s))
                parts[i] = Segment(
                    part.name,
                    part.phase,
                    part.start_s - hidden_s,
                    part.duration_s + hidden_s,
                    part.where,
                )
                break
    return parts


def _root_attributes(waterfall: Waterfall, operation: str) -> dict[str, Any]:
    record = waterfall.record
    dominant = waterfall.dominant
    queue = _section(waterfall, "queue").get("waited_s")
    ttft_s = record.first_token_s - record.received_s if record.first_token_s else None
    values: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tailrace",
        "gen_ai.request.model": record.model or None,
        "gen_ai.response.model": record.model or None,
        "gen_ai.response.id": record.answer_id or None,
        "gen_ai.request.max_tokens": record.max_tokens or None,
        "gen_ai.request.choice.count": record.num_choices if record.num_choices > 1 else None,
        "gen_ai.request.stream": record.stream or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens or None,
        "gen_ai.usage.output_tokens": record.completion_tokens or None,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens or None,
        "gen_ai.response.time_to_first_chunk": ttft_s if record.stream else None,
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_to_first_token": ttft_s,
        "gen_ai.latency.e2e": waterfall.ends_s,
        "openai.response.service_tier": record.tier,
        "http.response.status_code": record.status or None,
        "error.type": (record.code or record.outcome) if record.outcome != "finished" else None,
        "tailrace.request_id": record.request_id,
        "tailrace.gateway": record.gateway or None,
        "tailrace.dominant_phase": None if dominant is None else dominant.value,
        "tailrace.unaccounted": waterfall.unaccounted_s,
    }
    return {name: value for name, value in values.items() if value is not None}


def _part_attributes(waterfall: Waterfall, part: Segment, name: str) -> dict[str, Any]:
    details = waterfall.details
    values: dict[str, Any] = {"tailrace.where": part.where}
    if part.start_s < 0:
        values["tailrace.kind"] = part.phase.value
        if part.phase is Phase.TOOL:
            values.update({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": part.name})
    elif name == "queue":
        arrival = _section(waterfall, "queue").get("at_arrival")
        values["tailrace.queue.ahead"] = arrival["ahead"] if arrival else None
    elif name == "prefill":
        prefill = _section(waterfall, "prefill")
        values["tailrace.prefill.decision"] = prefill.get("decision")
        values["tailrace.prefill.chunks"] = prefill.get("num_chunks")
        prefix = _section(waterfall, "prefix")
        values["tailrace.prefill.computed_tokens"] = prefix.get("computed_tokens")
    elif name == "kv_transfer":
        transfer = _section(waterfall, "transfer")
        values["tailrace.kv.bytes"] = transfer.get("bytes")
        values["tailrace.kv.exposed_seconds"] = transfer.get("exposed_s")
    elif name == "decode":
        values["tailrace.preemptions"] = details.get("preemptions")
        gaps = [c["worst_gap_s"] for c in _choices(waterfall) if c["worst_gap_s"] is not None]
        values["tailrace.decode.worst_gap_seconds"] = max(gaps, default=None)
    return {name: value for name, value in values.items() if value is not None}


def _stalls(waterfall: Waterfall) -> list[dict[str, Any]]:
    told = [stall for choice in _choices(waterfall) for stall in choice["stalls"]]
    return [stall for stall in told if stall["at_s"] is not None]


def _choices(waterfall: Waterfall) -> list[dict[str, Any]]:
    return _section(waterfall, "decode").get("choices", [])


def _section(waterfall: Waterfall, name: str) -> dict[str, Any]:
    """A section of the details; empty where nothing is known of it."""
    return waterfall.details.get(name) or {}


def _flat(stall: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"tailrace.stall.{k}": v for k, v in stall.items() if not isinstance(v, dict)}
    for name, value in stall["longest_step"].items():
        flat[f"tailrace.stall.step.{name}"] = value
    return flat


def _with_path(endpoint: str) -> str:
    """The collector's base address becomes that of its traces; a full one stays."""
    scheme, _, rest = endpoint.partition("://")
    if "/" in rest.rstrip("/"):
        return endpoint
    return f"{scheme}://{rest.rstrip('/')}/v1/traces"
