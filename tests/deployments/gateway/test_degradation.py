import asyncio
import time

import pytest
from pydantic import ValidationError

from deployments.gateway.config import GatewayConfig
from deployments.gateway.degradation import HOLD_S, Ladder, Step, Waits, check_ladder
from deployments.logs import request_line
from engine.errors import ConfigError, Overloaded

STEPS = (
    Step(action="shorten", above=2, max_tokens=10),
    Step(action="drop_extras", above=4, below=3),
    Step(action="shed", above=8),
)


def actions(ladder, pressure, now):
    return [step.action for step in ladder.steps(STEPS, pressure, now)]


def test_it_climbs_at_once_as_far_as_the_pressure_goes():
    ladder = Ladder()
    assert actions(ladder, 1.9, 0.0) == []
    assert actions(ladder, 4.0, 0.0) == ["shorten", "drop_extras"]
    assert actions(ladder, 100.0, 0.0) == ["shorten", "drop_extras", "shed"]


def test_it_comes_down_one_by_one_below_the_lower_border_and_not_before_the_hold():
    ladder = Ladder()
    actions(ladder, 9.0, 0.0)
    assert len(actions(ladder, 0.0, HOLD_S - 0.1)) == 3
    assert len(actions(ladder, 4.5, HOLD_S)) == 3  # below 8, not below 4
    assert len(actions(ladder, 3.5, HOLD_S)) == 2
    assert len(actions(ladder, 2.9, HOLD_S + 0.1)) == 2
    assert len(actions(ladder, 2.9, 2 * HOLD_S)) == 1
    assert len(actions(ladder, 0.9, 3 * HOLD_S)) == 0


def test_pressure_that_swings_around_a_border_does_not_flap():
    ladder, changes, level = Ladder(), 0, 0
    for i in range(200):
        found = len(actions(ladder, 2.1 if i % 2 else 1.9, 0.1 * i))
        changes += found != level
        level = found
    assert changes == 1


def test_a_shorter_ladder_takes_effect_at_once():
    ladder = Ladder()
    actions(ladder, 9.0, 0.0)
    assert ladder.steps(STEPS[:1], 9.0, 0.1) == STEPS[:1]


def test_the_wait_is_that_of_late_or_of_who_waits_now():
    waits = Waits()
    assert waits.seconds(0.0) == 0.0
    for i in range(50):
        waits.ended(waits.began(i * 0.1), i * 0.1 + 0.4)
    assert waits.seconds(5.4) == pytest.approx(0.4, rel=0.05)
    ticket = waits.began(6.0)
    assert waits.seconds(9.0) == 3.0
    waits.ended(ticket, 9.0)
    waits.ended(ticket, 50.0)  # once is enough
    assert 0.4 < waits.seconds(9.0) < 3.0


def test_a_wait_is_forgotten_when_nobody_comes_any_more():
    waits = Waits()
    for i in range(20):
        waits.ended(waits.began(float(i)), i + 30.0)
    assert waits.seconds(50.0) > 20
    assert waits.seconds(120.0) < 0.1


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"action": "shorten", "above": 1}, "needs max_tokens"),
        ({"action": "shed", "above": 1, "tier": "batch"}, "has no tier"),
        ({"action": "model", "above": 1}, "needs model"),
        ({"action": "shed", "above": 1, "below": 2}, "below=2 is over above=1"),
        ({"action": "shed", "above": 0}, "greater than 0"),
    ],
)
def test_a_step_that_cannot_work_is_refused(step, says):
    with pytest.raises(ValidationError, match=says):
        Step.model_validate(step)


def test_steps_follow_each_other():
    with pytest.raises(ValueError, match="nothing comes after 'shed'"):
        check_ladder([STEPS[2], Step(action="drop_extras", above=9)])
    with pytest.raises(ValueError, match="order them by pressure"):
        check_ladder([STEPS[1], STEPS[0]])


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"action": "defer", "above": 1, "tier": "gold"}, "no tier 'gold'"),
        ({"action": "model", "above": 1, "model": "gold"}, "no model 'gold'"),
    ],
)
def test_what_a_ladder_names_must_be_there(step, says):
    tiers = {"default": {"ladder": [step]}}
    with pytest.raises(ConfigError, match=says):
        GatewayConfig.parse({"tiers": tiers})


