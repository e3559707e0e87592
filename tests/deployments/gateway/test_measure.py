"""What the gateway's metrics say of requests that go well, go wrong, come late or are left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from outcomes import failed, outcome

from cluster.report.figures import goodput_by_multiple
from cluster.report.targets import Targets
from deployments.gateway.measure import Pace, ending_of
from deployments.gateway.slo import Ending
from deployments.link.messages import StreamEvent
from deployments.metrics import Histogram
from engine.errors import Overloaded

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ALL_MET = {(kind, "true"): 1 for kind in ("queue", "ttft", "itl", "e2e")}


def counted(gateway: Any, name: str, model: str = "tiny") -> dict[tuple[str, ...], float]:
    """A family's values of one model above 0, by the labels after model and tier."""
    return {
        labels[2:]: getattr(series, "value", None) or getattr(series, "count", 0)
        for metric, labels, series in gateway.metrics.series()
        if metric.name == f"tailrace_{name}" and labels[0] == model
        if (getattr(series, "value", 0) or getattr(series, "count", 0)) > 0
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_time_meets_every_target_and_is_goodput(
    gateway: Any, stream: bool
) -> None:
    assert (await gateway.post(PATH, BODY | {"stream": stream, "n": 2})).status == 200
    await gateway.settle()
    assert counted(gateway, "requests_offered_total") == {(): 1}
    assert counted(gateway, "slo_requests_total") == ALL_MET
    assert counted(gateway, "goodput_requests_total") == {(): 1}
    assert counted(gateway, "goodput_tokens_total") == {(): 8}
    assert counted(gateway, "output_tokens_total") == {(): 8}
    assert counted(gateway, "request_finishes_total") == {("stop",): 2}
    assert counted(gateway, "queue_duration_seconds") == {("granted",): 1}
    prompt = counted(gateway, "input_tokens_total")[()]
    assert prompt == len(gateway.backend.request.prompt_ids)


async def test_every_verdict_has_a_series_from_the_first_request_on(gateway: Any) -> None:
    await gateway.post(PATH, BODY)
    await gateway.settle()
    there = [
        (labels[2:], series.value)
        for metric, labels, series in gateway.metrics.series()
        if metric.name == "tailrace_slo_requests_total" and labels[3] == "false"
    ]
    assert sorted(there) == [((kind, "false"), 0) for kind in ("e2e", "itl", "queue", "ttft")]


async def test_a_late_answer_misses_and_is_no_goodput(gateway: Any) -> None:
    gateway.state.apply({"tiers": {"default": {"queue_s": None, "ttft_s": 1e-6, "itl_s": 1e-9}}})
    await gateway.post(PATH, BODY)
    await gateway.settle()
    assert counted(gateway, "slo_requests_total") == {
        ("ttft", "false"): 1,
        ("itl", "false"): 1,
        ("e2e", "true"): 1,
    }
    assert counted(gateway, "goodput_tokens_total") == {}
    assert counted(gateway, "output_tokens_total") == {(): 4}


async def test_no_room_misses_everything_and_tells_the_queue_why(gateway: Any) -> None:
    def full() -> None:
        raise Overloaded("no room", code="queue_full", retry_after_s=1.0)

    gateway.backend.before_open = full
    assert (await gateway.post(PATH, BODY)).status in (429, 503)
    await gateway.settle()
    assert counted(gateway, "slo_requests_total") == {
        (kind, "false"): 1 for kind in ("queue", "ttft", "itl", "e2e")
    }
    assert counted(gateway, "queue_duration_seconds") == {("queue_full",): 1}
    assert counted(gateway, "requests_offered_total") == {(): 1}
    assert counted(gateway, "goodput_requests_total") == {}


@pytest.mark.parametrize(
    ("body", "model"),
    [({**BODY, "model": "nobody's"}, "unknown"), ({**BODY, "n": 0}, "unknown"), ({}, "unknown")],
)
async def test_a_request_at_fault_is_offered_and_not_judged(
    gateway: Any, body: dict[str, Any], model: str
) -> None:
    assert 400 <= (await gateway.post(PATH, body)).status < 500
    await gateway.settle()
    assert counted(gateway, "requests_offered_total", model) == {(): 1}
    assert counted(gateway, "slo_requests_total", model) == {}
    assert counted(gateway, "requests_offered_total") == {}


async def test_who_leaves_while_waiting_is_counted_there_and_judged_by_what_passed(
    gateway: Any,
) -> None:
    waiting = asyncio.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.sleep(30)

    gateway.backend.before_open = wait
    gateway.state.apply({"tiers": {"default": {"queue_s": 1e-6, "ttft_s": 20.0}}})
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asyncio.wait_for(waiting.wait(), 240)
    writer.close()
    await gateway.settle()
    assert counted(gateway, "queue_duration_seconds") == {("cancelled",): 1}
    assert counted(gateway, "slo_requests_total") == {("queue", "false"): 1}
    assert counted(gateway, "goodput_requests_total") == {}


async def test_a_tier_without_targets_is_not_judged(gateway: Any) -> None:
    none = dict.fromkeys(("queue_s", "ttft_s", "itl_s", "e2e_s"))
    gateway.state.apply({"tiers": {"default": none}})
    await gateway.post(PATH, BODY)
    await gateway.settle()
    assert counted(gateway, "slo_requests_total") == {}
    assert counted(gateway, "requests_offered_total") == {(): 1}


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        *((200, Ending.ANSWERED), (499, Ending.LEFT), (400, Ending.REFUSED), (404, Ending.REFUSED)),
        *((413, Ending.REFUSED), (408, Ending.FAILED), (429, Ending.FAILED)),
        *((500, Ending.FAILED), (503, Ending.FAILED), (504, Ending.FAILED)),
    ],
)
def test_the_status_says_whose_fault_it_was(status: int, ending: Ending) -> None:
    assert ending_of(status) is ending


