from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pynvml
import pytest
from fake_nvml import NOT_SUPPORTED, Driver, Gpu, installed

from deployments import replica_metrics
from deployments.gpu.reader import GpuReader, NoGpu
from deployments.gpu.reading import Device, Reading, Sample
from deployments.gpu.series import GpuSeries
from deployments.gpu.watch import REOPEN_ROUNDS, STALE_AFTER_S, GpuWatch
from deployments.metrics import Registry
from deployments.replica_metrics import ReplicaMetrics
from engine.metrics import CATALOGUE

DEVICE = Device(gpu="0", uuid="GPU-a", name="NVIDIA H200")
OWNER = {"model": "m", "role": "decode", "gpu": "0", "uuid": "GPU-a"}


def shown(registry: Registry) -> dict[str, float]:
    """Every series but for the labels that all of them have."""
    found: dict[str, float] = {}
    for metric, values, series in registry.series():
        labels = dict(zip(metric.labels, values, strict=True))
        assert all(labels.pop(key) == value for key, value in OWNER.items())
        found[" ".join([metric.name.removeprefix("tailrace_gpu_"), *labels.values()])] = (
            series.value  # type: ignore[union-attr]
        )
    return found


def sample(*readings: Reading) -> Sample:
    return Sample(at_s=0.0, readings=readings)


def test_a_whole_reading_becomes_every_declared_series():
    registry = Registry()
    with installed(Driver(Gpu("GPU-a"))) as driver:
        reader = GpuReader()
        driver.xid(0, 63)
        GpuSeries(registry, "m", "decode").show(reader.read())
    found = shown(registry)
    reasons = {name: value for name, value in found.items() if name.startswith("throttled ")}
    assert {name for name, value in reasons.items() if value} == {"throttled power_cap"}
    assert len(reasons) == 12
    assert {name: value for name, value in found.items() if name not in reasons} == {
        "up": 1,
        "info NVIDIA H200": 1,
        "memory_used_bytes": 40 << 30,
        "memory_total_bytes": 140 << 30,
        "utilization_ratio compute": 0.87,
        "utilization_ratio memory": 0.35,
        "power_watts": 512.3,
        "power_limit_watts": 700.0,
        "energy_joules_total": 5000.0,
        "temperature_celsius": 61.0,
        "clock_hertz sm": 1.785e9,
        "clock_hertz memory": 3.201e9,
        "ecc_errors_total corrected": 3,
        "ecc_errors_total uncorrected": 0,
        "xid_errors_total 63": 1,
        "pcie_bytes_per_second sent": 1.2e6,
        "pcie_bytes_per_second received": 0.8e6,
        "nvlink_bytes_total sent": 2 << 20,
        "nvlink_bytes_total received": 1 << 20,
    }
    declared = {name for name in CATALOGUE if name.startswith("tailrace_gpu_")}
    assert {metric.name for metric, _, _ in registry.series()} == declared


def test_what_is_not_said_any_more_has_no_series_any_more():
    registry = Registry()
    series = GpuSeries(registry, "m", "decode")
    series.show(sample(Reading(device=DEVICE, power_w=1.0, temperature_c=2.0)))
    series.show(sample(Reading(device=DEVICE, power_w=3.0)))
    assert shown(registry) == {"up": 1, "info NVIDIA H200": 1, "power_watts": 3.0}
    series.show(sample(Reading(device=DEVICE, lost=True)))
    assert shown(registry) == {"up": 0}
    series.show(sample())
    assert shown(registry) == {}


def test_counters_outlive_a_lost_device_and_a_driver_that_counts_anew():
    registry = Registry()
    series = GpuSeries(registry, "m", "decode")
    for total, expected in ((7, 7), (9, 9), (2, 11), (2, 11), (5, 14)):
        series.show(sample(Reading(device=DEVICE, ecc_corrected=total)))
        assert shown(registry)["ecc_errors_total corrected"] == expected
        series.show(sample(Reading(device=DEVICE, lost=True)))
        assert shown(registry)["ecc_errors_total corrected"] == expected


def watched(
    registry: Registry, open_reader: Callable[..., object] = GpuReader, **options: object
) -> GpuWatch:
    return GpuWatch(
        registry,
        "m",
        "decode",
        open_reader=open_reader,  # type: ignore[arg-type]
        every_s=0.001,
        environ={},
        **options,  # type: ignore[arg-type]
    )


def until(met: Callable[[], bool]) -> None:
    limit = time.monotonic() + 240
    while not met():
        assert time.monotonic() < limit
        time.sleep(0.001)


def thread_of(watch: GpuWatch) -> threading.Thread:
    assert watch._thread is not None
    return watch._thread


