import pytest
import torch

from engine.execution.inputs import step_inputs
from engine.scheduling.plan import Chunk, StepPlan

PLAN = StepPlan(
    chunks=(
        Chunk(request_id="decode", first_token=9, token_ids=(70,), blocks=(5, 2, 7), sample=True),
        Chunk(request_id="middle", first_token=3, token_ids=(1, 2), blocks=(4, 8), sample=False),
        Chunk(request_id="end", first_token=2, token_ids=(3, 4, 5), blocks=(6, 1, 3), sample=True),
    )
)


def test_a_plan_becomes_these_tensors():
    ids, positions, step = step_inputs(PLAN, block_tokens=4)
    assert ids.tolist() == [70, 1, 2, 3, 4, 5]
    assert positions.tolist() == [9, 3, 4, 2, 3, 4]
    assert step.slots.tolist() == [7 * 4 + 1, 4 * 4 + 3, 8 * 4, 6 * 4 + 2, 6 * 4 + 3, 1 * 4]
    assert step.cu_q.tolist() == [0, 1, 3, 6]
    assert step.kv_lens.tolist() == [10, 5, 5]
    # Blocks behind the chunk's end belong to the request but hold nothing yet: left out.
    assert step.block_table.tolist() == [[5, 2, 7], [4, 8, 0], [6, 1, 0]]
    assert step.last.tolist() == [0, 5]
    assert (step.max_q, step.max_k) == (3, 10)
    assert (step.q_lens, step.k_lens) == ((1, 2, 3), (10, 5, 5))
    assert step.uniform_q is None


def test_index_tensors_have_the_types_of_the_kernels():
    ids, positions, step = step_inputs(PLAN, block_tokens=4)
    assert {t.dtype for t in (ids, positions, step.slots, step.last)} == {torch.int64}
    assert {t.dtype for t in (step.cu_q, step.kv_lens, step.block_table)} == {torch.int32}


def test_equally_long_chunks_are_uniform():
    plan = StepPlan(
        chunks=tuple(
            Chunk(request_id=name, first_token=at, token_ids=(1,), blocks=(1, 2), sample=True)
            for name, at in (("a", 0), ("b", 5))
        )
    )
    assert step_inputs(plan, block_tokens=4)[2].uniform_q == 1


def test_a_block_table_too_short_for_its_chunk_raises():
    short = Chunk(request_id="a", first_token=3, token_ids=(1, 2), blocks=(9,), sample=True)
    with pytest.raises(IndexError):
        step_inputs(StepPlan(chunks=(short,)), block_tokens=4)
