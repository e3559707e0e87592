"""What one gateway process holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.gateway.backend import Backend
from deployments.gateway.config import GatewayConfig
from deployments.gateway.events import EventLog
from deployments.gateway.live import LiveView
from deployments.gateway.measure import RequestMeter
from deployments.metrics import Registry


@dataclass(slots=True)
class GatewayState:
    """Handed to the API by whoever owns the process; everything in it lives on one event loop."""

    backend: Backend
    metrics: Registry
    config: GatewayConfig = field(default_factory=GatewayConfig)
    log: EventLog = field(init=False)
    meter: RequestMeter = field(init=False)
    live: LiveView = field(init=False)
    inflight: Counter[str] = field(default_factory=Counter[str])
    """Requests being answered, by model; `unknown` until that is read."""

    def __post_init__(self) -> None:
        self.log = EventLog(self.config.event_log_size)
        self.meter = RequestMeter(self.metrics)
        self.live = LiveView(self.metrics, time.time)

    def apply(self, user_config: Mapping[str, Any] | None) -> GatewayConfig:
        """Adopt a configuration for requests to come. Raises ConfigError and changes nothing."""
        config = GatewayConfig.parse(user_config)
        self.log.resize(config.event_log_size)
        self.config = config
        return config