def test_the_mean_of_the_gaps_is_time_over_tokens_however_they_were_gathered_into_writes():
    itl = Histogram((0.01, 0.1))
    pace = Pace(itl)

    def tokens(count: int) -> list[StreamEvent]:
        return [StreamEvent(1, 0, "x" * count, range(count))]

    pace.count(0, tokens(1), 10.0)
    pace.count(0, tokens(1), 10.5)
    pace.count(0, tokens(3), 10.6)
    pace.hold(0, tokens(2))  # half a character
    pace.count(0, tokens(1), 11.6)
    # 1.6 s for the seven tokens behind the first, as a load generator counts that.
    assert (itl.count, itl.sum) == (7, pytest.approx(1.6))
    assert itl.counts == [0, 3, 4]


async def test_metrics_that_are_switched_off_stand_still_and_go_on_when_switched_on(
    gateway: Any,
) -> None:
    gateway.state.apply({**gateway.state.config.model_dump(), "metrics": False})
    assert (await gateway.post(PATH, BODY | {"stream": True})).status == 200
    await gateway.settle()
    assert not [labels for _, labels, _ in gateway.metrics.series() if "tiny" in labels]
    gateway.state.apply({**gateway.state.config.model_dump(), "metrics": True})
    assert (await gateway.post(PATH, BODY | {"stream": True})).status == 200
    await gateway.settle()
    assert counted(gateway, "request_ttft_seconds") == {("true",): 1}
    assert counted(gateway, "requests_total") == {("200",): 1}


async def test_only_prompts_that_were_taken_on_count_as_input(gateway: Any) -> None:
    def full() -> None:
        raise Overloaded("no room", code="queue_full", retry_after_s=1.0)

    gateway.backend.before_open = full
    assert (await gateway.post(PATH, BODY)).status == 429
    await gateway.settle()
    assert counted(gateway, "requests_offered_total") == {(): 1}
    assert counted(gateway, "input_tokens_total") == {}
    # Of several prompts, those that found room.
    calls = iter([None, full, None])

    def second_time() -> None:
        (next(calls) or (lambda: None))()

    gateway.backend.before_open = second_time
    body = {"model": "tiny", "prompt": [[1, 2], [3, 4, 5], [6, 7, 8, 9]]}
    assert (await gateway.post("/v1/completions", body)).status == 429
    await gateway.settle()
    assert counted(gateway, "input_tokens_total")[()] in (2, 2 + 4)


async def test_goodput_is_the_same_share_here_and_in_a_replay_of_the_same_outcomes(
    gateway: Any,
) -> None:
    """Over everything offered: six whole answers, one shed, one broken, one late, one left."""

    def fail(code: str) -> Any:
        def failing() -> None:
            raise Overloaded("no room", code=code, retry_after_s=1.0)

        return failing

    def broken() -> None:
        raise ValueError("a fault")

    gateway.state.live.checkpoint(0.0)
    for before_open in (*[None] * 6, fail("queue_full"), broken, fail("deadline_exceeded")):
        gateway.backend.before_open = before_open
        await gateway.post(PATH, BODY)
    waiting = asyncio.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.sleep(30)

    gateway.backend.before_open = wait
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    content = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await asyncio.wait_for(waiting.wait(), 240)
    writer.close()
    await gateway.settle()
    (tier,) = [t for t in gateway.state.live.snapshot(10.0)["tiers"] if t["model"] == "tiny"]
    outcomes = [
        *(outcome(i) for i in range(6)),
        *(failed(6 + i, result) for i, result in enumerate(("shed", "error", "timeout"))),
        outcome(9, result="disconnected"),
    ]
    slo = {"*": Targets(ttft_s=1.0)}
    shares = {each["multiple"]: each["share"] for each in goodput_by_multiple(outcomes, slo)}
    assert tier["good_ratio"] == shares[1.0] == 0.6
