"""The CPU attention against its definition, written out row by row in float64."""

import pytest
import torch
from attention import Paged, attend_over_codes, attend_over_pool, filled_pool, make_step

from engine.attention.cpu import CpuAttention

DIM = 8
WORST = {torch.float64: 1e-12, torch.float32: 5e-6}
STEPS = [
    # query lengths, key lengths: decode, mixed and out of order, prefill, one and many groups
    ((1, 1, 1), (5, 17, 33)),
    ((1, 7, 9, 1), (12, 7, 21, 300)),
    ((140, 3), (150, 3)),
    ((1, 5, 1, 20, 1), (290, 9, 3, 31, 280)),
    ((1,) * 4, (80, 300, 290, 295)),
    ((1,) * 23, tuple((37 * i) % 500 + 1 for i in range(23))),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("page", [8, 16, 256])
@pytest.mark.parametrize(("q_lens", "k_lens"), STEPS)
def test_it_stores_then_attends_over_the_strided_pool(q_lens, k_lens, page, window, softcap):
    for dtype, worst in WORST.items():
        backend = CpuAttention(window=window, softcap=softcap)
        got, want = attend_over_pool(
            backend, q_lens, k_lens, page=page, window=window, softcap=softcap, dtype=dtype, dim=DIM
        )
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() < worst


def test_one_instance_serves_steps_of_any_size_one_after_the_other():
    backend = CpuAttention()
    for q_lens, k_lens in (*STEPS, *reversed(STEPS)):
        got, want = attend_over_pool(
            backend, q_lens, k_lens, page=16, window=None, dtype=torch.float64, dim=DIM
        )
        assert (got - want).abs().max() < 1e-12


def test_a_pool_of_codes_is_read_as_what_the_codes_stand_for():
    got, want = attend_over_codes(CpuAttention(), (1, 7, 1), (12, 7, 300), page=16)
    assert (got.double() - want).abs().max() < 5e-6


def attend_once(step, data):
    one = torch.randn(1, 1, DIM)
    pool = filled_pool(data, 8, torch.float32, layer=0)
    return CpuAttention().attend(one, one, one, 0, pool, step)


@pytest.mark.parametrize("block", [-1, 1000])
def test_a_used_table_entry_out_of_range_raises(block):
    data = Paged((20,), 8, 1, torch.float32)
    step = make_step((1,), (20,), data.table, 8)
    data.table[0, 1] = block
    with pytest.raises(IndexError, match="outside"):
        attend_once(step, data)


def test_a_length_beyond_the_table_raises():
    data = Paged((20,), 8, 1, torch.float32)
    step = make_step((1,), (20,), data.table, 8)
    step.k_lens = (100,)
    with pytest.raises(IndexError, match="columns"):
        attend_once(step, data)


def test_a_negative_slot_raises_instead_of_overwriting_the_last_block():
    data = Paged((3,), 8, 1, torch.float32)
    step = make_step((1,), (3,), data.table, 8)
    step.slots = torch.tensor([-1])
    with pytest.raises(IndexError, match="slots"):
        attend_once(step, data)
