from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.models.architecture import Llama3Scaling, Rope
from engine.weights.checkpoint import part
from engine.weights.load import load_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=32
)

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}, {"rope": Rope(theta=1e6, llama3=SCALING)}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 16}, {"window": 16}),
    "mistral without window": ("mistral", {"sliding_window": None}, {"window": None}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-5}, {"qkv_bias": True, "norm_eps": 1e-5}),
    "qwen3": ("qwen3", {"head_dim": 16}, {"qk_norm": True, "head_dim": 16}),
}


def save_model(path: Path, family: str, changes: dict[str, Any], **save: Any) -> dict[str, Any]:
    """A random model as transformers saves it, with a tokenizer.json. Returns its state dict."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SMALL | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()  # norms and biases too: they start as ones and zeros
    model.save_pretrained(path, **save)
    (path / "tokenizer.json").write_text("{}")
    return model.state_dict()


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


@pytest.mark.parametrize(("family", "changes", "expected"), FAMILIES.values(), ids=FAMILIES)
def test_a_model_saved_by_transformers_is_read(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: dict[str, Any]
):
    state = save_model(tmp_path, family, changes)
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    architecture = checkpoint.architecture
    assert (architecture.name, architecture.num_layers, architecture.num_kv_heads) == (family, 2, 2)
    assert (architecture.eos_token_ids, architecture.bos_token_id) == ((2,), 1)
    assert {name: getattr(architecture, name) for name in expected} == expected
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    assert shapes == architecture.tensor_shapes()
    assert torch.equal(checkpoint.tensors["embed"], state["model.embed_tokens.weight"])
    assert torch.equal(checkpoint.tensors["norm"], state["model.norm.weight"])
    for name, stored in (
        ("q", "self_attn.q_proj.weight"),
        ("o", "self_attn.o_proj.weight"),
        ("down", "mlp.down_proj.weight"),
        ("attn_norm", "input_layernorm.weight"),
        ("mlp_norm", "post_attention_layernorm.weight"),
        ("k.bias", "self_attn.k_proj.bias"),
        ("k_norm", "self_attn.k_norm.weight"),
    ):
        if f"model.layers.1.{stored}" in state:
            ours = checkpoint.tensors[f"layers.1.{name}"]
            assert torch.equal(ours, state[f"model.layers.1.{stored}"]), name
    half = load_checkpoint(str(tmp_path), torch.bfloat16).tensors["layers.0.gate"]
    assert torch.equal(half, state["model.layers.0.mlp.gate_proj.weight"].bfloat16())


def test_parts_are_read_alone_and_are_those_of_the_whole(tmp_path: Path):
    save_model(tmp_path, "qwen2", {})
    for dtype in (torch.float32, torch.bfloat16):
        tensors = load_checkpoint(str(tmp_path), dtype).tensors
        for name, whole in tensors.items():
            size = whole.shape[0]
            rows = part(tensors, name, 0, (size // 3, size))
            assert torch.equal(rows, whole[size // 3 :]), name
            if whole.ndim == 2:
                columns = part(tensors, name, 1, (3, 10))
                assert columns.is_contiguous()
                assert torch.equal(columns, whole[:, 3:10]), name


def test_shards_are_read_through_their_index(tmp_path: Path):
    state = save_model(tmp_path, "llama", {}, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    assert torch.equal(
        checkpoint.tensors["layers.1.up"], state["model.layers.1.mlp.up_proj.weight"]
    )
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_checkpoint(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            },
            Rope(theta=1e6, llama3=SCALING),
        ),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "default"}}, Rope(theta=2e4)),
        ({}, Rope(theta=1e4)),
    ],
)
def test_the_rope_of_older_configs_is_read(tmp_path: Path, old: dict[str, Any], expected: Rope):
    save_model(tmp_path, "llama", {})
    edit_config(tmp_path, rope_parameters="absent", **old)
    assert load_checkpoint(str(tmp_path), torch.float32).architecture.rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "not complete.*factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "window"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"eos_token_id": 99}, "eos_token_ids holds 99"),
        ({"num_hidden_layers": 3}, r"missing: layers\.2\.attn_norm"),
        ({"num_hidden_layers": 1}, r"not part of this architecture: layers\.1\."),
        ({"intermediate_size": 50}, r"gate is \[48, 32\], expected \[50, 32\]"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    save_model(tmp_path, "llama", {})
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(str(tmp_path), torch.float32)


def test_surplus_tensors_are_named_and_derived_ones_ignored(tmp_path: Path):
    save_model(tmp_path, "llama", {"tie_word_embeddings": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert "head" not in load_checkpoint(str(tmp_path), torch.float32).tensors
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(32)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_a_tensor_of_another_type_is_named(tmp_path: Path):
    save_model(tmp_path, "llama", {})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is stored as I8"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_a_file_cut_at_any_of_many_offsets_is_refused_with_its_size(tmp_path: Path):
    save_model(tmp_path, "llama", {})
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 991), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"model\.safetensors: cut short.*\b{size}\b"):
            load_checkpoint(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]]",
        b'{"x": {}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": "a", "data_offsets": [0]}}',
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes):
    save_model(tmp_path, "llama", {})
    data = len(header).to_bytes(8, "little") + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors: its header of .* is damaged"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_several_files_need_an_index(tmp_path: Path):
    save_model(tmp_path, "llama", {})
    (tmp_path / "more.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"2 safetensors files and no model\.safetensors\.index"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_the_fingerprint_of_a_directory_ignores_who_reads_it(tmp_path: Path):
    first, second = tmp_path / "a", tmp_path / "b"
    save_model(first, "llama", {})
    save_model(second, "llama", {})
    edit_config(second, eos_token_id=5, transformers_version="4.0.0")
    ours = load_checkpoint(str(first), torch.float32).fingerprint
    assert load_checkpoint(str(second), torch.float32).fingerprint == ours
    edit_config(second, rms_norm_eps=1e-3)
    assert load_checkpoint(str(second), torch.float32).fingerprint != ours
