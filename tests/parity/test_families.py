"""Each family against transformers, in float32, on random tiny models: every position's logits."""

import math

import pytest
import torch
import transformers

from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.models.architecture import Architecture, Llama3Scaling, Rope
from engine.models.decoder import Decoder
from engine.native.decoder import NativeDecoder
from engine.native.library import VARIANTS, native_available, variants
from engine.scheduling.plan import Chunk, StepPlan

TOLERANCE = 1e-4
WINDOW = 8
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def theta(value):
    return {"rope_type": "default", "rope_theta": value}


FAMILIES = {
    "llama": transformers.LlamaConfig(**SHAPE, rope_parameters=theta(10_000.0)),
    "llama, other theta": transformers.LlamaConfig(**SHAPE, rope_parameters=theta(777.0)),
    "llama 3.1 rope": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, tied": transformers.LlamaConfig(
        **SHAPE | {"tie_word_embeddings": True}, rope_parameters=theta(10_000.0)
    ),
    "llama, gelu": transformers.LlamaConfig(
        **SHAPE, rope_parameters=theta(10_000.0), hidden_act="gelu_pytorch_tanh"
    ),
    "qwen2": transformers.Qwen2Config(**SHAPE, rope_parameters=theta(1e6)),
    "qwen3": transformers.Qwen3Config(**SHAPE, rope_parameters=theta(1e6), head_dim=32),
    "mistral": transformers.MistralConfig(
        **SHAPE, rope_parameters=theta(10_000.0), sliding_window=WINDOW
    ),
}


def architecture_of(config):
    rope = config.rope_parameters
    return Architecture(
        name=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope=Rope(
            theta=rope["rope_theta"],
            llama3=Llama3Scaling(
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_context_tokens=rope["original_max_position_embeddings"],
            )
            if rope["rope_type"] == "llama3"
            else None,
        ),
        max_context_tokens=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        activation="gelu_tanh" if config.hidden_act == "gelu_pytorch_tanh" else "silu",
        window=WINDOW if config.model_type == "mistral" else None,
    )


NAMES = {"embed_tokens.weight": "embed", "norm.weight": "norm", "lm_head.weight": "head"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{x}_proj": x for x in "qkvo"},
    **{f"self_attn.{x}_norm": f"{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": x for x in ("gate", "up", "down")},
}


def canonical(state_dict):
    tensors = {}
    for name, tensor in state_dict.items():
        name = name.removeprefix("model.")
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            part, _, kind = part.rpartition(".")
            tensors[f"layers.{layer}.{PARTS[part]}{'.bias' if kind == 'bias' else ''}"] = tensor
        else:
            short = {
                "embed_tokens.weight": "embed",
                "norm.weight": "norm",
                "lm_head.weight": "head",
            }
            tensors[short[name]] = tensor
    return tensors


def decoder(implementation, *arguments, **options):
    """Ours: `torch`, or a variant of the native one."""
    if implementation == "torch":
        return Decoder(*arguments, **options)
    reason = native_available("float32")
    if reason or implementation not in variants("float32"):
        pytest.skip(reason or f"this processor lacks {implementation}")
    return NativeDecoder(*arguments, **options, variant=implementation, num_threads=2)


IMPLEMENTATIONS = ("torch", *VARIANTS)


@pytest.fixture(
    scope="module",
    params=[(family, ours) for family in FAMILIES for ours in IMPLEMENTATIONS],
    ids=lambda param: " by ".join(param),
)
def pair(request):
    """(oracle, ours) with equal random weights."""
    family, implementation = request.param
    config = FAMILIES[family]
    torch.manual_seed(0)
    oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if "bias" in name else 0.2)
    architecture = architecture_of(config)
    tensors = canonical(oracle.state_dict())
    if config.tie_word_embeddings:
        del tensors["head"]
    assert {n: tuple(t.shape) for n, t in tensors.items()} == architecture.tensor_shapes()
    ours = decoder(implementation, architecture, tensors, dtype=torch.float32, fingerprint="test")
    return oracle, ours


