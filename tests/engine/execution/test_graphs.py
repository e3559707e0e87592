"""Which recording a decode step takes, what it is fed, and that it changes no result."""

import random

import pytest
import torch
from device_graphs import FakeRecorder, tiny_on_device
from plans import random_plan

from engine.attention.backend import StepContext
from engine.execution.graphs import (
    DecodeGraphs,
    GraphBuckets,
    GraphShape,
    column_buckets,
    row_buckets,
)
from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.scheduling.plan import Chunk, StepPlan

PAGE = 16
NUM_BLOCKS = 300


@pytest.fixture
def graphs():
    torch.manual_seed(0)
    model = tiny_on_device()
    pool = KVPool(model.layout, NUM_BLOCKS, PAGE)
    pool.data.normal_()  # a history for every block
    made = DecodeGraphs(model, pool, GraphBuckets((1, 2, 4, 8), (4, 20)), FakeRecorder())
    made.record()
    return made


def eager(graphs, plan):
    ids, positions, step = step_inputs(plan, PAGE)
    return graphs._model.forward(ids, positions, graphs._pool, step)


def test_every_shape_is_recorded_once_and_the_largest_first(graphs):
    assert graphs._recorder.num_recorded == 8
    shapes = graphs.buckets.shapes
    assert shapes[0] == GraphShape(8, 20)
    assert list(shapes) == sorted(shapes, reverse=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8])
def test_a_replayed_step_gives_the_logits_of_an_eager_one(graphs, rows):
    for seed in range(4):
        plan = random_plan(random.Random(seed), PAGE, NUM_BLOCKS, decode=True, rows=rows)
        before = graphs._pool.data.clone()
        want = eager(graphs, plan)
        after = graphs._pool.data.clone()
        graphs._pool.data.copy_(before)
        got = graphs.run(plan)
        assert got is not None
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-12
        # Padding writes to block 0, which nobody owns, and nowhere else.
        assert (graphs._pool.data[1:] - after[1:]).abs().max() < 1e-12
    assert graphs.num_replays == 4


def test_recording_writes_to_block_0_only():
    model = tiny_on_device()
    pool = KVPool(model.layout, 8, PAGE)
    DecodeGraphs(model, pool, GraphBuckets((1, 4), (2,)), FakeRecorder()).record()
    assert not pool.data[1:].any()


def test_all_recordings_put_their_logits_into_one_tensor(graphs):
    recorded = graphs._recorded.values()
    assert len({one.logits.data_ptr() for one in recorded}) == 1
    assert {one.logits.untyped_storage().nbytes() for one in recorded} == {
        8 * graphs._model.vocab_size * 8
    }
    assert all(one.logits.shape[0] == shape.rows for shape, one in graphs._recorded.items())


def test_nan_in_block_0_stays_with_the_padding(graphs):
    graphs._pool.data[0] = float("nan")
    plan = random_plan(random.Random(5), PAGE, NUM_BLOCKS, decode=True, rows=3)
    logits = graphs.run(plan)
    assert logits is not None
    assert logits.isfinite().all()


def one(first, count=1, sample=True):
    blocks = tuple(range(1, 2 + (first + count) // PAGE))
    return Chunk(
        request_id=f"{first}",
        first_token=first,
        token_ids=(1,) * count,
        blocks=blocks,
        sample=sample,
    )


@pytest.mark.parametrize(
    ("chunks", "shape"),
    [
        ([one(3)], GraphShape(1, 4)),
        ([one(63)], GraphShape(1, 4)),
        ([one(64)], GraphShape(1, 20)),
        ([one(3)] * 3, GraphShape(4, 4)),
        ([one(319), one(3)], GraphShape(2, 20)),
        ([one(320)], None),  # longer than any table recorded
        ([one(3)] * 9, None),  # more rows than any
        ([one(3), one(0, count=5)], None),  # a prompt
        ([one(3), one(0, sample=False)], None),  # a prompt's last but one token
        ([], None),
    ],
)
def test_the_smallest_shape_that_holds_the_step_is_chosen(chunks, shape):
    buckets = GraphBuckets((1, 2, 4, 8), (4, 20))
    assert buckets.choose(StepPlan(chunks=tuple(chunks)), PAGE) == shape


def test_steps_that_no_recording_holds_are_left_to_the_caller(graphs):
    assert graphs.run(StepPlan(chunks=(one(0, count=5),))) is None
    assert graphs.num_replays == 0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 60, 64, 100, 256, 1000])
def test_row_buckets_reach_the_most_and_pad_little(most):
    sizes = row_buckets(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for wanted in range(1, most + 1):
        padded = min(size for size in sizes if size >= wanted)
        assert padded - wanted < max(8, wanted / 8)
    assert len(sizes) < 60


@pytest.mark.parametrize("most", [1, 3, 4, 16, 128, 512])
def test_column_buckets_reach_the_most(most):
    widths = column_buckets(most)
    assert widths[-1] == most
    assert list(widths) == sorted(set(widths))
    assert len(widths) <= 5


def test_what_a_recording_is_given_says_nothing_of_the_step_it_will_serve(graphs):
    """Host values are baked in: they must bound every step."""
    seen: list[StepContext] = []
    model = graphs._model

    class Spy:
        device, layout = model.device, model.layout

        def forward(self, ids, positions, pool, step):
            seen.append(step)
            return model.forward(ids, positions, pool, step)

    DecodeGraphs(Spy(), graphs._pool, GraphBuckets((4,), (20,)), FakeRecorder()).record()
    assert [(s.max_q, s.max_k, s.uniform_q) for s in seen] == [(1, 20 * PAGE, 1)]
    assert seen[0].k_lens == (20 * PAGE,) * 4
