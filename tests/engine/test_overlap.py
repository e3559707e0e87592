"""Steps that are planned while others are computed, seen from outside the engine."""

import gc
import queue
import threading
import time

import pytest

from engine.build import assemble
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.fake import FakeModel
from engine.request import FinishReason, Request, SamplingParams
from engine.sampling.sampler import UnusableLogits
from engine.text.text_model import load_text

PATIENCE_S = 120.0
"""For another thread of a busy machine."""


class Watched:
    """The executor of an engine, which may be held before each pass, and may fail."""

    def __init__(self, executor):
        self.executor = executor
        self.held = False
        self.begun = queue.Queue()
        self.go = queue.Queue()
        self.faulty = None

    def prepare(self, plan):
        return plan, self.executor.prepare(plan)

    def run(self, prepared, last):
        plan, inputs = prepared
        names = [chunk.request_id for chunk in plan.chunks]
        if self.held:
            self.begun.put(names)
            self.go.get(timeout=PATIENCE_S)
        if self.faulty in names:
            raise UnusableLogits(self.faulty, 4, float("nan"))
        return self.executor.run(inputs, last)


def build(**limits):
    model = FakeModel()
    config = EngineConfig(
        model=ModelConfig(name="m", source="fake"),
        max_context_tokens=256,
        block_tokens=8,
        num_blocks=limits.pop("num_blocks", 100),
        scheduler=SchedulerConfig(**{"overlap": True, **limits}),
    )
    return assemble(config, model, load_text("fake").tokenizer).engine


@pytest.fixture
def engine():
    engine = build()
    yield engine
    engine.close()
    engine.check()


def watch(engine):
    assert engine._pipeline is not None
    watched = Watched(engine._pipeline._executor)
    engine._pipeline._executor = watched
    return watched


def request(name, max_tokens=8, **params):
    return Request(
        request_id=name,
        prompt_ids=tuple(b"A prompt of " + name.encode()),
        params=SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **params}),
    )


def drive(engine):
    """Step until nothing is left. Returns ids, tokens and ends, and each one's text."""
    tokens, texts, ends = {}, {}, {}
    while (step := engine.step()) is not None:
        engine.check()
        for output in step.outputs:
            assert output.request_id not in ends, "an output after the last"
            if output.token is not None:
                tokens.setdefault(output.request_id, []).append(output.token.token_id)
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            if output.finish is not None:
                ends[output.request_id] = output.finish
    assert engine.stats().num_held_blocks == 0
    return tokens, texts, ends


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.001)


def plainly(*requests):
    engine = build(overlap=False)
    for each in requests:
        engine.submit(each)
    return drive(engine)


def test_all_steps_but_the_first_are_planned_ahead(engine):
    want = plainly(request("a"))
    watched = watch(engine)
    watched.held = True
    engine.submit(request("a"))
    pipeline = engine._pipeline

    def let_end():
        """Each pass once the next waits behind it, and the last one at once."""
        for number in range(8):
            watched.begun.get(timeout=PATIENCE_S)
            until(lambda last=number == 7: last or pipeline._next is not None)
            watched.go.put(None)

    thread = threading.Thread(target=let_end)
    thread.start()
    assert drive(engine) == want
    thread.join(PATIENCE_S)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_steps_ahead, stats.num_discarded_rows) == (8, 7, 0)


def test_a_stop_string_ends_a_request_whose_next_row_is_under_way(engine):
    _, texts, _ = plainly(request("a", 30))
    stop = texts["a"][5:8]
    want = plainly(request("a", 30, stop=(stop,)), request("b", 30))
    watch(engine)
    for each in (request("a", 30, stop=(stop,)), request("b", 30)):
        engine.submit(each)
    assert drive(engine) == want
    assert want[2] == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}
    # Whether the row was planned in time is the machine's business; more than one it never is.
    assert engine.stats().num_discarded_rows <= 1


