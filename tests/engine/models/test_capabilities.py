"""What a backend lacks is said at start-up, with what there is instead."""

import logging
import math
from dataclasses import replace
from typing import get_args

import pytest

from engine.config import DType, ModelConfig
from engine.errors import ConfigError
from engine.models import capabilities
from engine.models.architecture import Activation
from engine.models.capabilities import CAPABILITIES, BackendName, lacks
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.tiny import TINY_ARCHITECTURE
from engine.native.library import native_available

EVERYTHING = replace(TINY_ARCHITECTURE, window=8, qk_norm=True, qkv_bias=True)


def test_every_backend_has_a_row():
    assert set(CAPABILITIES) == set(get_args(BackendName))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_both_backends_compute_every_family_in_every_dtype(backend):
    for dtype in set(get_args(DType)) - {"auto"}:
        for activation in get_args(Activation):
            assert lacks(backend, replace(EVERYTHING, activation=activation), dtype) is None


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_both_backends_keep_kv_in_the_dtype_of_activations_or_as_codes(backend, dtype):
    for kv_dtype in ("auto", dtype, "int8"):
        assert lacks(backend, EVERYTHING, dtype, kv_dtype) is None
    other = "float64" if dtype == "float32" else "float32"
    assert lacks(backend, EVERYTHING, dtype, other) == (
        f"{backend} does not compute kv_dtype {other} with activations in {dtype}: "
        f"only {dtype}, int8"
    )


def test_only_gpus_keep_kv_in_fp8():
    assert lacks("gpu", EVERYTHING, "bfloat16", "fp8") is None
    for backend in ("native", "torch"):
        assert "kv_dtype fp8 with activations in float32: only float32, int8" in str(
            lacks(backend, EVERYTHING, "float32", "fp8")
        )


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_codes_need_heads_behind_which_their_scales_are_aligned(backend):
    odd = replace(EVERYTHING, head_dim=10)
    assert lacks(backend, odd, "float32") is None
    assert "int8 for heads of 10: only multiples of 4" in str(
        lacks(backend, odd, "float32", "int8")
    )


@pytest.fixture
def poorer(monkeypatch):
    """Replaces columns of one backend's row."""

    def change(backend, **columns):
        row = replace(CAPABILITIES[backend], **columns)
        monkeypatch.setattr(capabilities, "CAPABILITIES", {**CAPABILITIES, backend: row})

    return change


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"dtypes": ("float32",)}, "torch does not compute dtype float64: only float32"),
        ({"activations": ("gelu_tanh",)}, "activation silu: only gelu_tanh"),
        ({"window": False}, "sliding windows"),
        ({"qk_norm": False}, "norms of q and k"),
        ({"qkv_bias": False}, "biases of q, k and v"),
    ],
)
def test_each_thing_a_backend_lacks_is_named(poorer, columns, message):
    poorer("torch", **columns)
    assert message in lacks("torch", EVERYTHING, "float64")


def test_a_model_that_no_backend_computes_is_refused_with_the_reason(poorer):
    poorer("torch", dtypes=("bfloat16",))
    with pytest.raises(ConfigError, match=r"dtype float64: only bfloat16: use a model, dtype"):
        load_model(ModelConfig(name="m", source="tiny"))


@pytest.mark.parametrize(
    ("source", "kv_dtype", "message"),
    [
        ("tiny", "int8", r"kv_dtype int8 with activations in float64: only float64: use a model"),
        ("tiny", "bfloat16", r"kv_dtype bfloat16 with activations in float64"),
        ("fake", "int8", r"kv_dtype='int8': the fake model's KV holds token ids in float64"),
    ],
)
def test_kv_that_no_backend_keeps_is_refused_with_the_reason(poorer, source, kv_dtype, message):
    poorer("torch", kv_dtypes=())
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(name="m", source=source, kv_dtype=kv_dtype))


@pytest.mark.skipif(native_available("float32") is not None, reason="not built")
def test_what_native_lacks_goes_to_torch_or_is_refused_where_native_is_asked_for(poorer, caplog):
    poorer("native", dtypes=("bfloat16",))
    assert isinstance(load_model(ModelConfig(name="m", source="tiny", dtype="float32")), Decoder)
    assert "dtype float32: only bfloat16" in caplog.text
    with pytest.raises(ConfigError, match="'native': native does not compute dtype float32"):
        load_model(ModelConfig(name="m", source="tiny", dtype="float32", backend="native"))


@pytest.mark.skipif(native_available("float64") is not None, reason="not built")
def test_start_up_says_how_weights_are_kept(caplog):
    with caplog.at_level(logging.INFO):
        model = load_model(
            ModelConfig(name="m", source="tiny", backend="native", quantisation="int8")
        )
        plain = load_model(ModelConfig(name="m", source="tiny", backend="native"))
        load_model(ModelConfig(name="m", source="tiny", backend="torch", quantisation="int8"))
    assert model.num_matrices == model.num_coded == 7 * TINY_ARCHITECTURE.num_layers + 1
    assert plain.num_coded == 0
    weights = sum(
        math.prod(shape)
        for name, shape in TINY_ARCHITECTURE.tensor_shapes().items()
        if len(shape) == 2 and name != "embed"
    )
    # A byte a code and two for the scale of each 32, instead of float64.
    assert plain.weight_bytes - model.weight_bytes == weights * (8 - (1 + 2 / 32))
    first, _, third = (record.message for record in caplog.records)
    assert "22 of 22 matrices as codes" in first
    assert "expanded to float64" in third
