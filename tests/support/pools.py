"""Requests, answers and faults for the tests of two pools in one process (`local_cluster`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest

from engine.build import assemble
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.models.load import load_model
from engine.request import FinishReason, Request, SamplingParams
from engine.text.text_model import load_text

Top = tuple[tuple[int, float], ...]


def request(i: int, length: int, max_tokens: int = 12, **params: Any) -> Request:
    """The `i`th request: its own prompt of `length` tokens and its own seed."""
    rng = random.Random(i)
    prompt = tuple(rng.randrange(32, 127) for _ in range(length))
    values = {"max_tokens": max_tokens, "seed": rng.getrandbits(64), "temperature": 1.0, **params}
    return Request(request_id=f"r{i}", prompt_ids=prompt, params=SamplingParams(**values))


@dataclass
class Answer:
    """One choice, whole."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[tuple[int, float, Top]] = field(default_factory=list)


@lru_cache
def _model(source: str) -> Any:
    return load_model(ModelConfig(name="m", source=source)), load_text(source).tokenizer


def alone(source: str, one: Request, choice: int = 0) -> Answer:
    """What one engine says to one choice of a request when nobody else asks it anything."""
    model, tokenizer = _model(source)
    config = EngineConfig(
        model=ModelConfig(name="m", source=source),
        num_blocks=400,
        block_tokens=8,
        max_context_tokens=1024,
        scheduler=SchedulerConfig(),
    )
    engine = assemble(config, model, tokenizer).engine
    engine.submit(replace(one, params=one.params.for_choice(choice)))
    answer = Answer()
    while (step := engine.step()) is not None:
        for output in step.outputs:
            token = output.token
            assert token is not None
            answer.tokens.append(token.token_id)
            answer.text += output.text
            answer.finish = output.finish or answer.finish
            if token.logprob is not None:
                top = tuple((t, round(p, 6)) for t, p in token.top)
                answer.logprobs.append((token.token_id, round(token.logprob, 6), top))
    return answer


def reference(source: str, requests: list[Request]) -> dict[str, tuple[list[int], str]]:
    """Tokens and text of choice 0 of each request, by its id."""
    answers = {one.request_id: alone(source, one) for one in requests}
    return {request_id: (answer.tokens, answer.text) for request_id, answer in answers.items()}


class Reader:
    """Reads a stream to its end in a task of its own."""

    def __init__(self, stream: Any, n: int = 1) -> None:
        self.stream = stream
        self.answers = [Answer() for _ in range(n)]
        self.usage: Any = None
        self.task = asyncio.create_task(self._read())

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers]

    async def _read(self) -> None:
        try:
            async for events in self.stream:
                for event in events:
                    answer = self.answers[event.choice]
                    assert answer.finish is None, "an event came after the last one of its choice"
                    assert self.usage is None, "an event came after the usage"
                    answer.tokens.extend(event.token_ids)
                    answer.text += event.text
                    answer.finish = event.finish
                    for entry in event.logprobs or ():
                        top = tuple((t, round(p, 6)) for t, _, p in entry.top)
                        answer.logprobs.append((entry.token_id, round(entry.logprob, 6), top))
                    self.usage = event.usage
        finally:
            await self.stream.aclose()

    async def each_has(self, count: int) -> None:
        """Until every choice has `count` tokens."""

        def there() -> bool:
            assert not self.task.done(), "the stream ended too early"
            return min(map(len, self.tokens)) >= count

        await until(there, f"{count} tokens of each choice")


async def opened(client: Any, one: Request, n: int = 1, *, remaining_s: float = 600.0) -> Reader:
    """A stream that a replica has taken, being read."""
    return Reader(await client.open(one, n=n, remaining_s=remaining_s), n)


async def _read(client: Any, one: Request, n: int) -> Reader:
    reader = await opened(client, one, n)
    try:
        await reader.task
    finally:
        await reader.stream.aclose()  # a task cancelled before its first turn runs no `finally`
    return reader


async def answers(client: Any, one: Request, n: int = 1) -> list[Answer]:
    return (await _read(client, one, n)).answers


async def ask(client: Any, one: Request, n: int = 1) -> tuple[Any, Any, Any, Any]:
    """Tokens, text and finish of each choice, and the usage."""
    reader = await _read(client, one, n)
    told = reader.answers
    return reader.tokens, [a.text for a in told], [a.finish for a in told], reader.usage


async def until(condition: Callable[[], bool], what: str, limit_s: float = 240.0) -> None:
    """Wait for a condition, or fail saying what never came."""
    give_up = asyncio.get_running_loop().time() + limit_s
    while not condition():
        if asyncio.get_running_loop().time() > give_up:
            pytest.fail(f"never came: {what}")
        await asyncio.sleep(0.005)


async def lose(cluster: Any, name: str) -> None:
    """A decode replica dies, and Serve sees it."""
    cluster.decode_directory.drop(name)
    await cluster.decodes.pop(name).close()


async def settled(cluster: Any) -> None:
    """Wait until nothing is alive anywhere, or fail saying what is."""
    left: list[Any] = []
    give_up = asyncio.get_running_loop().time() + 240.0
    while asyncio.get_running_loop().time() < give_up:
        left = [
            (name, s.streams.num_streams, s.streams.num_choices, s.host.engine.stats())
            for name, s in cluster.decodes.items()
            if s.streams.num_choices
            or s.streams.num_streams
            or s.host.engine.stats().num_held_blocks
            or (s.pulls is not None and s.pulls.num_active)
        ]
        left += [
            (name, s.exports.num_sessions, s.host.engine.stats())
            for name, s in cluster.prefills.items()
            if s.exports.num_sessions
            or s.host.engine.stats().num_held_blocks
            or s.host.engine.stats().num_leases
        ]
        left += [("gateway", c.num_streams) for c in cluster.clients if c.num_streams or c._legs]
        left += [("held", c._queue.num_held) for c in cluster.clients if c._queue.num_held]
        if not left:
            for service in (*cluster.decodes.values(), *cluster.prefills.values()):
                service.host.built.engine.check()
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"still alive: {left}")


class Passes:
    """The forward passes of one replica's engine, to count, to hold up or to break.

    Its engine's thread waits in here while it is held: let it go before the replica is closed.
    """

    def __init__(self, service: Any) -> None:
        import threading

        executor = service.host.built.engine._executor
        self.count = 0
        self.fail_at: int | None = None
        self.hold_at: int | None = None
        self.reached = False
        """The pass to hold up is being held."""

        self._open = threading.Event()
        self._execute = executor.execute
        executor.execute = self._run

    def release(self) -> None:
        self.hold_at = None
        self._open.set()

    def _run(self, plan: Any) -> Any:
        self.count += 1
        if self.count == self.hold_at:
            self.reached = True
            self._open.wait(600.0)
        if self.fail_at is not None and self.count >= self.fail_at:
            raise RuntimeError("the device is gone")
        return self._execute(plan)


class Payloads:
    """What a prefill replica puts on its links: lets a test interfere with the nth chunk."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, service: Any, nth: int, act: Callable[[Any], bool]
    ) -> None:
        """`act(link)` is called with the nth payload and says whether it is sent all the same."""
        from deployments.link.link import Link

        self.count = 0
        self.acted = False
        send = Link.send_payload

        def send_payload(link: Any, head: Any, payload: Any) -> bool:
            if link in service._server.links.values():
                self.count += 1
                if self.count == nth:
                    self.acted = True
                    if not act(link):
                        return True
            return send(link, head, payload)

        monkeypatch.setattr(Link, "send_payload", send_payload)
