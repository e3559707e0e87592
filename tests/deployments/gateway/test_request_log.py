from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.replay.formats import read_trace
from cluster.replay.mix import Part
from cluster.replay.server import ServedModel
from cluster.replay.workload import Factors, plan
from deployments.gateway.config import GatewayConfig, RequestLogging
from deployments.gateway.request_log import (
    Noted,
    RequestLog,
    _RotatingFile,
    block_chain,
    lines,
)
from engine.errors import ConfigError, Overloaded
from engine.request import Request, SamplingParams

KEY = b"k" * 32


def noted(prompt: list[int], *, tenant: str = "default", at_s: float = 0.0, **more: Any) -> Noted:
    params = SamplingParams(max_tokens=9, temperature=0.5, stop=("secret stop",), seed=77)
    return Noted(
        **{
            "at_unix_s": 1_800_000_000.0 + at_s,
            "endpoint": "chat",
            "stream": True,
            "model": "m",
            "tier": "default",
            "tenant": tenant,
            "requests": (Request(request_id="r", prompt_ids=tuple(prompt), params=params),),
            "n": 1,
            "completion_tokens": 4,
            "cached_tokens": 0,
            "finish": ("stop",),
            "status": 200,
            "code": None,
            "phases": (("queue", 0.25),),
            "ttft_s": 0.5,
            "duration_s": 1.0,
            **more,
        }
    )


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[RequestLog]:
    log = RequestLog(b"secret of the deployment", "gateway-1")
    await log.configure(RequestLogging(path=str(tmp_path / "logs" / "requests.jsonl")))
    yield log
    await log.close()


async def test_a_request_is_a_line_without_its_text(gateway, tmp_path) -> None:
    log = RequestLog(KEY, "g")
    await log.configure(RequestLogging(path=str(tmp_path / "r.jsonl")))
    gateway.state.request_log = log
    before = time.time()
    async with gateway.client() as client:
        text = "A confidential question. " * 8
        messages = [{"role": "user", "content": text}]
        for stream in (False, True):
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=3, temperature=0.25, stream=stream
            )
            if stream:
                async for _ in answer:
                    pass
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=[])
    await gateway.settle()
    await log.close()
    data = (tmp_path / "r.jsonl").read_text()
    whole, streamed = map(json.loads, data.splitlines())
    assert "confidential" not in data
    assert (whole["stream"], streamed["stream"]) == (False, True)
    assert before <= whole["at"] <= streamed["at"] <= time.time()
    assert whole["prompt_tokens"] == len(gateway.backend.request.prompt_ids)
    assert (whole["completion_tokens"], whole["max_tokens"], whole["cached_tokens"]) == (3, 3, 2)
    assert whole["sampling"] == {"temperature": 0.25}
    assert (whole["outcome"], whole["status"], whole["finish"]) == ("finished", 200, ["length"])
    assert list(streamed["phases"]) == ["tokenize", "queue", "route", "prefill", "stream"]
    assert sum(streamed["phases"].values()) == pytest.approx(streamed["duration_s"], abs=1e-4)
    assert streamed["blocks"] == whole["blocks"]
    assert len(whole["blocks"]) == whole["prompt_tokens"] // 64 > 1


async def test_failures_are_logged_with_their_code(gateway, tmp_path) -> None:
    log = RequestLog(KEY, "g")
    await log.configure(RequestLogging(path=str(tmp_path / "r.jsonl")))
    gateway.state.request_log = log
    gateway.backend.script = lambda request, n: [Overloaded("full", code="queue_full")]
    async with gateway.client() as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt=[1, 2], max_tokens=5)
    await gateway.settle()
    await log.close()
    (line,) = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert (line["outcome"], line["status"], line["code"]) == ("failed", 429, "queue_full")
    assert (line["prompt_tokens"], line["max_tokens"], line["ttft_s"]) == (2, 5, None)


async def test_the_log_replays_with_what_its_prompts_share(log: RequestLog) -> None:
    shared = list(range(200))
    log.note(noted(shared + [1] * 100, at_s=0.0))
    log.note(noted(shared + [2] * 100, at_s=2.5))
    log.note(noted(shared + [2] * 100, tenant="other", at_s=3.0))
    log.note(noted([5], at_s=4.0, status=499, completion_tokens=1))
    path = log.path
    await log.close()
    trace = read_trace(path)
    assert trace.format == "request-log"
    assert [r.at_s for r in trace.requests] == [0.0, 2.5, 3.0, 4.0]
    # Who left is offered again with what it asked for.
    assert [r.output_tokens for r in trace.requests] == [4, 4, 4, 9]
    model = ServedModel(name="m", max_context_tokens=4096)
    offers = plan([trace], [Part(source=trace.name)], Factors(), [model], {}).offers
    assert [o.input_tokens for o in offers] == [300, 300, 300, 1]
    assert [o.predicted_cached_tokens for o in offers] == [0, 192, 0, 0]
    assert offers[0].body["temperature"] == 0.5
    assert len({o.tenant for o in offers}) == 2
    assert {o.tier for o in offers} == {"default"}


