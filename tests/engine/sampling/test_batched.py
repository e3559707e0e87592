"""Rows sampled together on a device get the tokens that the sampler gives them one by one."""

import math

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import batched
from engine.sampling.batched import BatchedSampler
from engine.sampling.sampler import Sampler, UnusableLogits

VOCAB = 301
EOS = (0, 1)
WISHES = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2**64 - 1, "temperature": 1.7},
    {"seed": 3, "top_k": 20},
    {"seed": 4, "top_p": 0.8},
    {"seed": 5, "temperature": 0.3},
    {"seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"seed": 7, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 1},
    {"seed": 8, "logit_bias": ((9, 4.0), (11, -100.0))},
    {"temperature": 0.0, "logit_bias": ((0, 50.0),), "min_tokens": 20},
    {"seed": 9, "logit_bias": ((1, 50.0),), "min_tokens": 20},
]


def samplers(wishes):
    made = Sampler(VOCAB, EOS), BatchedSampler(VOCAB, EOS)
    for sampler in made:
        for i, wish in enumerate(wishes):
            params = SamplingParams(max_tokens=1000, **wish)
            sampler.enter(f"r{i}", params, (5, 6, 7), 3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_mixture_of_wishes_gives_the_same_tokens(dtype):
    plain, together = samplers(WISHES)
    ids = [f"r{i}" for i in range(len(WISHES))]
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        logits = (torch.randn(len(ids), VOCAB, generator=generator) * 2).to(dtype)
        positions = [3 + step] * len(ids)
        assert together.sample(logits, ids, positions) == plain.sample(logits, ids, positions)


def test_races_in_several_parts_are_one(monkeypatch):
    monkeypatch.setattr(batched, "_ELEMENTS_AT_ONCE", 2 * VOCAB)
    plain, together = samplers([{"seed": i} for i in range(7)])
    ids = [f"r{i}" for i in range(7)]
    logits = torch.randn(7, VOCAB)
    assert together.sample(logits, ids, [9] * 7) == plain.sample(logits, ids, [9] * 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_unusable_row_is_named_and_nothing_is_counted(bad):
    wishes = [{"seed": 1}, {"seed": 2}, {"seed": 3, "frequency_penalty": 2.0}]
    plain, together = samplers(wishes)
    logits = torch.randn(3, VOCAB)
    broken = logits.clone()
    broken[1, :] = bad
    with pytest.raises(UnusableLogits) as failed:
        together.sample(broken, ["r0", "r1", "r2"], [4, 4, 4])
    assert failed.value.request_id == "r1"
    rest = logits[[0, 2]]
    assert together.sample(rest, ["r0", "r2"], [4, 4]) == plain.sample(rest, ["r0", "r2"], [4, 4])


def test_a_step_without_rows_samples_nothing():
    _, together = samplers([])
    assert together.sample(torch.empty(0, VOCAB), [], []) == []
