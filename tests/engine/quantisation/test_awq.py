"""Scales that make inputs that matter larger: what they gain, and that the function stays."""

import pytest
import torch

from engine.models.architecture import Architecture, Rope
from engine.models.decoder import Decoder
from engine.quantisation.awq import (
    FOLDS,
    fold,
    quantise_nearest,
    search_scales,
    shared_by_heads,
)
from engine.quantisation.gptq import output_error
from engine.quantisation.layer import LayerFunction

ARCHITECTURE = Architecture(
    name="qwen2",
    vocab_size=50,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
    tied_embeddings=False,
    qkv_bias=True,
)


def tensors(architecture, seed=0):
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in architecture.tensor_shapes().items():
        values = torch.randn(shape, generator=g, dtype=torch.float64)
        out[name] = 1 + values / 4 if len(shape) == 1 else values / shape[-1] ** 0.5
    return out


def logits(architecture, weights):
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool
    from engine.scheduling.plan import Chunk, StepPlan

    model = Decoder(architecture, weights, dtype=torch.float64, fingerprint="")
    ids = tuple((7 * i * i + 3) % architecture.vocab_size for i in range(20))
    chunk = Chunk(request_id="a", first_token=0, token_ids=ids, blocks=(1, 2), sample=True)
    flat, positions, step = step_inputs(StepPlan(chunks=(chunk,)), 16)
    step.last = torch.arange(len(ids))
    return model.forward(flat, positions, KVPool(model.layout, 3, 16), step)


def layer_of(weights, index):
    at = f"layers.{index}."
    return {n.removeprefix(at): t for n, t in weights.items() if n.startswith(at)}


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_folding_leaves_the_function_of_the_model_unchanged(stored):
    """Also with norms that are kept in few bits: the matrices take what they are off by."""
    weights = tensors(ARCHITECTURE)
    want = logits(ARCHITECTURE, weights)
    folded = dict(weights)
    g = torch.Generator().manual_seed(1)
    for index in range(2):
        layer = layer_of(weights, index)
        for product, parts in FOLDS.items():
            size = layer[parts[0]].shape[1]
            scales = torch.exp(torch.randn(size, generator=g, dtype=torch.float64))
            if product == "o":
                scales = shared_by_heads(scales, ARCHITECTURE)
            fold(layer, product, scales, ARCHITECTURE, stored)
        folded |= {f"layers.{index}.{part}": tensor for part, tensor in layer.items()}
    for name in ("layers.0.q", "layers.1.attn_norm", "layers.0.v", "layers.0.v.bias"):
        assert not torch.allclose(folded[name], weights[name], rtol=0.1), name
    assert float((logits(ARCHITECTURE, folded) - want).abs().max()) < 1e-10
    for name in ("layers.0.attn_norm", "layers.1.mlp_norm"):
        assert torch.equal(folded[name], folded[name].to(stored).double())


def test_a_layer_as_a_function_is_the_decoders():
    from dataclasses import replace

    for architecture in (
        ARCHITECTURE,
        replace(ARCHITECTURE, window=5, activation="gelu_tanh"),
        replace(ARCHITECTURE, name="qwen3", qkv_bias=False, qk_norm=True),
    ):
        weights = tensors(architecture)
        function = LayerFunction(architecture, torch.float64)
        ids = [(7 * i * i + 3) % architecture.vocab_size for i in range(20)]
        x = weights["embed"][torch.tensor(ids)]
        for index in range(architecture.num_layers):
            x = function(x, layer_of(weights, index))
        x = torch.nn.functional.rms_norm(x, (64,), weights["norm"], architecture.norm_eps)
        got = x @ weights["head"].T
        assert float((got - logits(architecture, weights)).abs().max()) < 1e-10


def uneven(seed=0, size=128):
    """Inputs of which a few are large, as in language models."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, size, generator=g) / 8
    inputs = torch.randn(500, size, generator=g)
    inputs[:, torch.randperm(size, generator=g)[:6]] *= 30.0
    return weight, inputs


def test_scales_of_active_inputs_cost_the_product_less():
    weight, inputs = uneven()
    hessian = inputs.T @ inputs / inputs.shape[0]
    scales = search_scales([weight], inputs.abs().mean(0), hessian, bits=4, group=64)
    plain = quantise_nearest(weight, None, bits=4, group=64)
    scaled = quantise_nearest(weight * scales, None, bits=4, group=64)
    inverse = torch.diag(1 / scales)
    error = output_error(scaled, weight * scales, inverse @ hessian @ inverse)
    assert error < 0.4 * output_error(plain, weight, hessian)
    large = inputs.abs().mean(0) > 5
    assert scales[large].min() > scales[~large].max()


def test_inputs_that_are_all_alike_need_no_scales():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).sign() * 0.5
    scales = search_scales([weight], torch.ones(64), torch.eye(64), bits=4, group=32)
    assert torch.equal(scales, torch.ones(64))


def test_heads_that_share_values_share_their_scales():
    values = torch.arange(64.0)
    shared = shared_by_heads(values, ARCHITECTURE).view(2, 2, 16)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert shared[0, 0, 0] == (0 + 16) / 2


def test_clipping_costs_no_more_than_the_whole_range():
    weight, inputs = uneven(3)
    hessian = inputs.T @ inputs / inputs.shape[0]
    clipped = quantise_nearest(weight, hessian, bits=4, group=32)
    whole = quantise_nearest(weight, None, bits=4, group=32)
    blocks = torch.block_diag(*[hessian[i : i + 32, i : i + 32] for i in range(0, 128, 32)])
    assert output_error(clipped, weight, blocks) < output_error(whole, weight, blocks)
