"""Recipes that no checkpoint can follow are refused with what can."""

import pytest

from engine.errors import ConfigError
from engine.models.architecture import Architecture, Rope
from engine.models.tiny import TINY_ARCHITECTURE
from engine.quantisation.recipe import Recipe

SMOL = Architecture(
    name="llama",
    vocab_size=100,
    hidden_size=576,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "smoothquant"}, r"method='smoothquant': must be one of gptq, awq, rtn"),
        ({"method": "gptq", "bits": 3}, r"bits=3: must be one of 4, 8"),
        ({"method": "gptq", "group": 48}, r"group=48: must be a multiple of 32, or -1"),
        ({"method": "gptq", "group": 0}, r"group=0: "),
        ({"method": "gptq", "order": "random"}, r"order='random': must be one of off, static"),
        ({"method": "awq", "bits": 8}, r"bits=8: AWQ's format has 4 bits only: use gptq or rtn"),
        ({"method": "gptq", "damping": 0.0}, r"damping=0\.0: must be above 0"),
        ({"method": "gptq", "correction": 2.0}, r"correction=2\.0: must be 0 to 1"),
        ({"method": "gptq", "sweeps": -1}, r"sweeps=-1"),
        ({"method": "awq", "order": "groups", "feedback": True}, r"no place for it"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(options, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)


def test_a_group_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(
        ConfigError, match=r"group=128 does not divide the 576 inputs of q, .*: 32, 64, 96, 192"
    ):
        Recipe(method="gptq", group=128).check(SMOL)
    for group in (32, 64, -1):
        Recipe(method="gptq", group=group).check(SMOL)
        Recipe(method="awq", group=group).check(TINY_ARCHITECTURE)


def test_outputs_that_fill_no_word_are_refused():
    from dataclasses import replace

    odd = replace(SMOL, num_heads=9, num_kv_heads=9, head_dim=2, hidden_size=64)
    with pytest.raises(ConfigError, match=r"inputs of o"):
        Recipe(method="gptq", group=-1).check(odd)


@pytest.mark.parametrize(
    ("options", "scales", "feedback", "calibrated"),
    [
        ({"method": "gptq"}, False, True, True),
        ({"method": "gptq", "scales": True}, True, True, True),
        ({"method": "awq"}, True, False, True),
        ({"method": "awq", "feedback": True}, True, True, True),
        ({"method": "rtn", "scales": True, "feedback": True}, False, False, False),
    ],
)
def test_what_each_method_does(options, scales, feedback, calibrated):
    recipe = Recipe(**options)
    assert (recipe.awq_scales, recipe.gptq_choice, recipe.calibrated) == (
        scales,
        feedback,
        calibrated,
    )
