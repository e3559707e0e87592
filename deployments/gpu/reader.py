"""Reads devices through NVML, field by field: what a device does not say is None, not an error.

NVML counts devices in the order of their PCI bus addresses. An index in `CUDA_VISIBLE_DEVICES`
means the same device where all of them are of one model or `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set;
where models are mixed, name devices by UUID.

A MIG instance has memory of its own and no more: power, clocks, temperature, errors and traffic are
those of the whole device, which is read beside its instances under its own UUID.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from deployments.gpu.reading import Device, Reading, Sample, throttle_reasons
from deployments.gpu.visible import Selection
from engine.errors import EngineError

_T = TypeVar("_T")

_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field: the sum over all links."""

_MAX_EVENTS = 64
"""Driver errors taken in one reading; a broken device may produce them faster than we read."""

_LOST = ("GPU_IS_LOST", "RESET_REQUIRED", "UNINITIALIZED", "DRIVER_NOT_LOADED")
"""Errors after which a device says nothing more."""

_NEVER = (
    *("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "INVALID_ARGUMENT"),
    *("ARGUMENT_VERSION_MISMATCH", "DEPRECATED"),
)
"""Errors of a field that this device, driver or user will not have tomorrow either."""


class NoGpu(EngineError):
    """NVML cannot be used here: no library, no driver, or no permission."""


@dataclass(slots=True)
class _Open:
    """A device or MIG instance with its handle."""

    device: Device
    handle: Any
    mig: bool = False
    shared: bool = False
    """A device that is only read for what its MIG instances share."""

    unsupported: set[str] = field(default_factory=set[str])
    """Fields that this device said it does not have: not asked again."""


class GpuReader:
    """The devices of one machine, or those of them that are selected.

    Not safe for use by two threads at once. A reading takes some 50 ms a device, most of it in the
    two calls that measure PCIe traffic.
    """

    def __init__(self, selection: Selection | None = None, *, nvml: Any = None) -> None:
        """selection: None reads every device and every MIG instance. nvml: the module `pynvml`.

        Raises NoGpu.
        """
        self._selection = selection
        self._nvml: Any = import_module("pynvml") if nvml is None else nvml
        self._events: Any = None
        self._opened: list[_Open] = []
        self._xids: dict[int, list[int]] = {}
        """Of a whole device, by the address of its handle."""

        codes = {name: getattr(self._nvml, f"NVML_ERROR_{name}", None) for name in _LOST + _NEVER}
        self._lost_codes = {codes[name] for name in _LOST} - {None}
        self._never_codes = {codes[name] for name in _NEVER} - {None}
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoGpu(f"no GPU can be read here: {error}") from None
        try:
            self._open()
        except self._nvml.NVMLError as error:
            self.close()
            raise NoGpu(f"no GPU can be read here: {error}") from None

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(opened.device for opened in self._opened)

    @property
    def driver(self) -> str | None:
        """The driver's version."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Give NVML back. Idempotent."""
        nvml, self._opened = self._nvml, []
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
                self._events = None
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # it is gone already, which is what was asked for

    def read(self) -> Sample:
        """What every device says now. A device that is lost says just that; none raises."""
        self._collect_xids()
        readings = tuple(self._read(opened) for opened in self._opened)
        self._xids.clear()
        return Sample(at_s=time.monotonic(), readings=readings)

    def _open(self) -> None:
        nvml = self._nvml
        if self._selection is None:
            for index in range(nvml.nvmlDeviceGetCount()):
                self._add_index(index, every_instance=True)
        else:
            for entry in self._selection:
                if not self._add(entry):
                    break
        whole = [opened for opened in self._opened if not opened.mig]
        if whole:
            self._listen(whole)

    def _add(self, entry: str) -> bool:
        """Whether there is such a device. CUDA looks at no entry after one that names none."""
        nvml = self._nvml
        if entry.isdecimal():
            if int(entry) >= nvml.nvmlDeviceGetCount():
                return False
            self._add_index(int(entry), every_instance=False)
            return True
        if entry.startswith("MIG-"):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(entry)
                parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                index = int(nvml.nvmlDeviceGetIndex(parent))
            except nvml.NVMLError as error:
                if self._is_lost(error):
                    raise
                return False
            self._add_instance(handle, index, self._instance_number(parent, entry))
            self._add_whole(parent, index, shared=True)
            return True
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = self._device(index)
            if handle is not None and str(nvml.nvmlDeviceGetUUID(handle)).startswith(entry):
                self._add_index(index, every_instance=False)
                return True
        return False

    def _add_index(self, index: int, *, every_instance: bool) -> None:
        handle = self._device(index)
        if handle is None:
            self._opened.append(_Open(Device(gpu=str(index), uuid="", name=""), None))
            return
        instances = self._instances(handle)
        # With MIG on, CUDA offers one instance of a device that is named by its index.
        for number, instance in instances if every_instance else instances[:1]:
            self._add_instance(instance, index, number)
        self._add_whole(handle, index, shared=bool(instances))

    def _device(self, index: int) -> Any:
        """Its handle, None for one that the driver lists and cannot reach."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            if self._is_lost(error):
                return None
            raise

    def _add_whole(self, handle: Any, index: int, *, shared: bool) -> None:
        device = self._describe(handle, str(index))
        if all(opened.device.uuid != device.uuid for opened in self._opened):
            self._opened.append(_Open(device, handle, shared=shared))

    def _add_instance(self, handle: Any, index: int, number: int) -> None:
        device = self._describe(handle, f"{index}:{number}")
        self._opened.append(_Open(device, handle, mig=True))

    def _describe(self, handle: Any, gpu: str) -> Device:
        nvml = self._nvml
        return Device(
            gpu=gpu,
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            name=str(nvml.nvmlDeviceGetName(handle)),
        )

    def _instances(self, handle: Any) -> list[tuple[int, Any]]:
        """MIG instances by number; none where MIG is off or unknown."""
        nvml = self._nvml
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
            if current != nvml.NVML_DEVICE_MIG_ENABLE:
                return []
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return []
        found: list[tuple[int, Any]] = []
        for number in range(most):
            try:
                found.append((number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
            except nvml.NVMLError:
                continue  # numbers have holes
        return found

    def _instance_number(self, parent: Any, uuid: str) -> int:
        for number, handle in self._instances(parent):
            if self._nvml.nvmlDeviceGetUUID(handle) == uuid:
                return number
        return 0

    def _read(self, opened: _Open) -> Reading:
        if opened.handle is None:
            return Reading(device=opened.device, lost=True)
        try:
            return self._read_instance(opened) if opened.mig else self._read_whole(opened)
        except self._nvml.NVMLError:  # lost, as every other error is an absent field
            return Reading(device=opened.device, lost=True, xids=self._xids_of(opened))

    def _read_instance(self, opened: _Open) -> Reading:
        used, total = self._memory(opened)
        return Reading(device=opened.device, memory_used_bytes=used, memory_total_bytes=total)

    def _read_whole(self, opened: _Open) -> Reading:
        nvml, ask, handle = self._nvml, self._ask, opened.handle
        used, total = (None, None) if opened.shared else self._memory(opened)
        rates = ask(opened, "utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        bits = ask(opened, "throttle", lambda: self._throttle_bits(handle))
        sent, received = self._nvlink(opened)
        return Reading(
            device=opened.device,
            memory_used_bytes=used,
            memory_total_bytes=total,
            busy_ratio=None if rates is None else rates.gpu / 100,
            memory_busy_ratio=None if rates is None else rates.memory / 100,
            power_w=_scaled(
                ask(opened, "power", lambda: int(nvml.nvmlDeviceGetPowerUsage(handle))), 1e-3
            ),
            power_limit_w=_scaled(
                ask(opened, "limit", lambda: int(nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
                1e-3,
            ),
            energy_j=_scaled(
                ask(
                    opened, "energy", lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
                ),
                1e-3,
            ),
            temperature_c=ask(
                opened,
                "temperature",
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ),
            sm_clock_hz=self._clock(opened, "sm clock", nvml.NVML_CLOCK_SM),
            memory_clock_hz=self._clock(opened, "memory clock", nvml.NVML_CLOCK_MEM),
            throttle_reasons=None if bits is None else throttle_reasons(bits),
            ecc_corrected=self._ecc(opened, "corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(
                opened, "uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            ),
            pcie_sent_bytes_per_s=self._pcie(opened, "pcie tx", nvml.NVML_PCIE_UTIL_TX_BYTES),
            pcie_received_bytes_per_s=self._pcie(opened, "pcie rx", nvml.NVML_PCIE_UTIL_RX_BYTES),
            nvlink_sent_bytes=sent,
            nvlink_received_bytes=received,
            xids=self._xids_of(opened),
        )

    def _ask(self, opened: _Open, what: str, call: Callable[[], _T]) -> _T | None:
        """The answer, None where there is none. Raises NVMLError for a device that is lost."""
        if what in opened.unsupported:
            return None
        try:
            return call()
        except self._nvml.NVMLError as error:
            if self._is_lost(error):
                raise
            if error.value in self._never_codes:
                opened.unsupported.add(what)
            return None  # otherwise this time: a driver that is busy or out of memory

    def _is_lost(self, error: Any) -> bool:
        return error.value in self._lost_codes

    def _memory(self, opened: _Open) -> tuple[int | None, int | None]:
        """Used and total. Version 2 of the call does not count what the driver keeps as used."""
        nvml, handle = self._nvml, opened.handle
        info = self._ask(
            opened, "memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        )
        if info is None:
            info = self._ask(opened, "old memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _throttle_bits(self, handle: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            # Drivers before 535 know the older name.
            return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _clock(self, opened: _Open, what: str, domain: int) -> float | None:
        nvml = self._nvml
        mhz = self._ask(
            opened, what, lambda: int(nvml.nvmlDeviceGetClockInfo(opened.handle, domain))
        )
        return _scaled(mhz, 1e6)

    def _ecc(self, opened: _Open, what: str, kind: int) -> int | None:
        nvml = self._nvml
        return self._ask(
            opened,
            what,
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(opened.handle, kind, nvml.NVML_VOLATILE_ECC)
            ),
        )

    def _pcie(self, opened: _Open, what: str, direction: int) -> float | None:
        nvml = self._nvml
        kilobytes = self._ask(
            opened, what, lambda: int(nvml.nvmlDeviceGetPcieThroughput(opened.handle, direction))
        )
        return _scaled(kilobytes, 1e3)

    def _nvlink(self, opened: _Open) -> tuple[int | None, int | None]:
        """Bytes sent and received, of which the driver counts whole KiB."""
        nvml = self._nvml
        fields = [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]
        values = self._ask(
            opened, "nvlink", lambda: nvml.nvmlDeviceGetFieldValues(opened.handle, fields)
        )
        if values is None:
            return None, None
        if any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            opened.unsupported.add("nvlink")
            return None, None
        sent, received = (int(value.value.ullVal) * 1024 for value in values)
        return sent, received

    def _listen(self, opened: list[_Open]) -> None:
        """Have the driver's critical errors queued for us, where it does that."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for one in opened:
            if one.handle is None:
                continue
            try:
                nvml.nvmlDeviceRegisterEvents(
                    one.handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
            except nvml.NVMLError:
                continue  # not on this device, or not for this user

    def _collect_xids(self) -> None:
        nvml = self._nvml
        if self._events is None:
            return
        for _ in range(_MAX_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    found = self._xids.setdefault(_address(event.device), [])
                    found.append(int(event.eventData))
            except nvml.NVMLError:
                return  # a timeout: no more of them; a lost device says so when it is read

    def _xids_of(self, opened: _Open) -> tuple[int, ...]:
        return tuple(self._xids.get(_address(opened.handle), ()))


def _address(handle: Any) -> int:
    """What tells two handles apart: a device that is lost no longer gives its index or UUID."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
