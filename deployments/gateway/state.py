"""What one gateway process holds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.explain.request import RequestRecord
from deployments.gateway.backend import Backend
from deployments.gateway.config import GatewayConfig
from deployments.gateway.degradation import Pressures
from deployments.gateway.events import EventLog
from deployments.gateway.explain import Explainer, JournalSource
from deployments.gateway.identity.config import Directory
from deployments.gateway.identity.keyring import Identity
from deployments.gateway.identity.source import KeySource
from deployments.gateway.limits.quotas import Quotas
from deployments.gateway.live import LiveView
from deployments.gateway.measure import RequestMeter
from deployments.gateway.request_log import RequestLog
from deployments.gateway.secret_text import read_secret
from deployments.logs import RequestLines
from deployments.metrics import Registry, SilentRegistry
from deployments.tracing import Tracer

CLOSE_S = 5.0


@dataclass(slots=True)
class GatewayState:
    """Handed to the API by whoever owns the process; everything in it lives on one event loop."""

    backend: Backend
    metrics: Registry
    config: GatewayConfig = field(default_factory=GatewayConfig)
    log: EventLog = field(init=False)
    meter: RequestMeter = field(init=False)
    live: LiveView = field(init=False)
    explainer: Explainer = field(init=False)
    tracer: Tracer | None = None
    lines: RequestLines = field(default_factory=RequestLines)
    request_log: RequestLog | None = None
    """None where nobody gave it a file."""

    quotas: Quotas = field(default_factory=Quotas)
    pressures: Pressures = field(default_factory=Pressures)
    keys: KeySource = field(default_factory=lambda: KeySource(Directory(), None))
    inflight: Counter[str] = field(default_factory=Counter[str])
    """Requests being answered, by model; `unknown` until that is read."""

    _trace_headers: dict[str, str] = field(default_factory=dict[str, str], init=False, repr=False)

    def __post_init__(self) -> None:
        self.log = EventLog(self.config.event_log_size)
        self.meter = RequestMeter(self.metrics)
        self.live = LiveView(self.metrics, time.time)
        backend = self.backend
        self.explainer = Explainer(backend if isinstance(backend, JournalSource) else None)

    def apply(self, user_config: Mapping[str, Any] | None) -> GatewayConfig:
        """Adopt a configuration for requests to come. Raises ConfigError and changes nothing."""
        config = GatewayConfig.parse(user_config)
        keys = self.keys
        if (config.directory, config.keys_file) != (self.config.directory, self.config.keys_file):
            keys = KeySource(config.directory, config.keys_file)
        self._trace(config)
        # Nothing is refused from here on.
        self.keys = keys
        kept = config.explain
        self.explainer.resize(recent=kept.recent, slowest=kept.slowest, keep_s=kept.keep_s)
        self.log.resize(config.event_log_size)
        if config.metrics != self.config.metrics:
            # Requests under way go on with the series that they have.
            self.meter = RequestMeter(self.metrics if config.metrics else SilentRegistry())
        self.config = config
        return config

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Who sent a request with these headers. Raises RequestError (401)."""
        return self.keys.ring.identify(headers.get(b"authorization"))

    def ended(self, record: RequestRecord, body: bytes | None) -> None:
        """A request is over. `body` is what the client sent, where prompts may be logged."""
        self.explainer.end(record)
        if self.config.logs.requests:
            self.lines.write(record, body)

    async def close(self) -> None:
        """What is queued for the collector is sent, if it takes it at once."""
        await self.explainer.close()
        await self.quotas.close()
        if self.tracer is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.tracer.close), CLOSE_S)

    def _trace(self, config: GatewayConfig) -> None:
        wanted, tracer = config.tracing, self.tracer
        headers = {
            name: read_secret(value, f"tracing.headers.{name}")
            for name, value in (wanted.headers if wanted.endpoint else {}).items()
        }
        same = wanted == self.config.tracing and headers == self._trace_headers
        if same and (tracer is not None) == bool(wanted.endpoint):
            return
        fresh = None
        if wanted.endpoint is not None:
            fresh = Tracer(
                wanted.endpoint,
                sample=wanted.sample,
                headers=headers,
                timeout_s=wanted.timeout_s,
                delay_s=wanted.delay_s,
                instance=self.explainer.gateway,
            )
        self.tracer, self._trace_headers = fresh, headers
        self.explainer.on_traced = None if fresh is None else fresh.export
        if tracer is not None:
            # It sends what it still has, which may take as long as the collector lets it.
            threading.Thread(target=tracer.close, name="closing a tracer", daemon=True).start()
