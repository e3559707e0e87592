"""KV that is codes, on its way: the scales travel with them, or nothing is taken."""

import itertools
import math
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

NUMBERS = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", fingerprint="f")
LAYOUT = NUMBERS.as_codes()


def filled_pool(page, num_blocks=20):
    pool = KVPool(LAYOUT, num_blocks, page)
    for layer in range(LAYOUT.num_layers):
        for which, (codes, scales) in enumerate(
            (
                (pool.keys(layer), pool.key_scales(layer)),
                (pool.values(layer), pool.value_scales(layer)),
            )
        ):
            g = torch.Generator().manual_seed(2 * layer + which)
            codes.copy_(torch.randint(-127, 128, codes.shape, generator=g))
            scales.copy_(torch.rand(scales.shape, generator=g))
    return pool


def rows(pool, blocks, tokens):
    """All codes and scales of some tokens of a table, in float32 `[tokens, everything]`."""
    page = pool.block_tokens
    found = []
    for t in tokens:
        block, offset = blocks[t // page], t % page
        parts = [
            x(layer)[block, offset].reshape(-1).float()
            for layer in range(LAYOUT.num_layers)
            for x in (pool.keys, pool.values, pool.key_scales, pool.value_scales)
        ]
        found.append(torch.cat(parts))
    return torch.stack(found)


def ship(export, intake):
    while (chunk := export.next()) is not None:
        memory = intake.memory(chunk.head)
        memory[:] = chunk.payload
        intake.received(chunk.head, memory)
        export.acked(chunk.head.num_bytes)


@settings(max_examples=60, deadline=None)
@given(
    from_page=st.sampled_from([2, 3, 4, 8]),
    to_page=st.sampled_from([2, 3, 4, 8]),
    num_tokens=st.integers(1, 23),
    cached_blocks=st.integers(0, 3),
    chunk_bytes=st.sampled_from([1, 200, 1 << 20]),
    steps=st.lists(st.integers(1, 9), max_size=6),
)
def test_codes_and_scales_arrive_as_they_were_sent_whatever_the_page_sizes(
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
    assert intake.complete
    sent = range(first, num_tokens)
    assert torch.equal(rows(target, target_blocks, sent), rows(source, source_blocks, sent))
    if first:
        assert not rows(target, target_blocks, range(first)).any()
    assert intake.received_bytes == (num_tokens - first) * LAYOUT.bytes_per_token
    assert LAYOUT.bytes_per_token == 3 * 2 * 2 * (4 + 4)


def one_chunk(page=4, num_tokens=4):
    source, target = filled_pool(page), KVPool(LAYOUT, 4, page)
    export = KVExport(source, first_token=0, num_tokens=num_tokens, window_bytes=1 << 20)
    export.computed(num_tokens, (1,))
    chunk = export.next()
    assert chunk is not None
    intake = KVIntake(target, (2,), first_token=0, num_tokens=num_tokens)
    return intake, chunk.head, bytearray(chunk.payload)


@pytest.mark.parametrize("num_tokens", [4, 3], ids=["whole block", "ragged"])
def test_a_scale_that_changed_on_its_way_is_a_checksum_error(num_tokens):
    intake, head, payload = one_chunk(num_tokens=num_tokens)
    payload[-2] ^= 1  # the last scale
    memory = intake.memory(head)
    memory[:] = payload
    with pytest.raises(TransferError) as caught:
        intake.received(head, memory)
    assert caught.value.stage == "checksum"
    assert not intake.complete


@pytest.mark.parametrize("num_tokens", [4, 3], ids=["whole block", "ragged"])
def test_codes_without_their_scales_are_refused(num_tokens):
    intake, head, payload = one_chunk(num_tokens=num_tokens)
    codes_only = len(payload) * LAYOUT.head_dim // LAYOUT.row_bytes
    with pytest.raises(TransferError, match=f"its shape needs {len(payload)}"):
        intake.memory(replace(head, num_bytes=codes_only))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("num_tokens", [4, 3], ids=["whole block", "ragged"])
def test_a_scale_that_no_codes_have_is_refused_however_well_it_travelled(num_tokens, bad):
    intake, head, payload = one_chunk(num_tokens=num_tokens)
    payload[-4:] = torch.tensor([bad]).numpy().tobytes()
    head = replace(head, checksum=checksum(payload))
    memory = intake.memory(head)
    memory[:] = payload
    with pytest.raises(TransferError, match="negative or not finite") as caught:
        intake.received(head, memory)
    assert caught.value.stage == "chunk"
    assert not intake.complete


def test_every_scale_is_looked_at_and_no_code():
    pool = KVPool(LAYOUT, 2, 3)
    payload = pool.block_bytes(1, 0, LAYOUT.num_layers)
    rows, width = 3 * LAYOUT.num_kv_heads, LAYOUT.head_dim
    whole = torch.frombuffer(payload, dtype=torch.uint8).view(LAYOUT.num_layers, 2, -1)
    codes, scales = whole[..., : rows * width], whole[..., rows * width :].view(torch.float32)
    codes.fill_(255)  # as numbers: not one
    assert pool.has_sound_scales(payload, LAYOUT.num_layers, LAYOUT.num_kv_heads)
    for layer, which, row in itertools.product(range(LAYOUT.num_layers), range(2), range(rows)):
        scales[layer, which, row] = -1.0
        assert not pool.has_sound_scales(payload, LAYOUT.num_layers, LAYOUT.num_kv_heads)
        scales[layer, which, row] = 1.0


def test_codes_never_pass_for_numbers():
    assert LAYOUT.fingerprint != NUMBERS.fingerprint
    assert (LAYOUT.dtype, LAYOUT.scale_dtype) == ("int8", "float32")
    assert (NUMBERS.dtype, NUMBERS.scale_dtype) == ("float32", "")