def test_a_watch_reports_a_device_that_is_lost_and_comes_back(caplog: pytest.LogCaptureFixture):
    registry = Registry()
    with installed(Driver(Gpu("GPU-a"))) as driver, caplog.at_level(logging.INFO):
        watch = watched(registry)
        watch.start()
        watch.start()  # twice is once

        def sees(**expected: float) -> bool:
            watch.report()
            return all(shown(registry).get(name) == value for name, value in expected.items())

        until(lambda: sees(up=1, power_watts=512.3))
        driver.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST
        until(lambda: sees(up=0))
        assert "power_watts" not in shown(registry)
        driver.gpus[0].lost = pynvml.NVML_SUCCESS
        until(lambda: sees(up=1, power_watts=512.3))
        watch.stop()
        thread_of(watch).join(240)
        assert (driver.initialised, driver.event_sets) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0 is lost: it fell off the bus or needs a reset",
        "GPU 0 is back",
    ]


def test_a_reader_with_a_lost_device_is_opened_anew_as_a_reset_changes_handles():
    opened: list[int] = []
    ready = threading.Event()

    class Reader:
        def __init__(self, selection: object) -> None:
            if len(opened) == 1 and not ready.is_set():
                ready.set()
                raise NoGpu("the driver is loaded anew")
            opened.append(0)

        def read(self) -> Sample:
            opened[-1] += 1
            lost = Reading(device=DEVICE, lost=True)
            return replace(
                sample(lost if len(opened) == 1 else Reading(device=DEVICE)), at_s=time.monotonic()
            )

        def close(self) -> None:
            pass

    watch = watched(Registry(), Reader)
    watch.start()
    until(lambda: len(opened) == 2)
    watch.stop()
    thread_of(watch).join(240)
    assert opened[0] == REOPEN_ROUNDS


def test_without_a_driver_nothing_is_reported_logged_or_left_running(
    caplog: pytest.LogCaptureFixture,
):
    registry = Registry()
    with caplog.at_level(logging.INFO):
        watch = watched(registry)
        watch.start()
        thread_of(watch).join(240)
        assert not thread_of(watch).is_alive()
        watch.report()
    assert shown(registry) == {}
    assert caplog.records == []


def test_a_driver_with_an_error_of_its_own_ends_the_watch_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
):
    class Reader:
        def __init__(self, selection: object) -> None: ...

        def read(self) -> Sample:
            raise OSError("a library that is not what it says")

    registry = Registry()
    watch = watched(registry, Reader)
    watch.start()
    thread_of(watch).join(240)
    watch.report()
    assert shown(registry) == {}
    assert [record.getMessage() for record in caplog.records] == ["GPU telemetry ends"]


def test_a_replica_that_owns_no_device_looks_at_none():
    watch = GpuWatch(Registry(), "m", "decode", environ={"CUDA_VISIBLE_DEVICES": ""})
    watch.start()
    assert watch._thread is None


def test_figures_end_when_the_driver_does_not_answer_any_more():
    registry, clock = Registry(), [0.0]
    hang, asked = threading.Event(), threading.Event()

    class Reader:
        def __init__(self, selection: object) -> None:
            self.readings = 0

        def read(self) -> Sample:
            if self.readings:
                asked.set()
                hang.wait(20)
            self.readings += 1
            return sample(Reading(device=DEVICE, power_w=1.0, ecc_corrected=2))

        def close(self) -> None:
            pass

    watch = watched(registry, Reader, now=lambda: clock[0])
    watch.start()
    assert asked.wait(20)
    watch.report()
    assert shown(registry)["power_watts"] == 1.0
    clock[0] = STALE_AFTER_S
    watch.report()
    assert shown(registry)["power_watts"] == 1.0
    clock[0] += 0.1
    watch.report()
    assert shown(registry) == {"ecc_errors_total corrected": 2}
    watch.stop()
    hang.set()
    thread_of(watch).join(240)


def test_every_sample_is_reported_so_that_no_critical_error_is_missed():
    registry = Registry()
    with installed(Driver(Gpu("GPU-a", power_mw=NOT_SUPPORTED))) as driver:
        driver.queue.extend([(0, 31), (0, 31)])
        watch = watched(registry)
        watch.start()
        until(lambda: driver.calls["nvmlDeviceGetName"] > 0 and len(watch._samples) >= 2)
        watch.report()
        watch.stop()
        thread_of(watch).join(240)
    assert shown(registry)["xid_errors_total 31"] == 2


async def test_a_replica_sends_the_figures_of_its_gpus_to_every_gateway(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(replica_metrics, "SNAPSHOT_EVERY_S", 0.005)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown, arrived = Registry(), asyncio.Event()

    class Gateway:
        def send(self, message: list[Any]) -> None:
            shown.merge(message[1], message[3])
            if list(shown.family("tailrace_gpu_power_watts")):
                arrived.set()

    with installed(Driver(Gpu("GPU-a"))) as driver:
        metrics = ReplicaMetrics("m", "decode", "r1")
        links = cast("Any", [Gateway()])
        reporting = asyncio.create_task(metrics.run(lambda: None, lambda: links))
        await asyncio.wait_for(arrived.wait(), 240)
        reporting.cancel()
        await asyncio.wait({reporting})
        assert list(shown.family("tailrace_gpu_power_watts")) == [("r1", OWNER, 512.3)]
        await asyncio.to_thread(thread_of(metrics._gpus).join, 20)
        assert driver.initialised == 0
