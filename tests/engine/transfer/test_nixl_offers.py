"""What a receiver that reads is offered, what it is sent, and what its intake takes: every byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TransferError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.transfer.checksum import checksum
from engine.transfer.manifest import ChunkHead
from engine.transfer.nixl_intake import ReadIntake
from engine.transfer.nixl_offers import Offer, OfferingExport

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", fingerprint="f")
PAGE = 4
BLOCK_BYTES = PAGE * LAYOUT.bytes_per_token


def filled_pool() -> KVPool:
    pool = KVPool(LAYOUT, 20, PAGE)
    pool.data.copy_(torch.arange(pool.data.numel(), dtype=torch.float32).view(pool.data.shape))
    return pool


def rows(pool: KVPool, blocks: tuple[int, ...], first: int, end: int) -> torch.Tensor:
    return torch.stack([pool.data[blocks[t // PAGE], :, :, t % PAGE] for t in range(first, end)])


def block_head(first_token: int, found: int, **changes) -> ChunkHead:
    values = {
        "first_layer": 0,
        "last_layer": LAYOUT.num_layers,
        "first_token": first_token,
        "num_tokens": PAGE,
        "first_head": 0,
        "last_head": LAYOUT.num_kv_heads,
        "num_bytes": BLOCK_BYTES,
        "checksum": found,
    }
    return ChunkHead(**{**values, **changes})


def read(source: KVPool, target: KVPool, intake: ReadIntake, offer: Offer) -> None:
    """What a READ does."""
    found = checksum(source.block_bytes(offer.block, 0, LAYOUT.num_layers))
    head = block_head(offer.first_token, found)
    block = intake.lend(head)
    target.data[block] = source.data[offer.block]
    intake.landed(head, checksum(target.block_bytes(block, 0, LAYOUT.num_layers)))
    intake.give_back(1)


@settings(max_examples=80, deadline=None)
@given(
    num_tokens=st.integers(1, 23),
    first=st.integers(0, 22),
    steps=st.lists(st.integers(1, 9), max_size=6),
)
def test_every_token_is_offered_or_sent_and_none_twice(num_tokens, first, steps):
    first = min(first, num_tokens - 1)
    source, target = filled_pool(), KVPool(LAYOUT, 20, PAGE)
    count = -(-num_tokens // PAGE)
    source_blocks, target_blocks = tuple(range(19, 19 - count, -1)), tuple(range(1, 1 + count))
    export = OfferingExport(source, first_token=first, num_tokens=num_tokens, window_bytes=1)
    intake = ReadIntake(target, target_blocks, first_token=first, num_tokens=num_tokens)
    done = 0
    for step in [*steps, num_tokens]:
        done = min(done + step, num_tokens)
        for offer in export.computed(done, source_blocks):
            assert offer.first_token + PAGE <= done
            read(source, target, intake, offer)
        while (chunk := export.next()) is not None:
            memory = intake.memory(chunk.head)
            assert memory is not None
            memory[:] = chunk.payload
            intake.received(chunk.head, memory)
            export.acked(chunk.head.num_bytes)
    assert intake.complete
    assert export.unacked_bytes == 0
    expected = rows(source, source_blocks, first, num_tokens)
    assert torch.equal(rows(target, target_blocks, first, num_tokens), expected)
    assert not rows(target, target_blocks, 0, first).any() if first else True


def make_intake(num_tokens: int = 8) -> ReadIntake:
    return ReadIntake(KVPool(LAYOUT, 20, PAGE), (3, 5), first_token=0, num_tokens=num_tokens)


def test_a_block_is_lent_once_and_counts_until_it_is_given_back():
    intake, quiet = make_intake(), []
    intake.on_quiet = lambda: quiet.append(True)
    assert [intake.lend(block_head(t, 0)) for t in (0, 4)] == [3, 5]
    with pytest.raises(TransferError, match="offered twice"):
        intake.lend(block_head(4, 0))
    intake.give_back(1)
    intake.close()
    assert (intake.lent, quiet) == (1, [])
    intake.give_back(1)
    assert (intake.lent, quiet) == (0, [True])


def test_what_lands_after_the_close_is_ignored():
    intake = make_intake()
    head = block_head(0, 1)
    intake.lend(head)
    intake.close()
    intake.landed(head, 2)
    assert intake.received_bytes == 0


def test_a_block_with_another_checksum_is_worthless():
    intake = make_intake()
    head = block_head(0, 1)
    intake.lend(head)
    with pytest.raises(TransferError) as wrong:
        intake.landed(head, 2)
    assert wrong.value.stage == "checksum"
    assert not intake.complete


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token": 2},
        {"num_tokens": 2, "num_bytes": BLOCK_BYTES // 2},
        {"last_layer": 2, "num_bytes": BLOCK_BYTES * 2 // 3},
        {"first_token": 8},
        {"last_head": 1, "num_bytes": BLOCK_BYTES // 2},
        {"num_bytes": 1},
    ],
)
def test_only_whole_blocks_of_the_transfer_are_lent(changes):
    intake = make_intake()
    with pytest.raises(TransferError):
        intake.lend(block_head(**{"first_token": 0, "found": 0, **changes}))
    assert intake.lent == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"first_token": 3, "num_tokens": 2, "num_bytes": BLOCK_BYTES // 2},
        {"last_layer": 1, "num_bytes": BLOCK_BYTES // 3},
    ],
)
def test_a_chunk_over_a_block_that_is_read_is_refused(changes):
    intake = make_intake()
    intake.lend(block_head(0, 0))
    with pytest.raises(TransferError, match="is read") as refused:
        intake.memory(block_head(**{"first_token": 0, "found": 0, **changes}))
    assert refused.value.stage == "chunk"
    assert intake.memory(block_head(4, 0)) is not None


def test_a_block_that_is_being_sent_is_not_lent():
    intake = make_intake()
    assert intake.memory(block_head(3, 0, num_tokens=1, num_bytes=BLOCK_BYTES // PAGE)) is not None
    with pytest.raises(TransferError, match="offered and sent"):
        intake.lend(block_head(0, 0))
    assert intake.lent == 0
    assert intake.lend(block_head(4, 0)) == 5


def test_nothing_is_complete_while_a_block_is_lent():
    intake, pool = make_intake(num_tokens=4), filled_pool()
    head = block_head(0, checksum(pool.block_bytes(3, 0, LAYOUT.num_layers)))
    intake.lend(head)
    intake.landed(head, head.checksum)
    assert (intake.received_bytes, intake.complete) == (BLOCK_BYTES, False)
    intake.give_back(1)
    assert intake.complete
