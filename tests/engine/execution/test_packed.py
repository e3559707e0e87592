"""A step's tensors in one run of bytes are those that the plain way makes."""

import random

import pytest
import torch
from plans import random_plan

from engine.execution.inputs import step_inputs
from engine.execution.packed import Fields, InputShape, PackedInputs, fill

NUM_BLOCKS = 500
FIELDS = ("slots", "cu_q", "kv_lens", "block_table", "last")


@pytest.mark.parametrize("page", [4, 16, 256])
def test_random_plans_give_the_tensors_of_step_inputs(page):
    rng = random.Random(page)
    packed = PackedInputs(torch.device("cpu"))
    for _ in range(30):
        plan = random_plan(rng, page, NUM_BLOCKS)
        ids, positions, want = step_inputs(plan, page)
        fields, step = packed.load(plan, page, NUM_BLOCKS)
        assert torch.equal(fields.ids, ids)
        assert torch.equal(fields.positions, positions)
        for name in FIELDS:
            got, wanted = getattr(step, name), getattr(want, name)
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted), name
        for name in ("max_q", "max_k", "uniform_q", "q_lens", "k_lens"):
            assert getattr(step, name) == getattr(want, name), name


def test_rows_beyond_the_plan_are_single_tokens_in_block_0():
    rng, page = random.Random(1), 16
    plan = random_plan(rng, page, NUM_BLOCKS, decode=True, rows=3)
    shape = InputShape(tokens=8, rows=8, columns=40, sampled=8)
    buffer = torch.full((shape.num_bytes,), 255, dtype=torch.uint8)
    fields = Fields.of(buffer, shape)
    fill(fields, plan, page, NUM_BLOCKS)
    exact, _, step = step_inputs(plan, page)
    assert torch.equal(fields.ids[:3], exact)
    assert torch.equal(fields.slots[:3], step.slots)
    assert fields.slots[3:].tolist() == [0] * 5
    assert fields.kv_lens.tolist() == [*step.kv_lens.tolist(), 1, 1, 1, 1, 1]
    assert fields.cu_q.tolist() == list(range(9))
    assert fields.last.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    width = step.block_table.shape[1]
    assert torch.equal(fields.block_table[:3, :width], step.block_table)
    assert not fields.block_table[:3, width:].any()
    assert not fields.block_table[3:].any()


@pytest.mark.parametrize("block", [NUM_BLOCKS, -1])
def test_a_block_outside_the_pool_raises_before_a_kernel_writes_there(block):
    plan = random_plan(random.Random(2), 16, NUM_BLOCKS, decode=True, rows=1, last_block=block)
    with pytest.raises(IndexError, match="outside"):
        PackedInputs(torch.device("cpu")).load(plan, 16, NUM_BLOCKS)
