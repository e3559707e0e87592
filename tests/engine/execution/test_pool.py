"""What transfers copy from and to a pool, and on which stream of a device."""

from __future__ import annotations

import pytest
import torch

from engine.execution.pool import KVPool
from engine.models.model import KVLayout

NUMBERS = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", fingerprint="f")
CODES = NUMBERS.as_codes()
FP8 = NUMBERS.kept_as("fp8")


def payloads(layout: KVLayout, device: str) -> tuple[KVPool, bytearray]:
    """An empty pool of five blocks of 4, and KV of six tokens."""
    source = KVPool(layout, 3, 8)
    kept = source.data.view(torch.uint8)
    kept.copy_(torch.arange(kept.numel()).view_as(kept) % 100)
    return KVPool(layout, 5, 4, device), bytearray(source.gather(1, 0, 6, 0, 2))


def moved(pool: KVPool, payload: bytearray) -> list[bytes]:
    """There and back, over the border of two blocks."""
    pool.scatter((3, 2), 0, 0, 2, payload)
    return [bytes(pool.gather(3, 0, 4, 0, 2)), bytes(pool.gather(2, 0, 2, 0, 2))]


@pytest.mark.parametrize("layout", [NUMBERS, CODES, FP8], ids=["numbers", "codes", "fp8"])
def test_host_memory_is_copied_without_a_stream(layout, monkeypatch):
    def taken(*_args):
        raise AssertionError("a stream for memory of the host")

    monkeypatch.setattr(torch.cuda, "Stream", taken)
    monkeypatch.setattr(torch.cuda, "stream", taken)
    pool, payload = payloads(layout, "cpu")
    first, second = moved(pool, payload)
    assert first == bytes(pool.block_bytes(3, 0, 2))
    assert len(first) + len(second) == len(payload)
    assert any(second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", [NUMBERS, CODES, FP8], ids=["numbers", "codes", "fp8"])
def test_a_transfer_does_not_wait_for_the_step_that_runs(layout):
    there, payload = payloads(layout, "cuda")
    here, _ = payloads(layout, "cpu")
    expected = moved(here, payload)
    moved(there, payload)  # kernels are loaded, which waits for everything
    step = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)
    step.record()
    assert moved(there, payload) == expected
    assert bytes(there.block_bytes(3, 0, 2)) == expected[0]
    assert not step.query()
    torch.cuda.synchronize()
