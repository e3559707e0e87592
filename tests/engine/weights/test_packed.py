"""Checkpoints of GPTQ, AWQ and compressed-tensors, packed here as the formats are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.load import load_model
from engine.weights.load import load_checkpoint

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 2, 16, 40
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MODULES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PARTS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


class Random:
    """Integers, scales, zeros and groups of one matrix, and the weight that they stand for."""

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        group: int,
        *,
        symmetric: bool,
        act_order: bool,
        seed: int,
    ) -> None:
        random = np.random.default_rng(seed)
        out, size = shape
        self.groups = -(-size // group)
        self.codes = random.integers(0, 1 << bits, (out, size))
        self.scales = (random.random((out, self.groups)) / 50).astype(np.float16)
        self.zeros = np.full((out, self.groups), 1 << (bits - 1))
        if not symmetric:
            # 0 cannot be written as one less in GPTQ's first format.
            self.zeros = random.integers(1, 1 << bits, (out, self.groups))
        self.group_of = np.arange(size) // group
        if act_order:
            # All inputs of one model have the same order: that of their activations.
            self.group_of = self.group_of[np.random.default_rng(9).permutation(size)]

    @property
    def weight(self) -> Tensor:
        scales = self.scales.astype(np.float32)[:, self.group_of]
        return torch.from_numpy((self.codes - self.zeros[:, self.group_of]) * scales).float()


def words(values: np.ndarray, bits: int, axis: int) -> Tensor:
    """Numbers along an axis into words of 32 bits, the first in the low bits."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint64)
    per_word = 32 // bits
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    grouped = moved.reshape(*moved.shape[:-1], -1, per_word)
    packed = np.zeros(grouped.shape[:-1], dtype=np.uint64)
    for i in range(per_word):
        packed |= grouped[..., i] << np.uint64(bits * i)
    signed = np.moveaxis(packed.astype(np.uint32), -1, axis).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(signed))


def gptq(m: Random, bits: int, less: int) -> dict[str, Tensor]:
    return {
        "qweight": words(m.codes.T, bits, 0),
        "qzeros": words(m.zeros.T - less, bits, 1),
        "scales": torch.from_numpy(np.ascontiguousarray(m.scales.T)),
        "g_idx": torch.from_numpy(m.group_of.astype(np.int32)),
    }


def awq(m: Random) -> dict[str, Tensor]:
    def pack(values: np.ndarray) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        packed = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
        for column in range(packed.shape[1]):
            for i in range(8):
                nibble = values[:, column * 8 + order[i]].astype(np.uint32)
                packed[:, column] |= nibble << np.uint32(4 * i)
        return torch.from_numpy(packed.view(np.int32))

    return {
        "qweight": pack(m.codes.T),
        "qzeros": pack(m.zeros.T),
        "scales": torch.from_numpy(np.ascontiguousarray(m.scales.T)),
    }


def pack_quantized(m: Random, bits: int, *, symmetric: bool, act_order: bool) -> dict[str, Tensor]:
    parts = {
        "weight_packed": words(m.codes, bits, 1),
        "weight_scale": torch.from_numpy(m.scales),
        "weight_shape": torch.tensor(m.codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(m.zeros, bits, 0)
    if act_order:
        parts["weight_g_idx"] = torch.from_numpy(m.group_of.astype(np.int32))
    return parts


def int_quantized(m: Random) -> dict[str, Tensor]:
    return {
        "weight": torch.from_numpy((m.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(m.scales),
    }


def compressed(bits: int, group: int | None, stored: str = "pack-quantized") -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def gptq_section(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


AWQ_SECTION = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "gptq": ({"bits": 4, "group": 32}, gptq_section(4, 32), lambda m: gptq(m, 4, 1)),
    "gptq symmetric": (
        {"bits": 4, "group": 32, "symmetric": True},
        gptq_section(4, 32),
        lambda m: gptq(m, 4, 1),
    ),
    "gptq in order of activations": (
        {"bits": 4, "group": 32, "act_order": True},
        gptq_section(4, 32, desc_act=True),
        lambda m: gptq(m, 4, 1),
    ),
    "gptq v2": (
        {"bits": 4, "group": 32},
        gptq_section(4, 32, checkpoint_format="gptq_v2"),
        lambda m: gptq(m, 4, 0),
    ),
    "gptq 8 bits": ({"bits": 8, "group": 32}, gptq_section(8, 32), lambda m: gptq(m, 8, 1)),
    "gptq one group": (
        {"bits": 4, "group": 1000},
        gptq_section(4, -1),
        lambda m: gptq(m, 4, 1),
    ),
    "gptq small groups": ({"bits": 4, "group": 16}, gptq_section(4, 16), lambda m: gptq(m, 4, 1)),
    "awq": ({"bits": 4, "group": 32}, AWQ_SECTION, awq),
    "compressed-tensors": (
        {"bits": 4, "group": 32, "symmetric": True},
        compressed(4, 32),
        lambda m: pack_quantized(m, 4, symmetric=True, act_order=False),
    ),
    "compressed-tensors asymmetric in order": (
        {"bits": 4, "group": 32, "act_order": True},
        compressed(4, 32),
        lambda m: pack_quantized(m, 4, symmetric=False, act_order=True),
    ),
    "compressed-tensors 8 bits a channel": (
        {"bits": 8, "group": 1000, "symmetric": True},
        compressed(8, None),
        lambda m: pack_quantized(m, 8, symmetric=True, act_order=False),
    ),
    "compressed-tensors int8": (
        {"bits": 8, "group": 1000, "symmetric": True},
        compressed(8, None, "int-quantized"),
        int_quantized,
    ),
}


def write(
    path: Path, form: dict[str, Any], section: dict[str, Any], pack: Any
) -> dict[str, Tensor]:
    """A checkpoint; returns the weights by our names, float32."""
    g = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=g),
        "model.norm.weight": 1 + torch.rand(HIDDEN, generator=g),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=g) / 8,
    }
    weights = {
        "embed": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
        "head": state["lm_head.weight"],
    }
    options = {"symmetric": False, "act_order": False} | form
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm, part in (("input_layernorm", "attn"), ("post_attention_layernorm", "mlp")):
            state[f"{at}.{norm}.weight"] = 1 + torch.rand(HIDDEN, generator=g)
            weights[f"layers.{layer}.{part}_norm"] = state[f"{at}.{norm}.weight"]
        for seed, (module, shape) in enumerate(MODULES.items()):
            m = Random(shape, seed=100 * layer + seed, **options)
            weights[f"layers.{layer}.{PARTS[module]}"] = m.weight
            for part, tensor in pack(m).items():
                state[f"{at}.{module}.{part}"] = tensor
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "m.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": section}))
    (path / "tokenizer.json").write_text("{}")
    return weights


