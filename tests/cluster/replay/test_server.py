from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from stub_openai import StubOpenAI

from cluster.errors import ClusterError, NotRunning
from cluster.replay.formats import read_trace
from cluster.replay.mix import Part
from cluster.replay.replay import Prepared, Spec, prepare
from cluster.replay.server import Server
from cluster.replay.workload import Factors
from engine.errors import ConfigError

CONV = read_trace(Path(__file__).parents[2] / "traces" / "azure2023_conv.jsonl")


def server(routes: dict[str, Any]) -> Server:
    """Answers of JSON by path; 404 elsewhere."""

    def answer(request: httpx.Request) -> httpx.Response:
        route = routes.get(request.url.path)
        if route is None:
            return httpx.Response(404)
        body = json.loads(request.content) if request.content else None
        return httpx.Response(200, json=route(body) if callable(route) else route)

    return Server("http://x/v1/", transport=httpx.MockTransport(answer))


def test_the_context_is_found_where_servers_tell_it():
    models = [
        {"id": "ours", "max_model_len": 4096},
        {"id": "llama", "meta": {"n_ctx_train": 8192}},
        {"id": "other"},
    ]
    listed = server({"/v1/models": {"data": models}}).models()
    assert [(m.name, m.max_context_tokens) for m in listed] == [
        ("ours", 4096),
        ("llama", 8192),
        ("other", None),
    ]


def test_vllms_spelling_of_spaces_is_undone():
    answer = {"tokens": [5, 6, 7], "token_strs": ["ab", "Ġcd", "▁ef"]}
    assert server({"/tokenize": answer}).pieces("m", "x") == [(5, "ab"), (6, " cd"), (7, " ef")]


def test_llama_cpps_routes_are_understood():
    def tokenize(body: dict[str, Any]) -> dict[str, Any]:
        pieces = body.get("content", "").split("|")
        return {"tokens": [{"id": len(p), "piece": p} for p in pieces]} if pieces != [""] else {}

    llama = server(
        {
            "/tokenize": tokenize,
            "/apply-template": lambda body: {"prompt": "|".join(["<user>", "hello", "</user>"])},
        }
    )
    assert llama.pieces("m", "ab|c") == [(2, "ab"), (1, "c")]
    assert llama.chat_ids("m", [{"role": "user", "content": "hello"}]) == [6, 5, 7]


def test_a_server_without_these_routes_gives_none():
    assert server({}).pieces("m", "x") is None
    assert server({}).chat_ids("m", [{"role": "user", "content": "x"}]) is None


def test_what_is_no_such_server_is_said():
    with pytest.raises(ClusterError, match="not an OpenAI-compatible list"):
        server({"/v1/models": {"models": []}}).models()
    with pytest.raises(ClusterError, match="serves no model"):
        server({"/v1/models": {"data": []}}).models()
    with pytest.raises(ClusterError, match="status 404"):
        server({}).models()
    with pytest.raises(ClusterError, match="must be like http"):
        Server("localhost:8000")
    with pytest.raises(NotRunning, match="nobody answers"):
        Server("http://127.0.0.1:9").models()


async def prepared(stub: StubOpenAI, **spec: Any) -> Prepared:
    factors = Factors(length=0.1, max_requests=20)
    whole = Spec(traces=(CONV,), mix=(Part(source=CONV.name),), factors=factors, **spec)
    return await asyncio.to_thread(prepare, whole, stub.url)


async def test_a_server_without_tokenize_needs_a_tokenizer_or_ids():
    async with StubOpenAI(tokenizes=False) as stub:
        with pytest.raises(ClusterError, match="--tokenizer FOLDER, or --endpoint completions"):
            await prepared(stub)
        own = await prepared(stub, tokenizer="fake")
        ids = await prepared(stub, endpoint="completions", prompts="ids")
    assert own.run.settings["chat_frames"] == {"stub": {"head": 6, "tail": 12, "join": 7}}
    offer = ids.schedule.offers[0]
    assert len(ids.writers[offer.model].ids(offer.segments)) == offer.input_tokens == 37


async def test_the_run_says_what_is_offered_to_whom():
    async with StubOpenAI() as stub:
        run = (await prepared(stub, label="x")).run
        with pytest.raises(ConfigError, match="'y' is not served; there are stub"):
            await prepared(stub, model="y")
    assert (run.label, run.url, run.loop, run.num_requests) == ("x", stub.url, "open", 20)
    assert (run.length_factor, run.time_factor) == (0.1, 1.0)
    assert run.server["models"] == [{"name": "stub", "max_context_tokens": 8192}]
    assert run.sources[0]["sha256"] == CONV.sha256
    assert {"processor", "cores", "memory_bytes", "system"} <= set(run.machine)
    assert "tailrace" in run.versions
