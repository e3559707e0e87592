"""The NVIDIA driver's library, as far as we call it, in Python.

It stands where `pynvml` keeps `libnvidia-ml.so.1`: the real bindings run against it, with their own
structures, argument types and error classes. Functions take what C would get and return a code.

A field set to an error code answers with that error; a function named in `missing` is not in the
library at all, as with an older driver.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK = pynvml.NVML_SUCCESS


@dataclass(frozen=True)
class Error:
    """In place of a value: the call fails with this code."""

    code: int


NOT_SUPPORTED = Error(pynvml.NVML_ERROR_NOT_SUPPORTED)


@dataclass
class Instance:
    """A MIG instance."""

    uuid: str
    memory: Any = (1 << 30, 10 << 30)


@dataclass
class Gpu:
    """A device. Numbers are in the driver's units."""

    uuid: str
    name: str = "NVIDIA H200"
    memory: Any = (40 << 30, 140 << 30)
    """Used and total bytes."""

    reserved: int = 1 << 30
    utilization: Any = (87, 35)
    power_mw: Any = 512_300
    limit_mw: Any = 700_000
    energy_mj: Any = 5_000_000
    temperature: Any = 61
    sm_mhz: Any = 1_785
    memory_mhz: Any = 3_201
    throttle: Any = 0x4
    ecc_corrected: Any = 3
    ecc_uncorrected: Any = 0
    pcie_tx_kb: Any = 1_200
    pcie_rx_kb: Any = 800
    nvlink_tx_kib: Any = 2_048
    nvlink_rx_kib: Any = 1_024
    events: Any = pynvml.nvmlEventTypeXidCriticalError
    instances: dict[int, Instance] = field(default_factory=dict)
    """MIG is on where there are any."""

    mig_slots: int = 7
    lost: int = OK
    """The code with which every call about this device fails."""


