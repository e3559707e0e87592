"""Micro-batches: the plan, in pieces that stages can compute one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.execution.micro import MIN_PROMPT_TOKENS, micro_batches
from engine.scheduling.plan import Chunk, StepPlan


def chunk(name, size, first=0, sample=True):
    return Chunk(
        request_id=name,
        first_token=first,
        token_ids=tuple(range(first, first + size)),
        blocks=tuple(range(-(-(first + size) // 8))),
        sample=sample,
    )


def plan(*sizes):
    return StepPlan(chunks=tuple(chunk(f"r{i}", n, first=3 * i) for i, n in enumerate(sizes)))


def sizes(batches):
    return [[len(c.token_ids) for c in batch] for batch in batches]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 4))
def test_the_pieces_are_the_plan(lengths, stages):
    whole = plan(*lengths)
    batches = micro_batches(whole, stages)
    assert all(batches)
    assert len(batches) <= 2 * stages + 1
    pieces = [piece for batch in batches for piece in batch]
    for original in whole.chunks:
        mine = [p for p in pieces if p.request_id == original.request_id]
        assert sum((p.token_ids for p in mine), ()) == original.token_ids
        assert [p.first_token for p in mine] == [p.token_ids[0] for p in mine]
        assert [p.sample for p in mine] == [False] * (len(mine) - 1) + [True]
        assert all(len(p.token_ids) >= MIN_PROMPT_TOKENS for p in mine) or len(mine) == 1
        assert all(p.blocks == original.blocks for p in mine)
    assert [p.request_id for p in pieces] == sorted(
        (p.request_id for p in pieces), key=lambda name: int(name[1:])
    )


def test_one_stage_computes_the_step_whole():
    whole = plan(256, 1, 1)
    assert micro_batches(whole, 1) == [whole.chunks]


def test_decoding_gives_each_stage_one_batch():
    assert sizes(micro_batches(plan(*[1] * 7), 2)) == [[1] * 4, [1] * 3]


def test_a_long_prompt_gives_two_a_stage():
    assert sizes(micro_batches(plan(256), 2)) == [[64], [64], [64], [64]]


def test_a_short_prompt_is_not_cut():
    assert sizes(micro_batches(plan(40), 2)) == [[40]]