def expected(oracle, ids):
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0]


def shuffled_blocks(num_tokens, block_tokens, *, start=1, seed=3):
    """A block table with a spare column, and how many blocks the pool needs."""
    count = -(-num_tokens // block_tokens) + 1
    g = torch.Generator().manual_seed(seed)
    return tuple((torch.randperm(count, generator=g) + start).tolist())


def run(model, pool, chunks):
    """One pass; the logits of every row."""
    ids, positions, step = step_inputs(StepPlan(chunks=tuple(chunks)), pool.block_tokens)
    step.last = torch.arange(len(ids))
    return model.forward(ids, positions, pool, step)


def chunk(name, ids, first, stop, blocks):
    return Chunk(
        request_id=name,
        first_token=first,
        token_ids=tuple(ids[first:stop]),
        blocks=blocks,
        sample=True,
    )


def tokens(count, seed):
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def distance(got, want):
    assert got.shape == want.shape
    return float((got - want).abs().max())


@pytest.mark.parametrize("block_tokens", [8, 16, 256])
@pytest.mark.parametrize("size", [60, 7, 1], ids=["whole", "chunks of 7", "token by token"])
def test_logits_match_transformers_at_every_position(pair, size, block_tokens):
    """Over a pool full of NaN: only what was written for this sequence may be read."""
    oracle, model = pair
    ids = tokens(60, seed=1)
    blocks = shuffled_blocks(60, block_tokens)
    pool = KVPool(model.layout, max(blocks) + 1, block_tokens)
    pool.data.fill_(math.nan)
    rows = [
        run(model, pool, [chunk("a", ids, at, min(at + size, 60), blocks)])
        for at in range(0, 60, size)
    ]
    want = expected(oracle, ids)
    assert want.std() > 0.5, "an oracle this flat proves nothing"
    assert distance(torch.cat(rows), want) < TOLERANCE


def test_a_mixed_batch_of_chunks_and_decodes_matches_each_sequence_alone(pair):
    oracle, model = pair
    lengths = {"a": 33, "b": 20, "c": 50, "d": 5}
    ids = {name: tokens(n, seed=ord(name)) for name, n in lengths.items()}
    blocks, start = {}, 1
    for name, n in lengths.items():
        blocks[name] = shuffled_blocks(n, 8, start=start)
        start = max(blocks[name]) + 1
    pool = KVPool(model.layout, start, 8)
    pool.data.fill_(math.nan)
    run(model, pool, [chunk("a", ids["a"], 0, 32, blocks["a"])])
    run(model, pool, [chunk("b", ids["b"], 0, 19, blocks["b"])])
    run(model, pool, [chunk("c", ids["c"], 0, 10, blocks["c"])])
    mixed = [("a", 32, 33), ("c", 10, 50), ("b", 19, 20), ("d", 0, 5)]
    got = run(model, pool, [chunk(n, ids[n], first, stop, blocks[n]) for n, first, stop in mixed])
    want = torch.cat([expected(oracle, ids[n])[first:stop] for n, first, stop in mixed])
    assert distance(got, want) < TOLERANCE


@pytest.mark.parametrize(
    "pair", [("mistral", ours) for ours in IMPLEMENTATIONS], indirect=True, ids=IMPLEMENTATIONS
)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1])
def test_the_window_begins_exactly_where_transformers_has_it(pair, length):
    oracle, model = pair
    ids = tokens(length, seed=length)
    want = expected(oracle, ids)
    for size in (length, 1):
        blocks = shuffled_blocks(length, 8)
        pool = KVPool(model.layout, max(blocks) + 1, 8)
        pool.data.fill_(math.nan)
        rows = [
            run(model, pool, [chunk("a", ids, at, min(at + size, length), blocks)])
            for at in range(0, length, size)
        ]
        assert distance(torch.cat(rows), want) < TOLERANCE
