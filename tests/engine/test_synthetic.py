"""The engine without a model keeps its slots as the real one does."""

import pytest

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import Overloaded
from engine.request import Request, SamplingParams
from engine.synthetic import SyntheticEngine
from engine.text.text_model import load_text


def build(slots: int, waiting: int = 10) -> SyntheticEngine:
    scheduler = SchedulerConfig(max_running_requests=slots, max_waiting_requests=waiting)
    config = EngineConfig(model=ModelConfig(name="s", source="synthetic"), scheduler=scheduler)
    return SyntheticEngine(config, load_text("synthetic").tokenizer, tick_s=0.0)


def submit(engine: SyntheticEngine, name: str, priority: int = 0, **request) -> None:
    params = SamplingParams(max_tokens=request.pop("max_tokens", 3))
    engine.submit(
        Request(request_id=name, prompt_ids=(1,), params=params, priority=priority, **request)
    )


def ticks(engine: SyntheticEngine) -> list[list[str]]:
    """Who got a token, by step, until nobody runs."""
    steps = []
    while (step := engine.step()) is not None:
        steps.append([output.request_id for output in step.outputs])
    return steps


def test_who_finds_no_slot_waits_and_follows_in_order():
    engine = build(2)
    for name in ("a", "b", "c"):
        submit(engine, name, max_tokens=2)
    assert ticks(engine) == [["a", "b"], ["a", "b"], ["c"], ["c"]]


def test_an_urgent_one_starts_at_the_next_step_and_who_made_way_comes_back_whole():
    engine = build(2)
    for name in ("b1", "b2", "b3"):
        submit(engine, name, 30)
    assert [output.request_id for output in engine.step().outputs] == ["b1", "b2"]
    submit(engine, "urgent", 0)
    step = engine.step()
    assert sorted(output.request_id for output in step.outputs) == ["b1", "urgent"]
    assert step.preempted == ("b2",)
    assert engine.stats().num_preemptions == 1
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 2)
    later = [name for step in ticks(engine) for name in step]
    # Three tokens each: what was computed before counts.
    assert {name: later.count(name) for name in ("b1", "b2", "b3", "urgent")} == {
        "b1": 1,
        "b2": 2,
        "b3": 3,
        "urgent": 2,
    }
    assert later.index("b2") < later.index("b3"), "its peers overtook it"


def test_neither_equals_nor_protected_ones_make_way():
    engine = build(1)
    submit(engine, "a", 10, max_tokens=1)
    submit(engine, "b", 10, max_tokens=1)
    submit(engine, "kept", 30, preemptible=False, max_tokens=2)
    assert ticks(engine)[:2] == [["a"], ["b"]]
    submit(engine, "kept", 30, preemptible=False, max_tokens=2)
    engine.step()
    submit(engine, "urgent", 0, max_tokens=1)
    assert ticks(engine) == [["kept"], ["urgent"]]


def test_it_is_full_when_as_many_wait_as_may():
    engine = build(1, waiting=1)
    submit(engine, "a")
    submit(engine, "b")
    with pytest.raises(Overloaded, match="1 requests are running and 1 wait"):
        submit(engine, "c")


def test_new_limits_hold_from_the_next_tick_on_and_who_has_a_slot_keeps_it():
    engine = build(1)
    for name in ("a", "b", "c"):
        submit(engine, name)
    assert [output.request_id for output in engine.step().outputs] == ["a"]
    engine.reconfigure(SchedulerConfig(max_running_requests=2, max_waiting_requests=1))
    assert [output.request_id for output in engine.step().outputs] == ["a", "b"]
    with pytest.raises(Overloaded):
        submit(engine, "d")
    engine.reconfigure(SchedulerConfig(max_running_requests=1))
    assert ticks(engine) == [["a", "b"], ["b"], ["c"], ["c"], ["c"]]
