"""What each rank holds: together everything, and nothing twice that must not be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.models.shard import Grid, even_runs, shards
from engine.models.tiny import TINY_ARCHITECTURE


def architecture(heads=4, kv_heads=2, layers=3, vocab=260, inner=128):
    return replace(
        TINY_ARCHITECTURE,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_layers=layers,
        vocab_size=vocab,
        intermediate_size=inner,
    )


def joined(spans):
    return [i for first, last in spans for i in range(first, last)]


@given(
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 8),
    size=st.integers(1, 16),
    stages=st.integers(1, 5),
    vocab=st.integers(259, 300),
    inner=st.integers(16, 70),
)
def test_all_ranks_together_hold_the_model_once(kv_heads, group, size, stages, vocab, inner):
    a = architecture(kv_heads * group, kv_heads, layers=7, vocab=vocab, inner=inner)
    try:
        parts = shards(a, Grid(tensor_parallel=size, pipeline_parallel=stages))
    except ConfigError:
        assert size > kv_heads
        assert -(-size // kv_heads) > group, "some rank would have no query head"
        return
    assert [part.rank for part in parts] == list(range(size * stages))
    assert joined(parts[i * size].layers for i in range(stages)) == list(range(7))
    for stage in range(stages):
        ranks = parts[stage * size : (stage + 1) * size]
        assert joined(r.heads for r in ranks) == list(range(a.num_heads))
        assert joined(r.owned_kv_heads for r in ranks) == list(range(kv_heads))
        assert joined(r.inner for r in ranks) == list(range(inner))
        assert joined(r.vocab for r in ranks) == list(range(vocab))
        for rank in ranks:
            read = {head // group for head in range(*rank.heads)}
            assert read == set(range(*rank.kv_heads)), "query heads and the KV heads they read"
            assert rank.num_heads % rank.num_kv_heads == 0
            assert rank.vocab[1] - rank.vocab[0] <= rank.vocab_rows
            assert (rank.stage, rank.layers) == (stage, ranks[0].layers)


def test_nine_heads_on_two_ranks_are_six_and_three():
    one, two = shards(architecture(9, 3), Grid(tensor_parallel=2))
    assert (one.heads, one.kv_heads) == ((0, 6), (0, 2))
    assert (two.heads, two.kv_heads) == ((6, 9), (2, 3))


def test_fewer_kv_heads_than_ranks_are_copied_and_owned_once():
    parts = shards(architecture(8, 2), Grid(tensor_parallel=4))
    assert [part.heads for part in parts] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [part.kv_heads for part in parts] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [part.owned_kv_heads for part in parts] == [(0, 1), (0, 0), (1, 2), (1, 1)]


def test_tokens_are_sampled_on_the_first_rank_of_the_last_stage():
    grid = Grid(tensor_parallel=2, pipeline_parallel=3)
    assert (grid.num_ranks, grid.sampling_rank, grid.stage_ranks(1)) == (6, 4, [2, 3])


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (Grid(pipeline_parallel=4), "pipeline_parallel=4.*3 layers"),
        (Grid(tensor_parallel=5), "tensor_parallel=5.*3 ranks cannot share the 2 of one"),
    ],
)
def test_a_rank_that_would_hold_nothing_is_refused_with_the_reason(grid, said):
    with pytest.raises(ConfigError, match=said):
        shards(architecture(4, 2), grid)


def test_a_grid_of_no_ranks_is_refused():
    with pytest.raises(ConfigError, match="tensor_parallel=0"):
        Grid(tensor_parallel=0)


def test_runs_differ_by_one_at_most():
    assert even_runs(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
