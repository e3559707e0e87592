import dataclasses

import pytest

from engine.errors import ConfigError
from engine.models.architecture import Architecture, Llama3Scaling, Rope

SMALL = Architecture(
    name="llama",
    vocab_size=10,
    hidden_size=8,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=12,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"activation": "relu"}, "'relu'"),
        ({"window": 0}, "window=0"),
        ({"eos_token_ids": (3, 10)}, "eos_token_ids holds 10: must lie below vocab_size=10"),
        ({"bos_token_id": -1}, "bos_token_id holds -1"),
    ],
)
def test_an_impossible_shape_is_refused_by_name_and_value(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)


def test_an_impossible_rope_is_refused():
    with pytest.raises(ConfigError, match=r"theta=0\.0"):
        Rope(theta=0.0)
    with pytest.raises(ConfigError, match="low < high"):
        Llama3Scaling(
            factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_context_tokens=8192
        )


def test_every_canonical_tensor_is_listed_with_its_shape():
    whole = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True, tied_embeddings=False)
    assert whole.tensor_shapes() == {
        "embed": (10, 8),
        "layers.0.attn_norm": (8,),
        "layers.0.q": (24, 8),
        "layers.0.k": (12, 8),
        "layers.0.v": (12, 8),
        "layers.0.o": (8, 24),
        "layers.0.mlp_norm": (8,),
        "layers.0.gate": (12, 8),
        "layers.0.up": (12, 8),
        "layers.0.down": (8, 12),
        "layers.0.q.bias": (24,),
        "layers.0.k.bias": (12,),
        "layers.0.v.bias": (12,),
        "layers.0.q_norm": (6,),
        "layers.0.k_norm": (6,),
        "norm": (8,),
        "head": (10, 8),
    }
    assert whole.tensor_shapes().keys() - SMALL.tensor_shapes().keys() == {
        *(f"layers.0.{name}" for name in ("q.bias", "k.bias", "v.bias", "q_norm", "k_norm")),
        "head",
    }
