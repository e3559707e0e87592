"""The stream table between an engine that is told what to say and a link that keeps what comes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from deployments.lifecycle.machine import LifecycleConfig
from deployments.lifecycle.streams import StreamTable
from deployments.link.messages import UNTAKABLE, Grant, Kind, StreamEvent, Submit, Usage
from engine.outputs import Output, StepOutput
from engine.request import FinishReason, Request, SampledToken, SamplingParams
from engine.scheduling import Reservation
from engine.text.tokenizer import byte_tokenizer
from engine.transfer.manifest import Prefilled


class Link:
    peer_id = "g"

    def __init__(self) -> None:
        self.steps: list[list[StreamEvent]] = []

    def send(self, message: list[Any], *, last: bool = False) -> bool:
        kind, events = msgpack.unpackb(msgpack.packb(message))
        assert kind == Kind.STEP
        assert last
        self.steps.append([StreamEvent.from_wire(event) for event in events])
        return True


class Engine:
    tokenizer = byte_tokenizer()

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.paused: set[str] = set()

    def submit(self, request: Request, *, remote: bool = False) -> None:
        self.running[request.request_id] = request

    def cached_tokens(self, request: Request) -> int:
        return 0

    def cancel(self, request_id: str) -> bool:
        return self.running.pop(request_id, None) is not None

    def pause(self, request_id: str) -> None:
        self.paused.add(request_id)

    def resume(self, request_id: str) -> None:
        self.paused.discard(request_id)

    def step(self, *ends: str) -> StepOutput:
        """A token for everyone; those named end with it."""
        outputs = [
            Output(i, SampledToken(65), "A", FinishReason.LENGTH if i in ends else None, 0)
            for i in list(self.running)
            if i not in self.paused
        ]
        for i in ends:
            del self.running[i]
        return StepOutput(outputs, num_tokens=len(outputs), duration_s=0.01)


class Observer:
    def __init__(self) -> None:
        self.num_gaps = 0
        self.told: list[tuple[FinishReason, int]] = []

    def first_token(self, seconds: float) -> None: ...
    def pulled(self, prefilled: Any, seconds: float) -> None: ...

    def gaps(self, counted: Any) -> None:
        self.num_gaps += sum(times for _, times in counted)

    def ended(self, finish: Any, total_s: Any, decode_s: Any, num_tokens: int) -> None:
        self.told.append((finish, num_tokens))


class Table:
    """One table, one gateway, requests that never end by themselves."""

    def __init__(self) -> None:
        self.engine, self.link, self.observer = Engine(), Link(), Observer()
        self.reports = 0
        self.streams = StreamTable(
            self.engine,  # type: ignore[arg-type]
            LifecycleConfig(),
            slots=16,
            remote=None,
            changed=self._count_report,
            observer=self.observer,
        )

    def submit(
        self,
        stream_id: int,
        n: int = 1,
        window: int = 1024,
        priority: int = 0,
        preemptible: bool = True,
        grant: Grant | None = None,
        **params: Any,
    ) -> list[str]:
        request = Request(
            request_id=f"r{stream_id}",
            prompt_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=10_000, **params),
            priority=priority,
            preemptible=preemptible,
        )
        submit = Submit(
            stream_id=stream_id, request=request, n=n, window_tokens=window, grant=grant
        )
        self.streams.on_message(self.link, submit.to_wire())  # type: ignore[arg-type]
        (first,) = [i for i in self.engine.running if i.endswith(f":{stream_id}:{stream_id}/0")]
        return [first.removesuffix("0") + str(choice) for choice in range(n)]

    def _count_report(self) -> None:
        self.reports += 1

    def credit(self, stream_id: int, tokens: int) -> None:
        self.streams.on_message(self.link, [Kind.CREDIT, stream_id, tokens])  # type: ignore[arg-type]

    def step(self, *ends: str) -> list[StreamEvent]:
        before = len(self.link.steps)
        self.streams.on_step(self.engine.step(*ends))
        frames = self.link.steps[before:]
        assert len(frames) <= 1
        return frames[0] if frames else []


def usage(tokens: int) -> Usage:
    return Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=0)


async def test_a_step_is_one_frame_with_an_event_a_choice():
    table = Table()
    (one,), (two,) = table.submit(1), table.submit(2)
    for _ in range(3):
        assert table.step() == [StreamEvent(i, 0, "A", [65]) for i in (1, 2)]
    assert table.step(two) == [
        StreamEvent(1, 0, "A", [65]),
        StreamEvent(2, 0, "A", [65], None, FinishReason.LENGTH, usage(4)),
    ]
    assert table.step(one) == [StreamEvent(1, 0, "A", [65], None, FinishReason.LENGTH, usage(5))]
    assert table.step() == []
    assert table.observer.told == [(FinishReason.LENGTH, 4), (FinishReason.LENGTH, 5)]
    assert table.observer.num_gaps == 3 + 4
    assert table.streams.counters.tokens_out == 9
    assert table.streams.num_streams == 0


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16])
async def test_one_choice_is_paused_with_the_token_that_fills_the_window(window):
    table = Table()
    (one,) = table.submit(1, window=window)
    sent = 0
    while not table.engine.paused:
        sent += len(table.step())
    assert (table.engine.paused, sent) == ({one}, window)
    table.credit(1, window)
    assert table.engine.paused == set()
    while not table.engine.paused:
        sent += len(table.step())
    assert sent == 2 * window


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("window", [1, 4, 11, 64])
async def test_choices_fill_their_window_together(n, window):
    table = Table()
    choices = table.submit(1, n=n, window=window)
    sent = 0
    while not table.engine.paused:
        sent += len(table.step())
    # The choices of one step come together: those after the one that fills it are beyond it.
    assert window <= sent < window + n
    assert table.engine.paused == set(choices)
    table.credit(1, sent - window // 2)
    assert table.engine.paused == set()
    more = 0
    while not table.engine.paused:
        more += len(table.step())
    assert window - window // 2 <= more < window - window // 2 + n


async def test_a_credit_that_leaves_more_than_half_unread_resumes_nothing():
    table = Table()
    (one,) = table.submit(1, window=8)
    for _ in range(8):
        table.step()
    table.credit(1, 3)
    assert table.engine.paused == {one}
    table.credit(1, 1)
    assert table.engine.paused == set()
    assert sum(len(table.step()) for _ in range(10)) == 4


async def test_the_last_choice_to_end_tells_what_all_of_them_took():
    table = Table()
    choices = table.submit(1, n=3)
    for _ in range(4):
        table.step()
    assert [event.usage for event in table.step(choices[0], choices[2])] == [None, None, None]
    table.step()
    (last,) = table.step(choices[1])
    assert last.usage == usage(5 + 6 + 4)
    assert table.streams.num_choices == 0


async def test_a_fault_of_one_stream_leaves_the_others_their_tokens(monkeypatch):
    table = Table()
    table.submit(1)
    (two,) = table.submit(2, logprobs=0)
    refused: list[Any] = []
    send = table.link.send

    def told(message: list[Any], *, last: bool = False) -> bool:
        if message[0] == Kind.REFUSE:
            refused.append(message)
            return True
        return send(message, last=last)

    monkeypatch.setattr(table.link, "send", told)
    # It asked for log-probabilities and the engine gives none.
    assert table.step() == [StreamEvent(1, 0, "A", [65])]
    assert [message[1] for message in refused] == [2]
    assert two not in table.engine.running
    assert table.step() == [StreamEvent(1, 0, "A", [65])]


class Prefill:
    """A replica that takes its time."""

    num_replicas = 1

    def __init__(self) -> None:
        self.filled = asyncio.Event()

    def choose(self, num_tokens: int, excluding: str | None) -> str | None:
        return "p1"

    async def pull(self, *_: Any) -> Prefilled:
        await self.filled.wait()
        return Prefilled(first=SampledToken(65), num_cached_tokens=0, num_bytes=1, exposed_s=0.0)

    def arrived(self, request: Request, prefilled: Prefilled) -> Output:
        return Output(request.request_id, prefilled.first, "A", None, 0)


async def test_nothing_takes_the_slot_of_a_request_whose_kv_is_on_its_way():
    table, prefill = Table(), Prefill()
    table.streams.remote = prefill  # type: ignore[assignment]
    table.streams.config = LifecycleConfig(local_prefill_tokens=0)
    table.streams.slots = 1
    (one,) = table.submit(1, priority=30)
    assert table.streams.alive() == ((30, 30, 1, 3),)  # it waits: whoever comes goes first
    reports = table.reports
    table.streams.on_step(
        StepOutput(reservations=[Reservation(request_id=one, blocks=(7,), num_cached_tokens=0)])
    )
    assert table.streams.alive() == ((30, UNTAKABLE, 1, 3),)
    assert not table.streams._room_for(_submit(priority=0, n=1))
    assert table.reports == reports + 1
    prefill.filled.set()
    while not table.link.steps:
        await asyncio.sleep(0)
    assert table.streams.alive() == ((30, 30, 1, 3),)
    assert table.streams._room_for(_submit(priority=0, n=1))
    assert table.reports == reports + 2


async def test_what_is_alive_is_told_with_the_level_at_which_the_engine_runs_it():
    table = Table()
    (batch,), (_,), _ = (
        table.submit(1, priority=30),
        table.submit(2, priority=30),
        table.submit(3, n=2, preemptible=False),
    )
    assert sorted(table.streams.alive(), key=str) == [(0, None, 2, 3), (30, 30, 2, 6)]
    reports = table.reports
    step = table.engine.step()
    step.aged = ((batch, 18), ("gone/0", 1))
    table.streams.on_step(step)
    assert table.reports == reports + 1, "the queue must know"
    assert sorted(table.streams.alive(), key=str) == [
        (0, None, 2, 3),
        (30, 18, 1, 3),
        (30, 30, 1, 3),
    ]
    # Four of sixteen slots are taken. Of the two of batch, one makes way for rank 20, both for 10.
    table.streams.slots = 4
    assert not table.streams._room_for(_submit(priority=20, n=2))
    assert table.streams._room_for(_submit(priority=20, n=1))
    assert table.streams._room_for(_submit(priority=10, n=2))
    assert not table.streams._room_for(_submit(priority=10, n=3))


async def test_the_first_choices_are_kept_as_far_as_the_grant_says():
    table = Table()
    grant = Grant(grant_id=1, epoch=1, replica_id="d", expiry_ms=1000, kept=2)
    choices = table.submit(1, n=3, priority=30, grant=grant)
    table.step()
    assert [table.engine.running[choice].preemptible for choice in choices] == [False, False, True]
    assert table.streams.alive() == ((30, None, 2, 3), (30, 30, 1, 0))
    table.streams.slots = 3
    assert table.streams._room_for(_submit(priority=0, n=1))
    assert not table.streams._room_for(_submit(priority=0, n=2))


def _submit(priority: int, n: int) -> Submit:
    request = Request(
        request_id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1), priority=priority
    )
    return Submit(stream_id=9, request=request, n=n, window_tokens=1)
