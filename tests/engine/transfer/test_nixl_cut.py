"""What is read of whose blocks: every byte once, in its place, however both sides are cut."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import TransferError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout, KVPart
from engine.models.shard import Grid, shards
from engine.models.tiny import TINY_ARCHITECTURE
from engine.transfer.nixl_cut import (
    block_runs,
    combined,
    parts_from_wire,
    parts_to_wire,
    piece_bytes,
    pieces,
    require_whole,
)

ARCHITECTURE = replace(TINY_ARCHITECTURE, num_heads=12, num_kv_heads=3, head_dim=4, num_layers=5)
NUMBERS = KVLayout(num_layers=5, num_kv_heads=3, head_dim=4, dtype="float32", fingerprint="f")
SIZES = [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (1, 5), (2, 2), (4, 3)]
PAGE, BLOCKS = 4, 3


def cut(tp, pp):
    """What each rank holds, and what of it is its own."""
    made = shards(ARCHITECTURE, Grid(tensor_parallel=tp, pipeline_parallel=pp))
    held = [KVPart(shard.layers, shard.kv_heads) for shard in made]
    return held, [KVPart(shard.layers, shard.owned_kv_heads) for shard in made]


def pool_of(part, layout):
    layers, heads = (last - first for first, last in (part.layers, part.heads))
    return KVPool(replace(layout, num_layers=layers, num_kv_heads=heads), BLOCKS, PAGE)


def payload(whole, block, part):
    return whole.gather(block, 0, PAGE, *part.layers, part.heads)


def memory(pool, block):
    return np.frombuffer(pool.block_bytes(block, 0, pool.layout.num_layers), dtype=np.uint8)


@pytest.mark.parametrize("layout", [NUMBERS, NUMBERS.as_codes()], ids=["numbers", "codes"])
@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(SIZES, SIZES)))
def test_pools_of_any_two_sizes_get_every_byte_in_its_place(layout, prefill, decode):
    whole = KVPool(layout, BLOCKS, PAGE)
    random = torch.Generator().manual_seed(1)
    as_bytes = whole.data.view(torch.uint8)
    as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, generator=random, dtype=torch.uint8))
    held, owned = cut(*prefill)
    theirs = [pool_of(part, layout) for part in held]
    for part, pool in zip(held, theirs, strict=True):
        pool.scatter((1,), 0, 0, pool.layout.num_layers, bytearray(payload(whole, 1, part)))
    readers, _ = cut(*decode)
    ours = [pool_of(part, layout) for part in readers]
    for piece in require_whole(readers, owned):
        here, there = readers[piece.reader], held[piece.owner]
        one_run = piece.part.heads == here.heads == there.heads
        into, from_ = (
            block_runs(part, piece.part, layout, PAGE, whole=one_run) for part in (here, there)
        )
        assert (into[:, 1] == from_[:, 1]).all()
        assert into[:, 1].sum() == piece_bytes(piece.part, layout, PAGE)
        assert len(into) == 1 or not one_run
        target, source = memory(ours[piece.reader], 2), memory(theirs[piece.owner], 1)
        for (to, length), (at, _) in zip(into.tolist(), from_.tolist(), strict=True):
            target[to : to + length] = source[at : at + length]
        assert bytes(target) != bytes(len(target))
    for part, pool in zip(readers, ours, strict=True):
        assert bytes(memory(pool, 2)) == bytes(payload(whole, 1, part))
        assert not memory(pool, 1).any()


def test_copies_of_a_head_are_read_of_its_owner_alone():
    held, owned = cut(6, 1)
    assert [part.heads for part in held] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
    one = [KVPart((0, 5), (0, 3))]
    assert [piece.owner for piece in pieces(one, owned)] == [0, 2, 4]
    assert [(p.reader, p.owner) for p in pieces(held, one)] == [(i, 0) for i in range(6)]


@pytest.mark.parametrize(
    "owners",
    [
        [KVPart((0, 5), (0, 2))],
        [KVPart((0, 4), (0, 3))],
        [KVPart((0, 5), (0, 2)), KVPart((0, 5), (1, 3))],
        [],
    ],
)
def test_what_is_not_offered_once_is_refused(owners):
    with pytest.raises(TransferError, match="not all of them, or some twice") as refused:
        require_whole([KVPart((0, 5), (0, 3))], owners)
    assert refused.value.stage == "offer"


def test_the_sum_of_one_piece_is_its_own_and_of_several_depends_on_their_order():
    assert combined([7]) == 7
    assert combined([None]) is combined([1, None]) is None
    assert len({combined([1, 2]), combined([2, 1]), combined([1, 2, 0]), 1, 2}) == 5
    assert combined([0, 2**64 - 1]) is not None


def test_parts_arrive_as_they_were():
    held, _ = cut(4, 3)
    assert parts_from_wire(parts_to_wire(held)) == tuple(held)


@pytest.mark.parametrize(
    "wire", [7, [7], [[0, 1, 0]], [[0, 1, 0, "x"]], [[1, 1, 0, 1]], [[-1, 1, 0, 1]]]
)
def test_a_part_that_is_none_is_refused(wire):
    with pytest.raises(TransferError, match="malformed part"):
        parts_from_wire(wire)