class Driver:
    """The library. `calls` counts every call, `initialised` those of init that were not undone."""

    def __init__(self, *gpus: Gpu, missing: tuple[str, ...] = (), init: int = OK) -> None:
        self.gpus = list(gpus)
        self.missing = missing
        self.init = init
        self.initialised = 0
        self.event_sets = 0
        self.calls: Counter[str] = Counter()
        self.queue: deque[tuple[int, int]] = deque()
        """XIDs to hand out: index of the device, number."""

        self._listening: set[int] = set()

    def xid(self, gpu: int, number: int) -> None:
        """The driver reports a critical error, to those who registered for that device."""
        if gpu in self._listening:
            self.queue.append((gpu, number))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        function = getattr(Driver, f"c_{name}", None)
        if function is None:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls[name] += 1
            if self.initialised == 0 and name != "nvmlInitWithFlags":
                return pynvml.NVML_ERROR_UNINITIALIZED
            return function(self, *args)

        return call

    # Handles are addresses: 0x1000 and up for devices, 0x100 more for each MIG instance.

    def _gpu(self, handle: Any) -> tuple[int, Gpu]:
        index = (_address(handle) >> 16) - 1
        return index, self.gpus[index]

    def _instance(self, handle: Any) -> Instance | None:
        number = (_address(handle) & 0xFFFF) - 1
        return None if number < 0 else self._gpu(handle)[1].instances[number]

    def _answer(self, handle: Any, value: Any, write: Any) -> int:
        gpu = self._gpu(handle)[1]
        if gpu.lost != OK:
            return gpu.lost
        if self._instance(handle) is not None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        if isinstance(value, Error):
            return value.code
        write(value)
        return OK

    def _number(self, handle: Any, value: Any, out: Any) -> int:
        return self._answer(handle, value, lambda number: _set(out, number))

    def c_nvmlInitWithFlags(self, flags: Any) -> int:
        if self.init == OK:
            self.initialised += 1
        return self.init

    def c_nvmlShutdown(self) -> int:
        self.initialised -= 1
        return OK

    def c_nvmlErrorString(self, code: Any) -> bytes:
        return f"error {code}".encode()

    def c_nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = b"570.86.15"
        return OK

    def c_nvmlDeviceGetCount_v2(self, out: Any) -> int:
        _set(out, len(self.gpus))
        return OK

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        if not 0 <= index.value < len(self.gpus):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        if self.gpus[index.value].lost != OK:
            return self.gpus[index.value].lost
        _point(out, (index.value + 1) << 16)
        return OK

    def c_nvmlDeviceGetHandleByUUID(self, uuid: Any, out: Any) -> int:
        for index, gpu in enumerate(self.gpus):
            for number, instance in gpu.instances.items():
                if instance.uuid == uuid.value.decode():
                    _point(out, ((index + 1) << 16) + number + 1)
                    return gpu.lost
            if gpu.uuid == uuid.value.decode():
                _point(out, (index + 1) << 16)
                return gpu.lost
        return pynvml.NVML_ERROR_NOT_FOUND

    def c_nvmlDeviceGetIndex(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[0], out)

    def c_nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        gpu, instance = self._gpu(handle)[1], self._instance(handle)
        if gpu.lost != OK:
            return gpu.lost
        buffer.value = (instance or gpu).uuid.encode()
        return OK

    def c_nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        gpu = self._gpu(handle)[1]
        if gpu.lost != OK:
            return gpu.lost
        buffer.value = gpu.name.encode()
        return OK

    def c_nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        gpu = self._gpu(handle)[1]
        if "A100" not in gpu.name and "H" not in gpu.name:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        _set(current, int(bool(gpu.instances)))
        _set(pending, int(bool(gpu.instances)))
        return gpu.lost

    def c_nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[1].mig_slots, out)

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, number: Any, out: Any) -> int:
        index, gpu = self._gpu(handle)
        if number.value not in gpu.instances:
            return pynvml.NVML_ERROR_NOT_FOUND
        _point(out, ((index + 1) << 16) + number.value + 1)
        return gpu.lost

    def c_nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, out: Any) -> int:
        _point(out, _address(handle) & ~0xFFFF)
        return self._gpu(handle)[1].lost

    def c_nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        return self._memory(handle, out, self._gpu(handle)[1].reserved)

    def c_nvmlDeviceGetMemoryInfo_v2(self, handle: Any, out: Any) -> int:
        if out._obj.version != pynvml.nvmlMemory_v2:
            return pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        return self._memory(handle, out, 0)

    def _memory(self, handle: Any, out: Any, reserved: int) -> int:
        gpu = self._gpu(handle)[1]
        value = (self._instance(handle) or gpu).memory
        if gpu.lost != OK:
            return gpu.lost
        if isinstance(value, Error):
            return value.code
        out._obj.used, out._obj.total = value[0] + reserved, value[1]
        return OK

    def c_nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:
        def write(rates: tuple[int, int]) -> None:
            out._obj.gpu, out._obj.memory = rates

        return self._answer(handle, self._gpu(handle)[1].utilization, write)

    def c_nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[1].power_mw, out)

    def c_nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[1].limit_mw, out)

    def c_nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[1].energy_mj, out)

    def c_nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> int:
        if sensor.value != pynvml.NVML_TEMPERATURE_GPU:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        return self._number(handle, self._gpu(handle)[1].temperature, out)

    def c_nvmlDeviceGetClockInfo(self, handle: Any, domain: Any, out: Any) -> int:
        gpu = self._gpu(handle)[1]
        clocks = {pynvml.NVML_CLOCK_SM: gpu.sm_mhz, pynvml.NVML_CLOCK_MEM: gpu.memory_mhz}
        return self._number(handle, clocks[domain.value], out)

    def c_nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, out: Any) -> int:
        return self._number(handle, self._gpu(handle)[1].throttle, out)

    c_nvmlDeviceGetCurrentClocksThrottleReasons = c_nvmlDeviceGetCurrentClocksEventReasons

    def c_nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> int:
        gpu = self._gpu(handle)[1]
        assert counter.value == pynvml.NVML_VOLATILE_ECC
        corrected = kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        return self._number(handle, gpu.ecc_corrected if corrected else gpu.ecc_uncorrected, out)

    def c_nvmlDeviceGetPcieThroughput(self, handle: Any, direction: Any, out: Any) -> int:
        gpu = self._gpu(handle)[1]
        sent = direction.value == pynvml.NVML_PCIE_UTIL_TX_BYTES
        return self._number(handle, gpu.pcie_tx_kb if sent else gpu.pcie_rx_kb, out)

    def c_nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:
        gpu = self._gpu(handle)[1]
        known = {
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: gpu.nvlink_tx_kib,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: gpu.nvlink_rx_kib,
        }
        for entry in values._obj:
            assert entry.scopeId == 0xFFFFFFFF, "one link only"
            value = known[entry.fieldId]
            if isinstance(value, Error):
                entry.nvmlReturn = value.code
            else:
                entry.nvmlReturn = OK
                entry.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                entry.value.ullVal = value
        return gpu.lost

    def c_nvmlEventSetCreate(self, out: Any) -> int:
        self.event_sets += 1
        _point(out, 0xE0000)
        return OK

    def c_nvmlEventSetFree(self, events: Any) -> int:
        self.event_sets -= 1
        self._listening.clear()
        return OK

    def c_nvmlDeviceRegisterEvents(self, handle: Any, types: Any, events: Any) -> int:
        index, gpu = self._gpu(handle)
        if isinstance(gpu.events, Error):
            return gpu.events.code
        assert types.value == pynvml.nvmlEventTypeXidCriticalError
        self._listening.add(index)
        return OK

    def c_nvmlEventSetWait_v2(self, events: Any, out: Any, timeout_ms: Any) -> int:
        assert timeout_ms.value == 0, "a reader does not wait for errors"
        if not self.queue:
            return pynvml.NVML_ERROR_TIMEOUT
        index, number = self.queue.popleft()
        _point(ctypes.byref(out._obj, type(out._obj).device.offset), (index + 1) << 16)
        out._obj.eventType = pynvml.nvmlEventTypeXidCriticalError
        out._obj.eventData = number
        return OK


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _set(out: Any, value: int) -> None:
    out._obj.value = value


def _point(out: Any, address: int) -> None:
    """Write a pointer to where `out` points."""
    ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p)).contents.value = address


@contextmanager
def installed(driver: Driver) -> Iterator[Driver]:
    """Have `pynvml` find this library."""
    kept = pynvml.nvmlLib
    pynvml.nvmlLib = driver
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield driver
    finally:
        pynvml.nvmlLib = kept
        pynvml._nvmlGetFunctionPointer_cache.clear()
