"""Quantising layer by layer, and the directory that comes of it."""

import json
from dataclasses import replace

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.architecture import Architecture, Rope
from engine.models.load import load_model
from engine.quantisation.calibration import LayerQuantiser, Moments, embedded
from engine.quantisation.layer import LayerFunction
from engine.quantisation.recipe import Recipe
from engine.quantisation.write import quantise_checkpoint
from engine.weights.checkpoint import Checkpoint
from engine.weights.load import load_checkpoint
from engine.weights.writing import model_config

ARCHITECTURE = Architecture(
    name="qwen2",
    vocab_size=48,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
    tied_embeddings=True,
    qkv_bias=True,
    eos_token_ids=(1,),
)
PARTS = ("q", "k", "v", "o", "gate", "up", "down")


def model(seed=0):
    """Weights, and text that uses a few directions of the embedding more than others."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in ARCHITECTURE.tensor_shapes().items():
        values = torch.randn(shape, generator=g)
        tensors[name] = 1 + values / 4 if len(shape) == 1 else values / shape[-1] ** 0.5
    tensors["embed"] *= torch.exp(torch.randn(64, generator=g)) * 4
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    windows = [torch.randint(0, 48, (40,), generator=g).tolist() for _ in range(12)]
    return Checkpoint(architecture=ARCHITECTURE, tensors=tensors, fingerprint="x"), windows


def layer_of(checkpoint, index):
    at = f"layers.{index}."
    return {n.removeprefix(at): t for n, t in checkpoint.tensors.items() if n.startswith(at)}


def hidden(checkpoint, windows, layers):
    """What comes out of the last layer, of all windows."""
    function = LayerFunction(ARCHITECTURE, torch.float32)
    out = []
    for x in embedded(windows, checkpoint.tensors["embed"]):
        for layer in layers:
            x = function(x, layer)
        out.append(x)
    return torch.cat(out)


def quantised_error(recipe, seed=0):
    checkpoint, windows = model(seed)
    layers = [layer_of(checkpoint, i) for i in range(2)]
    streams = embedded(windows, checkpoint.tensors["embed"])
    quantiser = LayerQuantiser(ARCHITECTURE, recipe, streams, stored=torch.bfloat16)
    changed = []
    for i, layer in enumerate(layers):
        plain, matrices, measured = quantiser.quantise(i, layer)
        known = PARTS if recipe.calibrated else ()
        assert [m.name for m in measured] == [f"layers.{i}.{part}" for part in known]
        assert all(0 < m.error < 0.1 for m in measured)
        changed.append(plain | {p: m.expand(torch.float32) for p, m in matrices.items()})
    want = hidden(checkpoint, windows, layers)
    got = hidden(checkpoint, windows, changed)
    return float((got - want).square().mean() / want.square().mean())


def test_each_step_of_the_method_brings_the_model_nearer():
    rtn = quantised_error(Recipe(method="rtn", group=32))
    awq = quantised_error(Recipe(method="awq", group=32))
    plain = quantised_error(Recipe(method="gptq", group=32, sweeps=0, order="off"))
    swept = quantised_error(Recipe(method="gptq", group=32, sweeps=2))
    both = quantised_error(Recipe(method="gptq", group=32, sweeps=2, scales=True))
    assert awq < rtn
    assert plain < 0.8 * rtn
    assert swept < plain
    assert both < 0.6 * rtn
    eight = quantised_error(Recipe(method="gptq", bits=8, group=32))
    assert eight < 0.01 * rtn


def test_what_layers_before_have_changed_is_made_good():
    without = quantised_error(Recipe(method="gptq", group=32, sweeps=1))
    half = quantised_error(Recipe(method="gptq", group=32, sweeps=1, correction=0.5))
    assert half < without


def test_moments_are_means_over_tokens():
    g = torch.Generator().manual_seed(1)
    first, second = torch.randn(5, 8, generator=g), torch.randn(7, 8, generator=g)
    moments = Moments(8)
    moments.add(first)
    moments.add(second)
    both = torch.cat((first, second))
    assert torch.allclose(moments.hessian, both.T @ both / 12, atol=1e-6)
    assert torch.allclose(moments.magnitude, both.abs().mean(0), atol=1e-6)


def test_a_corrected_weight_is_the_least_squares_answer():
    g = torch.Generator().manual_seed(2)
    exact, behind = torch.randn(200, 8, generator=g), torch.randn(200, 3, generator=g)
    read = exact + 0.3 * torch.randn(200, 8, generator=g)
    weight = torch.randn(3, 8, generator=g)
    moments = Moments(8)
    moments.add(read[:90], exact[:90], behind[:90])
    moments.add(read[90:], exact[90:], behind[90:])
    want = torch.linalg.lstsq(read, exact @ weight.T + behind).solution.T
    assert torch.allclose(moments.corrected(weight, 1e-9, 1.0), want, atol=1e-4)
    assert torch.equal(moments.corrected(weight, 1e-9, 0.0), weight)
    half = moments.corrected(weight, 1e-9, 0.5)
    assert torch.allclose(half, (weight + want) / 2, atol=1e-4)


RECIPES = {
    "gptq": Recipe(method="gptq", group=32),
    "gptq in order": Recipe(method="gptq", group=32, order="groups", scales=True),
    "gptq 8 bits": Recipe(method="gptq", bits=8, group=32),
    "gptq rows": Recipe(method="gptq", group=-1, symmetric=True),
    "awq": Recipe(method="awq", group=32),
    "awq with feedback": Recipe(method="awq", group=32, feedback=True),
    "rtn": Recipe(method="rtn", group=32),
    "rtn 8 bits": Recipe(method="rtn", bits=8, group=32),
    "rtn 8 bits rows": Recipe(method="rtn", bits=8, group=-1),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_loaded_again_is_what_was_chosen(tmp_path, monkeypatch, name):
    recipe = RECIPES[name]
    checkpoint, windows = model()
    chosen = {}
    original = LayerQuantiser.quantise

    def spy(self, index, layer):
        plain, matrices, measured = original(self, index, layer)
        for part, matrix in matrices.items():
            chosen[f"layers.{index}.{part}"] = matrix
        chosen.update({f"layers.{index}.{part}": tensor for part, tensor in plain.items()})
        return plain, matrices, measured

    monkeypatch.setattr(LayerQuantiser, "quantise", spy)
    seen = []
    written = quantise_checkpoint(
        checkpoint,
        windows,
        recipe,
        tmp_path,
        config=model_config(ARCHITECTURE, torch.bfloat16),
        stored=torch.bfloat16,
        quantiser="test:1",
        progress=lambda done, of, measured: seen.append((done, of, len(measured))),
    )
    known = 7 if recipe.calibrated else 0
    assert seen == [(1, 2, known), (2, 2, known)]
    assert "tied" in written.kept[0]
    assert written.num_bytes < written.num_bytes_before
    (tmp_path / "tokenizer.json").write_text("{}")
    again = load_checkpoint(str(tmp_path), torch.float32)
    assert replace(again.architecture) == ARCHITECTURE
    kept_in = torch.bfloat16 if recipe.method == "rtn" else torch.float16
    for layer in range(2):
        for part in PARTS:
            at = f"layers.{layer}.{part}"
            want = chosen[at]
            assert torch.equal(again.tensors[at], want.expand(torch.float32)), at
            coded = again.coded[at]
            assert coded.bits == recipe.bits
            assert torch.equal(coded.expand(torch.float32), want.expand(torch.float32)), at
        for part in ("attn_norm", "mlp_norm", "q.bias", "k.bias", "v.bias"):
            at = f"layers.{layer}.{part}"
            assert torch.equal(again.tensors[at], chosen[at].to(kept_in).float()), at
    for top in ("embed", "norm"):
        want = checkpoint.tensors[top].to(kept_in).float()
        assert torch.equal(again.tensors[top], want), top
    loaded = load_model(ModelConfig(name="m", source=str(tmp_path), dtype="float32"))
    assert loaded.vocab_size == 48
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    expected = {"gptq": "gptq", "awq": "awq", "rtn": "compressed-tensors"}
    assert section["quant_method"] == expected[recipe.method]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_scales_are_of_the_models_own_type_and_come_back_as_they_were(
    tmp_path, stored, bits
):
    """Codes are chosen for the scales that are stored, so that nothing is rounded after them."""
    from safetensors.torch import load_file

    checkpoint, windows = model()
    quantise_checkpoint(
        checkpoint,
        windows,
        Recipe(method="rtn", bits=bits, group=32),
        tmp_path,
        config=model_config(ARCHITECTURE, stored),
        stored=stored,
        quantiser="test:1",
        progress=lambda done, of, measured: None,
    )
    state = load_file(tmp_path / "model.safetensors")
    floats = {name: t.dtype for name, t in state.items() if t.is_floating_point()}
    assert set(floats.values()) == {stored}
    assert sum(name.endswith("weight_scale") for name in floats) == 14
    (tmp_path / "tokenizer.json").write_text("{}")
    again = load_checkpoint(str(tmp_path), torch.float32)
    for at in (f"layers.{layer}.{part}" for layer in range(2) for part in PARTS):
        coded = again.coded[at]
        scales = coded.scales[..., None]
        zeros = coded.zero if coded.minimums is None else -coded.minimums[..., None] / scales
        grouped = checkpoint.tensors[at].view(coded.codes.shape[0], -1, 32)
        nearest = (grouped / scales + zeros).round().clamp(0, 2**bits - 1)
        assert torch.equal(nearest.view(coded.codes.shape), coded.codes.float()), at


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_one_float_type_is_in_the_file_and_in_its_config(tmp_path, method, key):
    from safetensors.torch import load_file

    checkpoint, windows = model()
    config = model_config(ARCHITECTURE, torch.bfloat16)
    del config["torch_dtype"]
    quantise_checkpoint(
        checkpoint,
        windows,
        Recipe(method=method, group=32),
        tmp_path,
        config={**config, key: "bfloat16"},
        stored=torch.bfloat16,
        quantiser="test:1",
        progress=lambda done, of, measured: None,
    )
    state = load_file(tmp_path / "model.safetensors")
    scales = {t.dtype for name, t in state.items() if name.endswith(("scales", "weight_scale"))}
    rest = {t.dtype for name, t in state.items() if name.endswith(".weight")}
    rest |= {t.dtype for name, t in state.items() if name.endswith(".bias")}
    said = json.loads((tmp_path / "config.json").read_text())
    assert {key, "torch_dtype" if key == "dtype" else "dtype"} & set(said) == {key}
    # AutoGPTQ and AutoAWQ know float16 alone.
    kept_in = torch.bfloat16 if method == "rtn" else torch.float16
    assert rest == {kept_in}
    assert said[key] == str(kept_in).removeprefix("torch.")
    assert scales == {kept_in}


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path):
    checkpoint, windows = model()
    tensors = dict(checkpoint.tensors)
    tensors["norm"] = torch.full_like(tensors["norm"], 70000.0)
    with pytest.raises(ConfigError, match=r"model.norm.weight has 70000.*at most 65504: use"):
        quantise_checkpoint(
            replace(checkpoint, tensors=tensors),
            windows,
            Recipe(method="gptq", group=32),
            tmp_path,
            config=model_config(ARCHITECTURE, torch.bfloat16),
            stored=torch.bfloat16,
            quantiser="test:1",
            progress=lambda done, of, measured: None,
        )


def test_others_read_the_file_as_safetensors(tmp_path):
    from safetensors.torch import load_file

    checkpoint, windows = model()
    quantise_checkpoint(
        checkpoint,
        windows,
        Recipe(method="gptq", group=32),
        tmp_path,
        config=model_config(ARCHITECTURE, torch.bfloat16),
        stored=torch.bfloat16,
        quantiser="test:1",
        progress=lambda done, of, measured: None,
    )
    state = load_file(tmp_path / "model.safetensors")
    assert state["model.layers.1.mlp.down_proj.qweight"].shape == (96 // 8, 64)
    assert "lm_head.weight" not in state
    assert torch.equal(state["model.embed_tokens.weight"], checkpoint.tensors["embed"].half())


def test_a_model_that_the_recipe_does_not_suit_is_refused_before_anything_is_written(tmp_path):
    checkpoint, windows = model()
    with pytest.raises(ConfigError, match=r"group=128 does not divide the 64 inputs"):
        quantise_checkpoint(
            checkpoint,
            windows,
            Recipe(method="gptq", group=128),
            tmp_path,
            config={},
            stored=torch.bfloat16,
            quantiser="test:1",
            progress=lambda done, of, measured: None,
        )
    assert list(tmp_path.iterdir()) == []
