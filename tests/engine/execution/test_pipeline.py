"""Passes one after another on a thread of their own."""

import queue
import threading

import pytest

from engine.execution.pipeline import Pipeline
from engine.request import SampledToken
from engine.scheduling.plan import StepPlan, StepResult

PATIENCE_S = 120.0
"""For another thread of a busy machine."""


class Gated:
    """An executor whose passes end when the test says so."""

    def __init__(self):
        self.begun = queue.Queue()
        self.gates = queue.Queue()

    def execute(self, plan):
        raise AssertionError("the pipeline takes plans in two parts")

    def prepare(self, plan):
        return f"inputs of {plan.left[0]}"

    def run(self, prepared, last):
        self.begun.put((prepared, last.tokens.get("a"), threading.current_thread().name))
        outcome = self.gates.get(timeout=PATIENCE_S)
        if isinstance(outcome, Exception):
            raise outcome
        return StepResult({"a": SampledToken(outcome)})

    def close(self):
        pass


def plan(name):
    return StepPlan(chunks=(), left=(name,))


@pytest.fixture
def parts():
    executor, told = Gated(), queue.Queue()
    pipeline = Pipeline(executor, lambda: told.put(None))
    yield executor, pipeline, told
    for _ in range(3):
        executor.gates.put(0)
    pipeline.close()


def begun(executor):
    return executor.begun.get(timeout=PATIENCE_S)


def end(executor, told, outcome):
    executor.gates.put(outcome)
    told.get(timeout=PATIENCE_S)


def test_the_next_pass_begins_with_the_tokens_of_the_last_though_nobody_took_them(parts):
    executor, pipeline, told = parts
    assert pipeline.idle
    pipeline.put(plan("one"))
    assert begun(executor) == ("inputs of one", None, "passes")
    pipeline.put(plan("two"))
    assert pipeline.take_landed() is None
    end(executor, told, 7)
    assert begun(executor) == ("inputs of two", SampledToken(7), "passes")
    landed = pipeline.take_landed()
    assert (landed.plan, landed.error) == (plan("one"), None)
    assert landed.result.tokens == {"a": SampledToken(7)}
    assert pipeline.take_landed() is None
    end(executor, told, 8)
    assert not pipeline.idle
    assert pipeline.take_landed().result.tokens == {"a": SampledToken(8)}
    assert pipeline.idle


def test_a_plan_that_waits_is_taken_back_and_one_that_began_is_not(parts):
    executor, pipeline, told = parts
    pipeline.put(plan("one"))
    assert pipeline.take_back() is None
    pipeline.put(plan("two"))
    assert pipeline.take_back() == plan("two")
    assert pipeline.take_back() is None
    pipeline.put(plan("three"))
    begun(executor)
    end(executor, told, 1)
    assert begun(executor)[0] == "inputs of three"


def test_a_pass_that_raises_stops_those_behind_it_until_they_are_judged(parts):
    executor, pipeline, told = parts
    pipeline.put(plan("one"))
    begun(executor)
    pipeline.put(plan("two"))
    end(executor, told, ValueError("of one"))
    landed = pipeline.take_landed()
    assert (landed.plan, landed.result, str(landed.error)) == (plan("one"), None, "of one")
    assert pipeline.take_back() == plan("two")
    pipeline.put(plan("three"))
    assert executor.begun.empty()
    assert pipeline.take_back() == plan("three")
    pipeline.resume()
    pipeline.put(plan("four"))
    assert begun(executor)[0] == "inputs of four"
    end(executor, told, 1)
    assert pipeline.take_landed().error is None


def test_closed_it_lets_the_pass_under_way_end_and_begins_no_other(parts):
    executor, pipeline, _ = parts
    pipeline.put(plan("one"))
    begun(executor)
    pipeline.put(plan("two"))
    executor.gates.put(1)
    pipeline.close()
    assert pipeline._thread is not None
    assert not pipeline._thread.is_alive()
    pipeline.close()
