"""KV between pools that are cut differently: the same bytes, whatever each side's ranks hold."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.pool import KVPool
from engine.execution.ranks.pool import ShardedPool
from engine.execution.ranks.wire import RankReady
from engine.models.model import KVLayout
from engine.models.shard import Grid, shards
from engine.models.tiny import TINY_ARCHITECTURE
from engine.transfer.export import KVExport
from engine.transfer.intake import KVIntake

ARCHITECTURE = replace(TINY_ARCHITECTURE, num_heads=12, num_kv_heads=3, head_dim=4, num_layers=5)
NUMBERS = KVLayout(num_layers=5, num_kv_heads=3, head_dim=4, dtype="float32", fingerprint="f")
CODES = NUMBERS.as_codes()
TOKENS = 29


def made_up(layout, seed=1):
    """What each token keeps, in wire order: `[tokens, layers, 2, bytes]`."""
    random = np.random.default_rng(seed)
    if not layout.coded:
        return random.random((TOKENS, 5, 2, 12), dtype=np.float32).view(np.uint8)
    codes = random.integers(0, 256, (TOKENS, 5, 2, 12), dtype=np.uint8)
    scales = random.random((TOKENS, 5, 2, 3), dtype=np.float32).view(np.uint8)
    return np.concatenate([codes, scales], axis=-1)


def pool_of(tp, pp, page, layout=NUMBERS):
    if tp * pp == 1:
        return KVPool(layout, 2 + TOKENS // page, page)
    ready = [
        RankReady(
            pid=os.getpid(),
            host="here",
            on_host=True,
            dtype="float64",
            vocab_size=10,
            max_context_tokens=100,
            eos_token_ids=(),
            layers=shard.layers,
            kv_heads=shard.kv_heads,
            owned_kv_heads=shard.owned_kv_heads,
            layout=replace(layout, num_layers=shard.num_layers, num_kv_heads=shard.num_kv_heads),
            weight_bytes=0,
            load_s=0.0,
        )
        for shard in shards(ARCHITECTURE, Grid(tensor_parallel=tp, pipeline_parallel=pp))
    ]
    pool = ShardedPool(ready, 2 + TOKENS // page, page, host="here")
    assert all(os.path.exists(file) for file in pool.files)
    pool.connect([None] * len(ready))
    return pool


def content(pool, blocks, first, last):
    """What positions `[first, last)` keep, as `made_up`."""
    page = pool.block_tokens
    kept = [bytes(pool.gather(blocks[t // page], t % page, 1, 0, 5)) for t in range(first, last)]
    return np.frombuffer(b"".join(kept), dtype=np.uint8).reshape(last - first, 5, 2, -1)


def fill(pool, blocks, values):
    for token, kept in enumerate(values):
        pool.scatter(blocks, token, 0, 5, bytearray(kept.tobytes()))


grids = st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3]))


@settings(max_examples=60, deadline=None)
@given(
    sender=grids,
    receiver=grids,
    pages=st.tuples(st.sampled_from([3, 4, 8, 16]), st.sampled_from([3, 4, 8, 16])),
    first=st.integers(0, TOKENS - 1),
    chunk_bytes=st.sampled_from([1, 200, 100_000]),
    layout=st.sampled_from([NUMBERS, CODES]),
)
def test_any_pool_hands_its_kv_to_any_other(sender, receiver, pages, first, chunk_bytes, layout):
    values = made_up(layout)
    source, target = pool_of(*sender, pages[0], layout), pool_of(*receiver, pages[1], layout)
    there = tuple(range(source.num_blocks - 1, 0, -1))
    here = tuple(range(1, target.num_blocks))
    fill(source, there, values)
    np.testing.assert_array_equal(content(source, there, 0, TOKENS), values)
    export = KVExport(
        source,
        first_token=first,
        num_tokens=TOKENS,
        window_bytes=1 << 30,
        chunk_bytes=chunk_bytes,
    )
    export.computed(TOKENS, there)
    intake = KVIntake(target, here, first_token=first, num_tokens=TOKENS)
    cells = set()
    while (chunk := export.next()) is not None:
        head = chunk.head
        for layer in range(head.first_layer, head.last_layer):
            for kv_head in range(head.first_head, head.last_head):
                for token in range(head.first_token, head.first_token + head.num_tokens):
                    assert (layer, kv_head, token) not in cells, "sent twice"
                    cells.add((layer, kv_head, token))
        memory = intake.memory(head)
        memory[:] = chunk.payload
        intake.received(head, memory)
    assert len(cells) == 5 * 3 * (TOKENS - first)
    assert export.all_sent
    assert intake.complete
    np.testing.assert_array_equal(content(target, here, first, TOKENS), values[first:])
    if first:
        assert not content(target, here, 0, first).any(), "written outside of what was asked"


def test_copies_of_a_head_are_all_written_and_one_is_read():
    pool = pool_of(6, 1, 4)
    values = made_up(NUMBERS, seed=2)[:4]
    fill(pool, (1,), values)
    numbers = values.view(np.float32).reshape(4, 5, 2, 3, 4)  # token, layer, K or V, head, dim
    assert len(pool.parts) == 3
    for rank, held in enumerate(pool._held):
        kept = np.moveaxis(held.pool.data[1, :, :, :, 0].numpy(), 2, 0)
        np.testing.assert_array_equal(kept, numbers[:, :, :, rank // 2])
    assert pool.piece(1, (0, 5), (0, 1)) is not None
    assert pool.piece(1, (0, 5), (0, 1), write=True) is None


def test_equal_cuts_send_from_where_the_kv_lies():
    pool = pool_of(3, 2, 4)
    piece = pool.piece(1, (0, 3), (1, 2), write=True)
    piece[:] = bytes([1]) * len(piece)
    assert torch.count_nonzero(pool._held[1].pool.data[1].view(torch.uint8)).item() == len(piece)
    assert pool.piece(1, (0, 4), (1, 2)) is None, "reaches into the next stage"


@pytest.mark.parametrize("grid", [(2, 1), (6, 2)])
def test_nothing_of_a_pool_stays_when_it_goes(grid):
    before = set(os.listdir("/proc/self/fd"))
    pool = pool_of(*grid, 4)
    assert set(os.listdir("/proc/self/fd")) - before, "the mapping keeps one of its own"
    del pool
    assert set(os.listdir("/proc/self/fd")) == before
