"""Export and intake: every byte once, in the right place, or an error."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TransferError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.transfer.checksum import checksum
from engine.transfer.export import KVExport
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import ChunkHead, Manifest

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", fingerprint="f")


def filled_pool(page: int, num_blocks: int = 20) -> KVPool:
    pool = KVPool(LAYOUT, num_blocks, page)
    pool.data.copy_(torch.arange(pool.data.numel(), dtype=torch.float32).view(pool.data.shape))
    return pool


def rows(pool: KVPool, blocks: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    """[layers, 2, tokens, heads, dim] of a table, read token by token."""
    page = pool.block_tokens
    return torch.stack(
        [pool.data[blocks[t // page], :, :, t % page] for t in range(num_tokens)], dim=2
    )


def ship(export: KVExport, intake: KVIntake) -> list[ChunkHead]:
    heads = []
    while (chunk := export.next()) is not None:
        memory = intake.memory(chunk.head)
        assert memory is not None
        memory[:] = chunk.payload
        intake.received(chunk.head, memory)
        export.acked(chunk.head.num_bytes)
        heads.append(chunk.head)
    return heads


@settings(max_examples=60, deadline=None)
@given(
    from_page=st.sampled_from([2, 4, 8]),
    to_page=st.sampled_from([2, 4, 8]),
    num_tokens=st.integers(1, 23),
    cached_blocks=st.integers(0, 3),
    chunk_bytes=st.sampled_from([1, 200, 1 << 20]),
    steps=st.lists(st.integers(1, 9), max_size=6),
)
def test_what_arrives_is_what_was_sent_whatever_the_page_sizes(
    from_page, to_page, num_tokens, cached_blocks, chunk_bytes, steps
):
    first = min(cached_blocks * to_page, (num_tokens - 1) // to_page * to_page)
    source, target = filled_pool(from_page), KVPool(LAYOUT, 20, to_page)
    source_blocks = tuple(range(19, 19 - -(-num_tokens // from_page), -1))
    target_blocks = tuple(range(1, 1 + -(-num_tokens // to_page)))
    export = KVExport(
        source,
        first_token=first,
        num_tokens=num_tokens,
        window_bytes=1 << 20,
        chunk_bytes=chunk_bytes,
    )
    intake = KVIntake(target, target_blocks, first_token=first, num_tokens=num_tokens)
    done = 0
    for step in [*steps, num_tokens]:
        done = min(done + step, num_tokens)
        export.computed(done, source_blocks)
        ship(export, intake)
        assert intake.complete == (done == num_tokens)
    expected = rows(source, source_blocks, num_tokens)[:, :, first:]
    assert torch.equal(rows(target, target_blocks, num_tokens)[:, :, first:], expected)
    assert not rows(target, target_blocks, num_tokens)[:, :, :first].any()
    assert export.done
    assert intake.received_bytes == (num_tokens - first) * LAYOUT.bytes_per_token


def test_a_whole_block_is_sent_and_received_without_a_copy():
    source, target = filled_pool(4), KVPool(LAYOUT, 4, 4)
    export = KVExport(source, first_token=0, num_tokens=4, window_bytes=1 << 20)
    export.computed(4, (3,))
    chunk = export.next()
    assert chunk is not None
    source.data[3, 0, 0, 0, 0, 0] = -7.0
    assert torch.frombuffer(chunk.payload, dtype=torch.float32)[0] == -7.0
    memory = KVIntake(target, (2,), first_token=0, num_tokens=4).memory(chunk.head)
    assert memory is not None
    memory[:4] = torch.tensor([9.0]).numpy().tobytes()
    assert target.data[2, 0, 0, 0, 0, 0] == 9.0


def test_the_window_bounds_what_is_unacknowledged():
    source = filled_pool(2)
    block_bytes = 2 * LAYOUT.bytes_per_token
    export = KVExport(source, first_token=0, num_tokens=12, window_bytes=2 * block_bytes)
    export.computed(12, (1, 2, 3, 4, 5, 6))
    assert export.next() is not None
    assert export.next() is not None
    assert export.next() is None
    assert export.unacked_bytes == 2 * block_bytes
    export.acked(block_bytes)
    assert export.next() is not None
    assert export.next() is None


def one_chunk() -> tuple[KVIntake, ChunkHead, bytes, KVPool]:
    source, target = filled_pool(4), KVPool(LAYOUT, 4, 4)
    export = KVExport(source, first_token=0, num_tokens=4, window_bytes=1 << 20)
    export.computed(4, (1,))
    chunk = export.next()
    assert chunk is not None
    intake = KVIntake(target, (2,), first_token=0, num_tokens=4)
    return intake, chunk.head, bytes(chunk.payload), target


def test_a_flipped_bit_is_a_checksum_error_and_nothing_counts():
    intake, head, payload, _ = one_chunk()
    memory = intake.memory(head)
    assert memory is not None
    memory[:] = payload
    memory[5] ^= 1
    with pytest.raises(TransferError) as caught:
        intake.received(head, memory)
    assert caught.value.stage == "checksum"
    assert not intake.complete


def test_a_chunk_that_came_before_is_refused():
    intake, head, payload, _ = one_chunk()
    memory = intake.memory(head)
    assert memory is not None
    memory[:] = payload
    intake.received(head, memory)
    assert intake.complete
    with pytest.raises(TransferError, match="twice"):
        intake.memory(head)


@pytest.mark.parametrize(
    "change",
    [
        {"first_token": 4},
        {"num_tokens": 5},
        {"num_tokens": 0},
        {"last_layer": 4},
        {"first_head": 1},
        {"num_bytes": 8},
    ],
)
def test_a_chunk_outside_the_transfer_is_refused(change):
    intake, head, _, _ = one_chunk()
    with pytest.raises(TransferError) as caught:
        intake.memory(replace(head, **change))
    assert caught.value.stage == "chunk"


def test_a_closed_intake_gives_out_no_memory_and_ignores_late_bytes():
    intake, head, payload, target = one_chunk()
    memory = intake.memory(head)
    intake.close()
    assert intake.memory(head) is None
    intake.received(head, memoryview(payload))
    assert not intake.complete
    assert memory is not None
    assert not target.data.any()


def manifest(**changes) -> Manifest:
    values = {
        "fingerprint": "f",
        "dtype": "float32",
        "scale_dtype": "",
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "head_range": (0, 2),
        "first_token": 4,
        "num_tokens": 9,
        "chain": (b"a", b"b"),
        "chain_tokens": 4,
        "num_cached_tokens": 0,
        "lease_ms": 30_000,
    }
    return Manifest(**{**values, **changes})


def test_a_manifest_survives_the_wire():
    assert Manifest.from_wire(manifest().to_wire()) == manifest()


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "other"},
        {"dtype": "bfloat16"},
        {"scale_dtype": "float32"},
        {"num_layers": 2},
        {"head_dim": 8},
        {"head_range": (0, 1)},
        {"first_token": 0},
        {"num_tokens": 8},
        {"chain": (b"a", b"c")},
    ],
)
def test_kv_of_anything_else_is_refused(change):
    manifest().require(LAYOUT, (b"a", b"b"), 4, 9)
    with pytest.raises(TransferError) as caught:
        manifest(**change).require(LAYOUT, (b"a", b"b"), 4, 9)
    assert caught.value.stage == "offer"


@pytest.mark.parametrize("wire", [[], [2], [3, 2, 3], [3] * 14])
def test_a_malformed_manifest_is_a_transfer_error(wire):
    with pytest.raises(TransferError):
        Manifest.from_wire(wire)


def test_the_checksum_is_xxh3_of_64_bits():
    # Of nothing, as its specification has it.
    assert checksum(b"") == 0x2D06800538D394C2
    _, head, payload, _ = one_chunk()
    assert head.checksum == checksum(payload) != checksum(bytes(len(payload)))
