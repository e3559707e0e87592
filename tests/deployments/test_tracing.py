"""Spans of requests, at a collector that decodes OTLP's protobuf."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from pools import until
from told import Gateway

from deployments.gateway.config import GatewayConfig
from deployments.tracing import Tracer, parent_of, traceparent
from engine.errors import ConfigError

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """An OTLP/HTTP receiver."""

    endpoint: str = ""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                if headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                self.requests.append((first, headers))
                if self.status == 200:
                    self._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/x-protobuf\r\n"
                    b"content-length: %d\r\n\r\n%s" % (self.status, len(answer), answer)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _take(self, message: Any) -> None:
        for resource in message.resource_spans:
            self.resources.append({a.key: _value(a.value) for a in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: _value(a.value) for a in span.attributes}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


async def traced(cluster: Any, collector: Collector, **settings: Any) -> Gateway:
    await cluster.add_prefill("p1")
    await cluster.add_decode("d1")
    gateway = Gateway(await cluster.add_gateway("g1"))
    await until(lambda: bool(gateway.backend.client._known), "a link to decode")
    tracing = {"endpoint": collector.endpoint, "sample": 1.0, "delay_s": 60.0, **settings}
    gateway.state.apply({"tracing": tracing})
    return gateway


async def flushed(gateway: Gateway) -> None:
    """Until what was put together in the background is with the collector."""
    tracer, explainer = gateway.state.tracer, gateway.state.explainer
    assert tracer is not None
    await until(lambda: not explainer._fetching, "every waterfall is whole")
    assert await asyncio.to_thread(tracer.flush)


async def test_a_request_is_one_trace_with_prefill_and_decode_as_siblings(local_cluster, collector):
    gateway = await traced(local_cluster(), collector)
    spans = '[{"name":"lookup","kind":"tool","start_ms_ago":50,"duration_ms":40}]'
    headers = {
        "x-request-id": "mine",
        "x-tailrace-spans": spans,
        "traceparent": f"00-{TRACE}-{SPAN}-01",
    }
    got = await gateway.complete(tokens=80, stream=True, headers=headers)
    await flushed(gateway)
    root = collector.named("text_completion m")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert got.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    children = [span for span in collector.spans if span.parent_span_id == root.span_id]
    names = {span.name for span in children}
    assert {"tokenize", "queue", "route", "prefill", "kv_transfer", "decode", "stream"} <= names
    assert collector.named("lookup").parent_span_id.hex() == SPAN
    for span in children:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    told = attributes(root)
    assert {name: told[name] for name in told if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tailrace",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": got.events()[0]["id"],
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 80,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.time_to_first_chunk": told["gen_ai.latency.time_to_first_token"],
        "gen_ai.latency.time_in_queue": told["gen_ai.latency.time_in_queue"],
        "gen_ai.latency.time_to_first_token": told["gen_ai.latency.time_to_first_token"],
        "gen_ai.latency.e2e": told["gen_ai.latency.e2e"],
    }
    assert (told["tailrace.request_id"], told["http.response.status_code"]) == ("mine", 200)
    assert attributes(collector.named("prefill"))["tailrace.prefill.chunks"] == 1
    assert attributes(collector.named("kv_transfer"))["tailrace.kv.bytes"] > 0
    assert attributes(collector.named("lookup"))["gen_ai.tool.name"] == "lookup"
    (resource,) = collector.resources
    assert (resource["service.name"], resource["service.instance.id"]) == ("tailrace", "g1")
    assert collector.requests[0][0] == "POST /v1/traces HTTP/1.1"


async def test_sampled_out_requests_send_nothing_and_a_sampled_parent_decides(
    local_cluster, collector, monkeypatch
):
    monkeypatch.setenv("COLLECTOR_KEY", "k")
    headers = {"x-key": {"env": "COLLECTOR_KEY"}, "x-name": "n"}
    gateway = await traced(local_cluster(), collector, sample=0.0, headers=headers)
    await gateway.complete(tokens=20)
    await gateway.complete(tokens=21, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    await flushed(gateway)
    assert collector.requests == []
    await gateway.complete(tokens=22, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    await flushed(gateway)
    assert [(sent["x-key"], sent["x-name"]) for _, sent in collector.requests] == [("k", "n")]
    # A key that was changed where it lies is read when the configuration is applied again.
    before = gateway.state.tracer
    gateway.state.apply(gateway.state.config.model_dump())
    assert gateway.state.tracer is before
    monkeypatch.setenv("COLLECTOR_KEY", "k2")
    gateway.state.apply(gateway.state.config.model_dump())
    assert gateway.state.tracer is not before
    await gateway.complete(tokens=23, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    await flushed(gateway)
    assert [sent["x-key"] for _, sent in collector.requests] == ["k", "k2"]


async def test_a_failed_request_is_an_error_with_its_code(local_cluster, collector):
    gateway = await traced(local_cluster(), collector)
    got = await gateway.complete(tokens=20, max_tokens=5000)
    assert got.status == 400
    await flushed(gateway)
    (root,) = collector.spans[:1]
    assert root.status.code == 2
    assert attributes(root)["error.type"] == "context_length_exceeded"


async def test_a_collector_that_refuses_costs_no_answer(local_cluster, collector, caplog):
    collector.status = 400
    gateway = await traced(local_cluster(), collector)
    assert (await gateway.complete(tokens=20)).status == 200
    await flushed(gateway)
    assert collector.spans == []


async def test_tracing_is_changed_and_ended_while_running(local_cluster, collector):
    gateway = await traced(local_cluster(), collector)
    first = gateway.state.tracer
    gateway.state.apply({"tracing": gateway.state.config.tracing.model_dump(), "revision": 2})
    assert gateway.state.tracer is first
    gateway.state.apply({})
    assert gateway.state.tracer is None
    got = await gateway.complete(tokens=20)
    assert "traceparent" not in got.headers


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", (TRACE, SPAN, False)),
        (f"cc-{TRACE}-{SPAN}-03-more", (TRACE, SPAN, True)),  # a version to come
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_a_context_is_taken_as_w3c_says(value: str, parent: Any) -> None:
    assert parent_of({b"traceparent": value.encode()}) == parent


def test_the_share_of_traced_requests_is_that_of_the_sdk() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    tracer = Tracer("http://127.0.0.1:9", sample=0.3)
    sampler = TraceIdRatioBased(0.3)
    try:
        for _ in range(300):
            trace, _, _, sampled = tracer.begin({})
            said = sampler.should_sample(None, int(trace, 16), "x").decision
            assert sampled == (said is Decision.RECORD_AND_SAMPLE)
    finally:
        tracer.close()


def test_the_context_that_goes_out_is_the_requests_own_span() -> None:
    assert traceparent((TRACE, SPAN, None, False)) == f"00-{TRACE}-{SPAN}-00".encode()


@pytest.mark.parametrize(
    ("tracing", "words"),
    [
        ({"endpoint": "collector:4318"}, "tracing.endpoint"),
        ({"sample": 1.5}, "tracing.sample=1.5"),
        ({"endpont": "http://x"}, "no such field"),
    ],
)
def test_settings_that_cannot_work_are_refused(tracing: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GatewayConfig.parse({"tracing": tracing})
