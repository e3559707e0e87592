"""Readings as the series that `engine.metrics` declares.

A figure that a device does not give, or gives no longer, has no series: an absent line is honest
where a zero or the last value would not be.
"""

from __future__ import annotations

from deployments.gpu.reading import (
    OTHER_REASON,
    THROTTLE_REASONS,
    Device,
    Reading,
    Sample,
)
from deployments.metrics import Registry

_REASONS = (*THROTTLE_REASONS.values(), OTHER_REASON)
_Key = tuple[str, tuple[tuple[str, str], ...]]


class GpuSeries:
    """Keeps one registry's GPU series what the last sample said."""

    def __init__(self, registry: Registry, model: str, role: str) -> None:
        self._registry = registry
        self._owner = {"model": model, "role": role}
        self._gauges: set[_Key] = set()
        self._totals: dict[_Key, float] = {}
        """Of counters: what the driver had counted at the last sample."""

    def show(self, sample: Sample) -> None:
        """Report every device of this sample, and end what is not in it."""
        before, self._gauges = self._gauges, set()
        for reading in sample.readings:
            self._show(reading)
        for name, labels in before - self._gauges:
            self._registry.remove(name, **dict(labels))

    def clear(self) -> None:
        """End all gauges: nobody has looked for too long to know. Counters keep their totals."""
        for name, labels in self._gauges:
            self._registry.remove(name, **dict(labels))
        self._gauges = set()

    def _show(self, reading: Reading) -> None:
        device = reading.device
        self._gauge("tailrace_gpu_up", device, 0.0 if reading.lost else 1.0)
        for xid in reading.xids:
            self._registry.counter(
                "tailrace_gpu_xid_errors_total", **self._labels(device, {"xid": str(xid)})
            ).inc()
        if reading.lost:
            return
        self._gauge("tailrace_gpu_info", device, 1.0, product=device.name)
        self._gauge("tailrace_gpu_memory_used_bytes", device, reading.memory_used_bytes)
        self._gauge("tailrace_gpu_memory_total_bytes", device, reading.memory_total_bytes)
        for part, ratio in (
            ("compute", reading.busy_ratio),
            ("memory", reading.memory_busy_ratio),
        ):
            self._gauge("tailrace_gpu_utilization_ratio", device, ratio, part=part)
        self._gauge("tailrace_gpu_power_watts", device, reading.power_w)
        self._gauge("tailrace_gpu_power_limit_watts", device, reading.power_limit_w)
        self._counter("tailrace_gpu_energy_joules_total", device, reading.energy_j)
        self._gauge("tailrace_gpu_temperature_celsius", device, reading.temperature_c)
        for clock, hz in (("sm", reading.sm_clock_hz), ("memory", reading.memory_clock_hz)):
            self._gauge("tailrace_gpu_clock_hertz", device, hz, clock=clock)
        if reading.throttle_reasons is not None:
            for reason in _REASONS:
                holds = 1.0 if reason in reading.throttle_reasons else 0.0
                self._gauge("tailrace_gpu_throttled", device, holds, reason=reason)
        for kind, errors in (
            ("corrected", reading.ecc_corrected),
            ("uncorrected", reading.ecc_uncorrected),
        ):
            self._counter("tailrace_gpu_ecc_errors_total", device, errors, kind=kind)
        for direction, rate in (
            ("sent", reading.pcie_sent_bytes_per_s),
            ("received", reading.pcie_received_bytes_per_s),
        ):
            self._gauge("tailrace_gpu_pcie_bytes_per_second", device, rate, direction=direction)
        for direction, total in (
            ("sent", reading.nvlink_sent_bytes),
            ("received", reading.nvlink_received_bytes),
        ):
            self._counter("tailrace_gpu_nvlink_bytes_total", device, total, direction=direction)

    def _labels(self, device: Device, more: dict[str, str]) -> dict[str, str]:
        return {**self._owner, "gpu": device.gpu, "uuid": device.uuid, **more}

    def _gauge(self, name: str, device: Device, value: float | None, **more: str) -> None:
        if value is None:
            return
        labels = self._labels(device, more)
        self._registry.gauge(name, **labels).set(value)
        self._gauges.add((name, tuple(labels.items())))

    def _counter(self, name: str, device: Device, total: float | None, **more: str) -> None:
        if total is None:
            return
        labels = self._labels(device, more)
        key = (name, tuple(labels.items()))
        before = self._totals.get(key, 0.0)
        # The driver counts from 0 again when it is loaded anew.
        self._registry.counter(name, **labels).inc(total - before if total >= before else total)
        self._totals[key] = total