def test_hashes_need_the_key_and_tell_tenants_apart() -> None:
    prompt = list(range(200))
    chain = block_chain(prompt, KEY, "a\0m")
    assert len(chain) == 3
    assert block_chain(prompt, KEY, "a\0m") == chain
    assert block_chain([*prompt[:128], 0], KEY, "a\0m") == chain[:2]
    assert not set(chain) & set(block_chain(prompt, b"x" * 32, "a\0m"))
    assert not set(chain) & set(block_chain(prompt, KEY, "b\0m"))
    # A chain: the same block behind another is another.
    assert block_chain(prompt[64:], KEY, "a\0m")[0] not in chain
    (line,) = lines(noted(prompt, tenant="acme"), KEY)
    assert b"acme" not in line
    assert b"secret stop" not in line
    assert b"77" not in line.partition(b'"blocks"')[0]


async def test_it_rotates_by_size_and_keeps_so_many(tmp_path: Path) -> None:
    log = RequestLog(KEY, "g")
    path = tmp_path / "r.jsonl"
    await log.configure(RequestLogging(path=str(path), max_bytes=4096, keep=2))
    for i in range(60):
        log.note(noted([i], at_s=i))
        if i % 10 == 9:
            await log._flush()
    await log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert all(file.stat().st_size <= 4096 for file in files)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    kept = [
        json.loads(line)["at"] for file in reversed(files) for line in file.read_text().splitlines()
    ]
    assert kept == sorted(kept)
    assert kept[-1] == 1_800_000_059.0


async def test_a_file_that_cannot_be_opened_costs_no_more_than_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RequestLog(KEY, "g")
    path = tmp_path / "r.jsonl"
    await log.configure(RequestLogging(path=str(path), max_bytes=4096, keep=2))
    log.note(noted([1], at_s=1))
    await log._flush()
    with monkeypatch.context() as patched:
        patched.setattr(_RotatingFile, "_open", _no_descriptors)
        for i in range(20):
            log.note(noted([i], at_s=i))
        await log._flush()
    log.note(noted([1], at_s=99))
    await log._flush()
    await log.close()
    files = [file.read_text() for file in tmp_path.iterdir()]
    kept = [json.loads(line)["at"] for text in files for line in text.splitlines()]
    assert {1_800_000_001.0, 1_800_000_099.0} <= set(kept)


def _no_descriptors(file: _RotatingFile, path: Path) -> None:
    raise OSError(24, "Too many open files")


async def test_a_second_gateway_takes_a_name_of_its_own(log: RequestLog) -> None:
    other = RequestLog(KEY, "gateway-2")
    await other.configure(RequestLogging(path=str(log.path)))
    assert other.path == log.path.with_name("requests-gateway-2.jsonl")
    await log.close()
    await other.close()


async def test_it_is_changed_in_place_and_off_by_default(log: RequestLog, tmp_path: Path) -> None:
    assert GatewayConfig.parse({}).request_log is None
    first = log.path
    log.note(noted([1]))
    await log.configure(RequestLogging(path=str(first), keep=1))
    assert log.path == first  # its own lock is no obstacle
    await log.configure(RequestLogging(path=str(tmp_path / "second.jsonl")))
    log.note(noted([1]))
    await log.configure(None)
    log.note(noted([1]))
    assert log.path is None
    assert [len(p.read_text().splitlines()) for p in (first, tmp_path / "second.jsonl")] == [1, 1]


async def test_a_file_that_cannot_be_written_is_refused_and_changes_nothing(
    log: RequestLog, tmp_path: Path
) -> None:
    before = log.path
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"request_log\.path=.*name a file that"):
        await log.configure(RequestLogging(path=str(tmp_path / "file" / "r.jsonl")))
    assert log.path == before


async def test_what_does_not_fit_is_counted_and_not_kept(
    log: RequestLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.gateway.request_log.MOST_WAITING", 2)
    for _ in range(5):
        log.note(noted([1]))
    path = log.path
    await log.close()
    assert len(path.read_text().splitlines()) == 2
    assert "3 requests are missing" in caplog.text


def test_a_misspelt_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"request_log\.size: no such field.*keep, max_bytes"):
        GatewayConfig.parse({"request_log": {"path": "x", "size": 1}})