def test_who_comes_while_a_pass_runs_is_in_the_next_one(engine):
    watched = watch(engine)
    watched.held = True
    engine.submit(request("a", 3))
    done = []
    thread = threading.Thread(target=lambda: done.append(drive(engine)))
    thread.start()
    assert watched.begun.get(timeout=PATIENCE_S) == ["a"]
    pipeline = engine._pipeline
    until(lambda: pipeline._next is not None)
    engine.submit(request("b", 2))
    # The plan without "b" is recalled.
    until(lambda: (waiting := pipeline._next) is not None and len(waiting[0].chunks) == 2)
    watched.go.put(None)
    assert watched.begun.get(timeout=PATIENCE_S) == ["a", "b"]
    watched.held = False
    watched.go.put(None)
    thread.join(PATIENCE_S)
    want = plainly(request("a", 3), request("b", 2))
    assert done == [want]


def test_cancelled_while_its_row_is_under_way_it_is_heard_of_no_more(engine):
    watched = watch(engine)
    watched.held = True
    for name in ("a", "b"):
        engine.submit(request(name, 6))
    done = []
    thread = threading.Thread(target=lambda: done.append(drive(engine)))
    thread.start()
    watched.begun.get(timeout=PATIENCE_S)
    assert engine.cancel("a")
    watched.held = False
    watched.go.put(None)
    thread.join(PATIENCE_S)
    tokens, _, ends = done[0]
    assert tokens == {"b": plainly(request("b", 6))[0]["b"]}
    assert ends == {"b": FinishReason.LENGTH}


def test_a_request_without_usable_logits_ends_alone_and_once(engine):
    watched = watch(engine)
    for name in ("a", "b", "c"):
        engine.submit(request(name))
    seen = []
    for _ in range(3):
        seen += engine.step().outputs
    watched.faulty = "b"
    tokens, _, ends = drive(engine)
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    for name in ("a", "c"):
        first = [o.token.token_id for o in seen if o.request_id == name]
        assert first + tokens[name] == plainly(request(name))[0][name]


def test_a_pass_that_fails_fails_the_step(engine):
    watched = watch(engine)
    engine.submit(request("a"))
    engine.step()

    def run(prepared, last):
        raise OSError("the device is gone")

    watched.run = run
    with pytest.raises(OSError, match="the device is gone"):
        drive(engine)


def test_overlap_is_switched_while_passes_are_under_way():
    engine = build(overlap=False)
    requests = [request("a", 20), request("b", 24, temperature=1.0, seed=5)]
    for each in requests:
        engine.submit(each)
    want = plainly(*requests)
    got = {"a": [], "b": []}
    for number in range(200):
        if number % 4 == 0:
            engine.reconfigure(SchedulerConfig(overlap=number % 8 == 0))
        step = engine.step()
        if step is None:
            break
        for output in step.outputs:
            got[output.request_id].append(output.token.token_id)
    assert got == want[0]
    assert engine.stats().num_held_blocks == 0
    engine.close()


def test_an_executor_that_takes_whole_plans_refuses_overlap():
    plain = build(overlap=False)

    class Ranks:
        def execute(self, plan):
            raise AssertionError

        def close(self):
            pass

    engine = Engine(
        plain.config,
        scheduler=plain._scheduler,
        blocks=plain.blocks,
        executor=Ranks(),
        pool=plain.pool,
        tokenizer=plain.tokenizer,
        layout=plain.layout,
        vocab_size=plain.vocab_size,
        max_context_tokens=plain.max_context_tokens,
    )
    with pytest.raises(ConfigError, match=r"overlap=True: .* leave it out"):
        engine.reconfigure(SchedulerConfig(overlap=True, max_running_requests=3))
    assert engine._scheduler.config.max_running_requests == 64
    assert not engine.overlaps


def test_an_engine_that_nobody_holds_ends_its_thread():
    engine = build()
    engine.submit(request("a", 2))
    drive(engine)
    thread = engine._pipeline._thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
