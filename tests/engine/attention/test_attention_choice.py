"""Which attention a device gets, and what is said where there is none."""

from dataclasses import replace
from typing import get_args

import pytest

from engine.attention.capabilities import (
    ATTENTION,
    AttentionName,
    AttentionNeeds,
    Device,
    choose,
    lacks,
)
from engine.errors import ConfigError

H100 = Device(kind="cuda", compute=(9, 0), missing={}, name="H100")
BARE = replace(H100, missing={"flash_attn": "flash-attn is not installed"})
A100 = replace(H100, compute=(8, 0), name="A100")
T4 = replace(H100, compute=(7, 5), name="T4")
CPU = Device(kind="cpu", missing={})
LLAMA = AttentionNeeds(
    dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, block_tokens=256, graphs=True
)


def test_every_backend_has_a_row():
    assert set(ATTENTION) == set(get_args(AttentionName))


@pytest.mark.parametrize(
    ("device", "needs", "name"),
    [
        (H100, LLAMA, "flash"),
        (H100, replace(LLAMA, window=True, softcap=True), "flash"),
        (BARE, LLAMA, "varlen"),
        (BARE, replace(LLAMA, softcap=True), "triton"),
        (BARE, replace(LLAMA, block_tokens=16), "triton"),
        (BARE, replace(LLAMA, block_tokens=16, graphs=False), "varlen"),
        (H100, replace(LLAMA, block_tokens=16), "triton"),
        (H100, replace(LLAMA, kv_dtype="int8"), "triton"),
        (H100, replace(LLAMA, kv_dtype="float8_e4m3fn"), "triton"),
        (H100, replace(LLAMA, dtype="float32", kv_dtype="float32"), "triton"),
        (H100, replace(LLAMA, head_dim=100), "triton"),
        (CPU, replace(LLAMA, graphs=False), "cpu"),
        (
            CPU,
            replace(LLAMA, dtype="float64", kv_dtype="float64", block_tokens=7, graphs=False),
            "cpu",
        ),
    ],
)
def test_the_first_that_does_all_of_it_is_taken(device, needs, name):
    assert choose(device, needs) == name


@pytest.mark.parametrize(
    ("device", "needs", "name", "reason"),
    [
        (H100, replace(LLAMA, block_tokens=16), "flash", "block_tokens=16 (only multiples of 256)"),
        (H100, replace(LLAMA, head_dim=320), "flash", "heads of 320 (only multiples of 8 up to"),
        (H100, replace(LLAMA, kv_dtype="int8"), "flash", "KV in int8 (only bfloat16)"),
        (H100, replace(LLAMA, softcap=True), "varlen", "soft-capped scores"),
        (
            H100,
            replace(LLAMA, block_tokens=16),
            "varlen",
            "CUDA graphs with block_tokens=16 (only multiples of 256)",
        ),
        (BARE, LLAMA, "flash", "flash-attn is not installed"),
        (T4, LLAMA, "triton", "needs compute capability 8.0, T4 has 7.5"),
        (
            A100,
            replace(LLAMA, kv_dtype="float8_e4m3fn"),
            "triton",
            "KV in float8_e4m3fn below compute capability 8.9 (A100 has 8.0)",
        ),
        (CPU, LLAMA, "flash", "computes on cuda, the device is cpu"),
        (CPU, LLAMA, "cpu", "CUDA graphs"),
        (H100, replace(LLAMA, dtype="float64", kv_dtype="float64"), "triton", "dtype float64"),
    ],
)
def test_what_one_lacks_is_named_and_refused_where_it_is_asked_for(device, needs, name, reason):
    assert reason in (lacks(name, device, needs) or "")
    with pytest.raises(ConfigError) as refused:
        choose(device, needs, name)
    assert reason in str(refused.value)
    assert f"attention={name!r}" in str(refused.value)


def test_a_device_without_any_is_told_the_reason_of_each_and_a_way_out():
    with pytest.raises(ConfigError) as refused:
        choose(T4, LLAMA)
    said = str(refused.value)
    assert said.count("needs compute capability 8.0, T4 has 7.5") == 3
    assert "accelerator: cpu" in said
    nothing = replace(BARE, missing={**BARE.missing, "triton": "Triton is not installed"})
    with pytest.raises(ConfigError, match="256, install triton, or set cuda_graphs: false"):
        choose(nothing, replace(LLAMA, block_tokens=16))
