"""The reader against a real driver. Skipped where there is none."""

from __future__ import annotations

import pytest

from deployments.gpu.reader import GpuReader, NoGpu

pytestmark = pytest.mark.gpu


def test_a_real_device_says_what_it_is_and_how_it_is():
    try:
        reader = GpuReader()
    except NoGpu as error:
        pytest.skip(str(error))
    try:
        first, second = reader.read(), reader.read()
    finally:
        reader.close()
    assert first.readings
    for reading, later in zip(first.readings, second.readings, strict=True):
        assert reading.device == later.device
        if reading.lost:
            continue
        assert reading.device.uuid.startswith(("GPU-", "MIG-"))
        assert reading.device.name
        if reading.memory_total_bytes is not None:
            assert 0 <= (reading.memory_used_bytes or 0) <= reading.memory_total_bytes
        if ":" not in reading.device.gpu:
            assert reading.temperature_c is not None
            assert 0 < reading.temperature_c < 130
        for before, after in (
            (reading.energy_j, later.energy_j),
            (reading.nvlink_sent_bytes, later.nvlink_sent_bytes),
        ):
            assert (before is None) == (after is None)
            assert (before or 0) <= (after or 0)
