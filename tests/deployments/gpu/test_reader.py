"""The reader against NVIDIA's own Python bindings, which run on a library made of Python."""

from __future__ import annotations

from dataclasses import fields

import pynvml
import pytest
from fake_nvml import NOT_SUPPORTED, Driver, Error, Gpu, Instance, installed

from deployments.gpu.reader import GpuReader, NoGpu
from deployments.gpu.reading import Device, Reading, throttle_reasons
from deployments.gpu.visible import owned, parse

FIELDS = [f.name for f in fields(Reading)]
SAID_BY_A_DEVICE = [
    *("utilization", "power_mw", "limit_mw", "energy_mj", "temperature", "sm_mhz", "memory_mhz"),
    *("throttle", "ecc_corrected", "ecc_uncorrected", "pcie_tx_kb", "pcie_rx_kb", "memory"),
    *("nvlink_tx_kib", "nvlink_rx_kib"),
]


def read(driver: Driver, selection: tuple[str, ...] | None = None) -> tuple[Reading, ...]:
    with installed(driver):
        reader = GpuReader(selection)
        try:
            return reader.read().readings
        finally:
            reader.close()


def names(driver: Driver, *entries: str) -> list[str]:
    return [reading.device.gpu for reading in read(driver, entries)]


def test_every_field_is_read_in_base_units():
    driver = Driver(Gpu("GPU-a"))
    assert read(driver) == (
        Reading(
            device=Device(gpu="0", uuid="GPU-a", name="NVIDIA H200"),
            memory_used_bytes=40 << 30,
            memory_total_bytes=140 << 30,
            busy_ratio=0.87,
            memory_busy_ratio=0.35,
            power_w=512.3,
            power_limit_w=700.0,
            energy_j=5000.0,
            temperature_c=61.0,
            sm_clock_hz=1.785e9,
            memory_clock_hz=3.201e9,
            throttle_reasons=frozenset({"power_cap"}),
            ecc_corrected=3,
            ecc_uncorrected=0,
            pcie_sent_bytes_per_s=1.2e6,
            pcie_received_bytes_per_s=0.8e6,
            nvlink_sent_bytes=2 << 20,
            nvlink_received_bytes=1 << 20,
        ),
    )
    assert (driver.initialised, driver.event_sets) == (0, 0)


@pytest.mark.parametrize("said", SAID_BY_A_DEVICE)
@pytest.mark.parametrize("error", [NOT_SUPPORTED, Error(pynvml.NVML_ERROR_UNKNOWN)], ids=str)
def test_a_field_that_a_device_does_not_say_is_none_and_the_others_stay(said: str, error: Error):
    (whole,) = read(Driver(Gpu("GPU-a")))
    (partial,) = read(Driver(Gpu("GPU-a", **{said: error})))
    gone = {name for name in FIELDS if getattr(whole, name) != getattr(partial, name)}
    assert all(getattr(partial, name) is None for name in gone)
    assert not partial.lost
    pairs = {"utilization", "memory", "nvlink_tx_kib", "nvlink_rx_kib"}
    assert len(gone) == (2 if said in pairs else 1), gone


def test_what_is_not_supported_is_asked_once_and_what_failed_is_asked_again():
    driver = Driver(Gpu("GPU-a", power_mw=NOT_SUPPORTED, temperature=Error(999)))
    with installed(driver):
        reader = GpuReader()
        for _ in range(3):
            reader.read()
        assert driver.calls["nvmlDeviceGetPowerUsage"] == 1
        assert driver.calls["nvmlDeviceGetTemperature"] == 3
        driver.gpus[0].temperature = 44
        assert reader.read().readings[0].temperature_c == 44.0


def test_an_older_driver_is_asked_by_the_older_names():
    new = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons")
    (reading,) = read(Driver(Gpu("GPU-a"), missing=new))
    assert reading.throttle_reasons == {"power_cap"}
    assert reading.memory_used_bytes == 41 << 30  # version 1 counts what is reserved


def test_a_library_without_a_function_has_no_such_field():
    (reading,) = read(
        Driver(
            Gpu("GPU-a"),
            missing=("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues"),
        )
    )
    assert (reading.energy_j, reading.nvlink_sent_bytes, reading.power_w) == (None, None, 512.3)


def test_without_the_library_there_is_no_gpu():
    with pytest.raises(NoGpu, match="NVML Shared Library Not Found"):
        GpuReader()


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
)
def test_a_driver_that_does_not_start_is_no_gpu(code: int):
    driver = Driver(Gpu("GPU-a"), init=code)
    with installed(driver), pytest.raises(NoGpu):
        GpuReader()
    assert driver.initialised == 0