@pytest.mark.parametrize("case", CASES)
def test_every_matrix_is_read_without_loss_and_kept_as_codes(tmp_path: Path, case: str):
    form, section, pack = CASES[case]
    weights = write(tmp_path, form, section, pack)
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    assert set(checkpoint.tensors) == set(weights)
    for name, want in weights.items():
        assert torch.equal(checkpoint.tensors[name], want), name
    kept = (
        set()
        if case == "gptq small groups"
        else {f"layers.{layer}.{part}" for layer in range(2) for part in PARTS.values()}
    )
    assert set(checkpoint.coded) == kept
    for name in kept:
        coded = checkpoint.coded[name]
        assert coded.bits == form["bits"]
        assert (coded.minimums is None) == bool(form.get("symmetric"))
        assert torch.equal(coded.expand(torch.float32), weights[name]), name


@pytest.mark.parametrize("case", CASES)
def test_a_kept_checkpoint_says_what_its_weights_say(tmp_path: Path, case: str):
    from engine.models.decoder import Decoder
    from engine.native.library import native_available

    form, section, pack = CASES[case]
    weights = write(tmp_path, form, section, pack)
    options = {"name": "m", "source": str(tmp_path), "dtype": "float64"}
    backend = "torch" if native_available("float64") else "native"
    model = load_model(ModelConfig(**options, backend=backend))
    architecture = load_checkpoint(str(tmp_path), torch.float64).architecture
    plain = {name: weight.double() for name, weight in weights.items()}
    want = Decoder(architecture, plain, dtype=torch.float64, fingerprint="")
    assert (logits(model) - logits(want)).abs().max() < 1e-10


def logits(model: Any) -> Tensor:
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool
    from engine.scheduling.plan import Chunk, StepPlan

    chunk = Chunk(request_id="a", first_token=0, token_ids=(3, 1, 4, 15), blocks=(1,), sample=True)
    flat, positions, step = step_inputs(StepPlan(chunks=(chunk,)), 16)
    return model.forward(flat, positions, KVPool(model.layout, 2, 16), step)


def test_biases_of_nothing_are_passed_over_and_others_are_not(tmp_path: Path):
    from safetensors.torch import load_file

    write(tmp_path, *CASES["gptq"])
    state = load_file(tmp_path / "m.safetensors")
    bias = "model.layers.0.mlp.down_proj.bias"
    save_file(state | {bias: torch.zeros(HIDDEN)}, tmp_path / "m.safetensors")
    assert bias not in load_checkpoint(str(tmp_path), torch.float32).tensors
    save_file(state | {bias: torch.ones(HIDDEN)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"not part of this architecture: .*down_proj\.bias"):
        load_checkpoint(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported: gptq, awq and"),
        (gptq_section(3, 128), r"bits=3 .* 4 and 8 bits in 'gptq' and 'gptq_v2' are"),
        (gptq_section(4, 128, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (gptq_section(4, 0), "group_size=0"),
        (AWQ_SECTION | {"version": "gemv"}, "version='gemv'"),
        (compressed(4, 32, "float-quantized"), "format='float-quantized'"),
        (compressed(2, 32), "int weights of 2 bits"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(
    tmp_path: Path, section: dict[str, Any], message: str
):
    form, _, pack = CASES["gptq"]
    write(tmp_path, form, section, pack)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(str(tmp_path), torch.float32)


def test_shapes_that_are_not_what_the_configuration_says_are_refused(tmp_path: Path):
    form, _, pack = CASES["gptq"]
    write(tmp_path, form, gptq_section(8, 32), pack)
    with pytest.raises(ConfigError, match=r"qweight is .* expected"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_a_matrix_without_all_of_its_parts_is_named(tmp_path: Path):
    from safetensors.torch import load_file

    write(tmp_path, *CASES["awq"])
    state = load_file(tmp_path / "m.safetensors")
    del state["model.layers.1.mlp.up_proj.qzeros"]
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj is quantised .* 'qzeros'"):
        load_checkpoint(str(tmp_path), torch.float32)
