"""One look at one device, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Which device it is."""

    gpu: str
    """The driver's index, by PCI bus; `0:1` is MIG instance 1 on GPU 0."""

    uuid: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one device said. None or empty: this device or driver does not say."""

    device: Device
    lost: bool = False
    """It fell off the bus or needs a reset; nothing else is known then."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy_ratio: float | None = None
    """Share of the driver's last sample period (1/6 to 1 s) in which a kernel ran."""

    memory_busy_ratio: float | None = None
    """Share of that period in which device memory was read or written."""

    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Since the driver was loaded."""

    temperature_c: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle_reasons: frozenset[str] | None = None
    """Of `THROTTLE_REASONS`, those that hold now."""

    ecc_corrected: int | None = None
    """Since the driver was loaded, like `ecc_uncorrected`."""

    ecc_uncorrected: int | None = None
    pcie_sent_bytes_per_s: float | None = None
    """Over the 20 ms in which it was asked, like `pcie_received_bytes_per_s`."""

    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes: int | None = None
    """Payload on all links since the driver was loaded, like `nvlink_received_bytes`."""

    nvlink_received_bytes: int | None = None
    xids: tuple[int, ...] = ()
    """Critical driver errors since the last reading, each as often as it happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All devices at one moment of the reader's monotonic clock."""

    at_s: float
    readings: tuple[Reading, ...]


THROTTLE_REASONS: dict[int, str] = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "thermal",
    0x040: "hardware_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's clocks event reasons."""

HARMLESS_REASONS = frozenset({"idle", "application_clocks"})
"""Reasons for low clocks that nobody needs to look into."""

OTHER_REASON = "other"
"""A bit that a newer driver sets and this table lacks."""


def throttle_reasons(bits: int) -> frozenset[str]:
    """Names of the reasons in NVML's bit set."""
    names = {name for bit, name in THROTTLE_REASONS.items() if bits & bit}
    if bits & ~sum(THROTTLE_REASONS):
        names.add(OTHER_REASON)
    return frozenset(names)