def test_a_device_lost_while_it_is_watched_says_just_that_and_the_other_goes_on():
    driver = Driver(Gpu("GPU-a"), Gpu("GPU-b"))
    with installed(driver):
        reader = GpuReader()
        assert [r.lost for r in reader.read().readings] == [False, False]
        driver.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST
        driver.xid(0, 79)
        lost, well = reader.read().readings
        assert lost == Reading(
            device=Device(gpu="0", uuid="GPU-a", name="NVIDIA H200"), lost=True, xids=(79,)
        )
        assert (well.lost, well.power_w) == (False, 512.3)


def test_a_device_lost_before_anybody_looked_is_listed():
    lost, well = read(
        Driver(Gpu("GPU-a", lost=pynvml.NVML_ERROR_RESET_REQUIRED), Gpu("GPU-b", events=Error(3)))
    )
    assert (lost.device.gpu, lost.lost) == ("0", True)
    assert (well.device.uuid, well.lost, well.xids) == ("GPU-b", False, ())


def test_each_critical_error_is_in_one_reading_and_of_its_device():
    driver = Driver(Gpu("GPU-a"), Gpu("GPU-b"))
    with installed(driver):
        reader = GpuReader()
        for number in (31, 31, 94):
            driver.xid(1, number)
        assert [r.xids for r in reader.read().readings] == [(), (31, 31, 94)]
        assert [r.xids for r in reader.read().readings] == [(), ()]


def test_a_flood_of_critical_errors_does_not_hold_a_reading_up():
    driver = Driver(Gpu("GPU-a"))
    with installed(driver):
        reader = GpuReader()
        for _ in range(1000):
            driver.xid(0, 48)
        assert len(reader.read().readings[0].xids) == 64


def mig() -> Driver:
    split = Gpu(
        "GPU-b",
        name="NVIDIA A100-SXM4-80GB",
        instances={1: Instance("MIG-x"), 4: Instance("MIG-y", (2 << 30, 20 << 30))},
    )
    return Driver(Gpu("GPU-a"), split)


def test_mig_instances_have_their_own_memory_and_share_the_rest():
    whole, first, second, shared = read(mig())
    assert whole.device.gpu == "0"
    assert first == Reading(
        device=Device(gpu="1:1", uuid="MIG-x", name="NVIDIA A100-SXM4-80GB"),
        memory_used_bytes=1 << 30,
        memory_total_bytes=10 << 30,
    )
    assert (second.device.gpu, second.memory_used_bytes) == ("1:4", 2 << 30)
    assert (shared.device.gpu, shared.device.uuid) == ("1", "GPU-b")
    assert (shared.memory_used_bytes, shared.power_w) == (None, 512.3)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (("1", "0"), ["1:1", "1", "0"]),
        (("MIG-y",), ["1:4", "1"]),
        (("MIG-x", "MIG-y"), ["1:1", "1", "1:4"]),
        (("GPU-a",), ["0"]),
        (("GPU-",), ["0"]),
        (("MIG-none", "0"), []),
        (("GPU-none", "0"), []),
        (("0", "7", "1"), ["0"]),
        ((), []),
    ],
    ids=str,
)
def test_only_selected_devices_are_read_up_to_the_first_that_is_not_there(entries, expected):
    assert names(mig(), *entries) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        (" 1 , 0", ("1", "0")),
        ("0,-1,1", ("0",)),
        ("0,,1", ("0",)),
        ("GPU-8f1e,MIG-1/2/3", ("GPU-8f1e", "MIG-1/2/3")),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str, expected: tuple[str, ...]):
    assert parse(value) == expected


def test_an_actor_owns_what_ray_gave_it_and_one_that_asked_for_none_owns_none():
    assert owned({}, None) is None
    assert owned({}, []) == ()
    assert owned({}, ["2", "3"]) == ("2", "3")
    assert owned({"CUDA_VISIBLE_DEVICES": "1"}, []) == ("1",)
    assert owned({"CUDA_VISIBLE_DEVICES": ""}, None) == ()


def test_a_reason_of_a_newer_driver_is_not_dropped():
    assert throttle_reasons(0) == frozenset()
    assert throttle_reasons(0x1 | 0x40) == {"idle", "hardware_thermal"}
    assert throttle_reasons(0x4 | 1 << 40) == {"power_cap", "other"}