def test_a_ladder_needs_a_queue_target():
    tiers = {"default": {"queue_s": None, "ladder": [{"action": "shed", "above": 1}]}}
    with pytest.raises(ConfigError, match="needs queue_s"):
        GatewayConfig.parse({"tiers": tiers})


PATH = "/v1/completions"


def press(gateway, seconds, tier="default"):
    """Requests of this tier wait this long."""
    waits, _ = gateway.state.pressures.of("tiny", tier)
    now = time.monotonic()
    for _ in range(50):
        waits.ended(waits.began(now - seconds), now)


def body(**fields):
    return {"model": "tiny", "prompt": "a b", "max_tokens": 50, **fields}


def ladder(*steps):
    return {
        "models": [{"name": "tiny", "app": "tiny"}, {"name": "small", "app": "small"}],
        "tiers": {"default": {"ladder": steps}, "batch": {"rank": 30}},
    }


async def test_nothing_is_given_up_without_pressure(gateway):
    gateway.state.apply(ladder({"action": "shorten", "above": 2, "max_tokens": 10}))
    answer = await gateway.post(PATH, body())
    assert "x-tailrace-degraded" not in answer.headers
    assert gateway.backend.opened[-1][1].params.max_tokens == 50


async def test_a_pressed_tier_shortens_and_drops_extras_and_says_so(gateway):
    gateway.state.apply(
        ladder(
            {"action": "shorten", "above": 2, "max_tokens": 10},
            {"action": "drop_extras", "above": 3},
        )
    )
    press(gateway, 4.0)
    answer = await gateway.post(PATH, body(n=3, logprobs=2, min_tokens=20))
    assert answer.headers["x-tailrace-degraded"] == "shorten, drop_extras"
    _, request, n, _ = gateway.backend.opened[-1]
    assert (request.params.max_tokens, request.params.min_tokens, n) == (10, 10, 1)
    assert len(answer.json()["choices"]) == 1
    # What asks for less than that anyway loses nothing, and is told nothing.
    press(gateway, 4.0)
    modest = await gateway.post(PATH, body(max_tokens=5))
    assert "x-tailrace-degraded" not in modest.headers
    assert gateway.state.pressures.done == {
        ("tiny", "default", "shorten"): 1,
        ("tiny", "default", "drop_extras"): 1,
    }


async def test_a_smaller_model_answers_where_there_is_one(gateway):
    gateway.state.apply(ladder({"action": "model", "above": 2, "model": "small"}))
    press(gateway, 4.0)
    # Configured but served by nobody yet: the asked one answers.
    assert (await gateway.post(PATH, body())).json()["model"] == "tiny"
    gateway.backend.serve("small")
    press(gateway, 4.0)
    answer = await gateway.post(PATH, body())
    assert answer.json()["model"] == "small"
    assert answer.headers["x-tailrace-degraded"] == "model"


async def test_work_is_deferred_to_another_tier(gateway):
    gateway.state.apply(ladder({"action": "defer", "above": 2, "tier": "batch"}))
    press(gateway, 4.0)
    answer = await gateway.post(PATH, body())
    assert answer.json()["service_tier"] == "batch"
    assert gateway.backend.opened[-1][1].priority == 30
    assert gateway.backend.places[-1].tier == "batch"


