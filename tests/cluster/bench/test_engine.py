from __future__ import annotations

import time

import pytest

from cluster.bench.engine import RATES, assemble, table
from cluster.bench.engine_worker import EngineJob, measure

MEASURED = {
    "dtype": "bfloat16",
    "kv_dtype": "int8",
    "kv_bytes_per_token": 12240,
    "decode_context_tokens": 32,
    "num_threads": 2,
    "torch": "2.13",
    "cpu_flags": ["avx2"],
    "max_chunk_tokens": 256,
    "others_cpu_share": 0.25,
    "prefill_512_tok_s": 1800.123,
    "prefill_512_tok_s_limit": 3600.0,
    "decode_1_tok_s": 80.0,
    "decode_1_tok_s_limit": 100.0,
    "decode_16_tok_s": 400.0,
    "decode_16_tok_s_limit": 1600.0,
    "step_overhead": {"greedy": 0.0625, "sampled": 0.125},
    "overlap_gain": {"greedy": 1.02, "sampled": 0.97},
    "overlap_gain_samples": {"greedy": [1.0, 1.02, 1.03], "sampled": [0.97]},
    "samples": {"decode_1_tok_s": [79.0, 80.0, 81.0]},
}


def test_the_object_has_every_key_that_the_main_job_names():
    result = assemble("package:x", [3.0, 9.0, 4.0], MEASURED)
    assert result["startup_s"] == 4.0
    assert result["prefill_512_tok_s"] == 1800.0
    for name in RATES:
        assert result[f"{name}_limit"] == MEASURED[f"{name}_limit"]
    assert {"model", "dtype", "threads", "cpu_flags", "torch", "others_cpu_share"} <= set(result)
    assert result["samples"]["startup_s"] == [3.0, 9.0, 4.0]
    assert (result["overlap_greedy_ratio"], result["overlap_sampled_ratio"]) == (1.02, 0.97)
    assert result["samples"]["overlap_greedy_ratio"] == [1.0, 1.02, 1.03]


def test_the_table_says_what_share_of_the_limit_is_reached():
    lines = "\n".join(table(assemble("package:x", [3.0], MEASURED)))
    assert "50 % of its linear layers alone (3600.0)" in lines
    assert "25 % of its linear layers alone (1600.0)" in lines
    assert "outside the model: 6.2 % greedy, 12.5 % sampled" in lines
    assert "overlap on over off: 1.02 greedy, 0.97 sampled" in lines
    assert "KV: int8" in lines
    assert "32 tokens of 12240 bytes each" in lines


def test_a_model_without_linear_layers_has_no_limit():
    measured = {k: v for k, v in MEASURED.items() if not k.endswith("_limit")}
    result = assemble("fake", [1.0], measured)
    assert [result[f"{name}_limit"] for name in RATES] == [None, None, None]
    assert "limit" not in "\n".join(table(result))


def job(source: str, **more: object) -> EngineJob:
    values = {
        "source": source,
        "dtype": "auto",
        "threads": 1,
        "repeats": 1,
        "spawned_s": time.monotonic(),
        "prefill_tokens": 40,
        "decode_prompt_tokens": 5,
        "decode_tokens": 6,
        "batches": (1, 2),
        **more,
    }
    return EngineJob(**values)  # type: ignore[arg-type]


def test_a_job_survives_the_way_to_its_process():
    sent = job("tiny")
    assert EngineJob.from_json(sent.to_json()) == sent


@pytest.mark.parametrize("source", ["tiny", "fake"])
def test_an_engine_is_measured_beside_its_linear_layers_if_it_has_any(source):
    result = measure(job(source, max_chunk_tokens=16))
    names = ["prefill_40_tok_s", "decode_1_tok_s", "decode_2_tok_s"]
    limits = [f"{name}_limit" for name in names] if source == "tiny" else []
    assert set(result["samples"]) == {*names, *limits}
    assert all(result[name] > 0 for name in [*names, *limits])
    assert all(0 < result["step_overhead"][name] < 1 for name in ("greedy", "sampled"))
    assert {name: len(v) for name, v in result["overlap_gain_samples"].items()} == {
        "greedy": 1,
        "sampled": 1,
    }
    assert all(gain > 0 for gain in result["overlap_gain"].values())
    assert (result["num_threads"], result["dtype"], result["max_chunk_tokens"]) == (
        1,
        "float64",
        16,
    )


def test_keys_and_values_are_measured_as_codes_behind_a_longer_context():
    result = measure(job("tiny", kv_dtype="int8", decode_prompt_tokens=600, batches=(1, 3)))
    assert (result["dtype"], result["kv_dtype"]) == ("float64", "int8")
    # Three layers of two heads of 16, K and V: a byte each and four for the scale.
    assert result["kv_bytes_per_token"] == 3 * 2 * 2 * (16 + 4)
    assert result["decode_context_tokens"] == 600
    assert all(value > 0 for value in result["samples"]["decode_3_tok_s"])


def test_only_the_start_is_measured_when_nothing_is_repeated():
    assert set(measure(job("fake", repeats=0))) == {"startup_s"}