async def test_load_is_shed_at_last_and_optional_work_before(gateway):
    steps = ({"action": "drop_extras", "above": 2}, {"action": "shed", "above": 8})
    gateway.state.apply(ladder(*steps))
    press(gateway, 4.0)
    refused = await gateway.post(PATH, body(tailrace={"optional": True}))
    assert (refused.status, refused.error["code"]) == (429, "slow_down")
    assert (await gateway.post(PATH, body())).status == 200
    press(gateway, 40.0)
    shed = await gateway.post(PATH, body())
    assert (shed.status, shed.error["code"]) == (429, "slow_down")
    assert int(shed.headers["retry-after"]) >= 8
    assert refused.headers["x-tailrace-degraded"] == "drop_extras"
    assert "refuses what clients call optional" in refused.error["message"]
    assert shed.headers["x-tailrace-degraded"] == "shed"
    assert gateway.state.pressures.done == {
        ("tiny", "default", "drop_extras"): 1,
        ("tiny", "default", "shed"): 1,
    }
    # Who is turned away was offered to that model, and its targets were missed.
    offered, missed = (
        {
            labels["model"]: value
            for _, labels, value in gateway.state.metrics.family(name)
            if labels.get("slo", "ttft") == "ttft" and labels.get("met", "false") == "false"
        }
        for name in ("tailrace_requests_offered_total", "tailrace_slo_requests_total")
    )
    assert offered == {"tiny": 3}
    assert missed == {"tiny": 2}


async def test_what_was_done_is_in_the_explanation(gateway):
    gateway.state.apply(ladder({"action": "shorten", "above": 2, "max_tokens": 10}))
    press(gateway, 4.0)
    await gateway.post(PATH, body(), headers={"x-request-id": "short"})
    await gateway.settle()
    told = await gateway.raw("GET", "/tailrace/explain/short")
    assert told.json()["degradations"][0]["action"] == "shorten"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_done_is_told_with_a_failure_too(gateway, stream):
    gateway.state.apply(ladder({"action": "shorten", "above": 2, "max_tokens": 10}))
    gateway.backend.script = lambda request, n: [Overloaded("no room", code="queue_timeout")]
    press(gateway, 4.0)
    failed = await gateway.post(PATH, body(stream=stream))
    assert (failed.status, failed.error["code"]) == (429, "queue_timeout")
    assert failed.headers["x-tailrace-degraded"] == "shorten"


async def test_the_log_line_names_each_thing_that_was_given_up(gateway):
    steps = (
        {"action": "shorten", "above": 2, "max_tokens": 10},
        {"action": "drop_extras", "above": 3},
        {"action": "shed", "above": 8},
    )
    gateway.state.apply(ladder(*steps))
    lines = []
    gateway.state.lines.write = lambda record, body: lines.append(request_line(record))
    await gateway.post(PATH, body(n=2))
    for wait_s, fields in ((4.0, {"n": 2}), (4.0, {"tailrace": {"optional": True}}), (40.0, {})):
        press(gateway, wait_s)
        await gateway.post(PATH, body(**fields))
    await gateway.settle()
    assert [line.get("degraded") for line in lines] == [
        None,
        ["shorten", "drop_extras"],
        ["drop_extras"],
        ["shed"],
    ]
    assert all("notes" not in line for line in lines)


@pytest.mark.parametrize(
    ("step", "model", "tier"),
    [
        ({"action": "defer", "above": 2, "tier": "batch"}, "tiny", "batch"),
        ({"action": "model", "above": 2, "model": "small"}, "small", "default"),
    ],
)
async def test_who_was_sent_elsewhere_is_no_pressure_on_what_it_left(gateway, step, model, tier):
    gateway.state.apply(ladder(step))
    gateway.backend.serve("small")
    press(gateway, 4.0)
    gate = asyncio.Event()
    gateway.backend.before_open = gate.wait
    asked = asyncio.create_task(gateway.post(PATH, body()))
    while not gateway.backend.opened:
        await asyncio.sleep(0.005)
    left, _ = gateway.state.pressures.of("tiny", "default")
    there, _ = gateway.state.pressures.of(model, tier)
    soon = time.monotonic() + 1000.0  # by then nothing is remembered but who waits
    waiting = (there.seconds(soon), left.seconds(soon))
    gate.set()
    assert (await asked).headers["x-tailrace-degraded"] == step["action"]
    assert waiting[0] > 990.0
    assert waiting[1] < 1.0
