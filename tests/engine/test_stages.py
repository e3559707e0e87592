"""An engine over the stages of a pipeline, which have a plan each under way."""

import time
from collections import deque
from dataclasses import replace

import pytest

from engine.build import assemble
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.engine import Engine
from engine.models.fake import FakeModel
from engine.request import FinishReason, Request, SamplingParams
from engine.sampling.sampler import UnusableLogits
from engine.text.text_model import load_text


class Stages:
    """A `StagedExecutor` over one that computes at once. Whoever samples for `faulty` fails."""

    depth = 2

    def __init__(self, executor):
        self.executor = executor
        self.under_way = deque()
        self.seen = []
        self.faulty = None

    def submit(self, plan):
        sampled = [chunk.request_id for chunk in plan.chunks if chunk.sample]
        if self.faulty in sampled:
            kept = tuple(replace(chunk, sample=False) for chunk in plan.chunks)
            self.executor.execute(replace(plan, chunks=kept))
            self.under_way.append(UnusableLogits(self.faulty, 4, float("nan")))
        else:
            self.under_way.append(self.executor.execute(plan))
        assert len(self.under_way) <= self.depth
        self.seen.append((len(self.under_way), sampled))

    def collect(self):
        result = self.under_way.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def execute(self, plan):
        self.submit(plan)
        return self.collect()

    def close(self):
        self.executor.close()


def build(stages, *, clock=time.monotonic, **limits):
    """An engine whose executor `stages` makes of the plain one."""
    config = EngineConfig(
        model=ModelConfig(name="m", source="fake"),
        max_context_tokens=256,
        block_tokens=8,
        num_blocks=limits.pop("num_blocks", 100),
        scheduler=SchedulerConfig(**limits),
    )
    plain = assemble(config, FakeModel(), load_text("fake").tokenizer).engine
    return Engine(
        plain.config,
        scheduler=plain._scheduler,
        blocks=plain.blocks,
        executor=stages(plain._executor),
        pool=plain.pool,
        tokenizer=plain.tokenizer,
        layout=plain.layout,
        vocab_size=plain.vocab_size,
        max_context_tokens=plain.max_context_tokens,
        clock=clock,
    )


def request(name, length=9, max_tokens=12):
    return Request(
        request_id=name,
        prompt_ids=tuple((7 * len(name) + i * i) % 90 + 32 for i in range(length)),
        params=SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=len(name)
        ),
    )


REQUESTS = [request("a" * n, length) for n, length in enumerate([9, 70, 3, 41, 12], start=1)]


def drive(engine):
    """Step until nothing is left: tokens and ends by request."""
    tokens, ends = {}, {}
    while (step := engine.step()) is not None:
        engine.check()
        for output in step.outputs:
            assert output.request_id not in ends, "an output after the last"
            if output.token is not None:
                tokens.setdefault(output.request_id, []).append(output.token.token_id)
            if output.finish is not None:
                ends[output.request_id] = output.finish
    assert engine.stats().num_held_blocks == 0
    return tokens, ends


@pytest.fixture(scope="module")
def plainly():
    engine = build(lambda executor: executor)
    for each in REQUESTS:
        engine.submit(each)
    return drive(engine)


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_chunk_tokens": 5, "max_step_tokens": 9}, {"num_blocks": 13}],
    ids=["roomy", "chunks of 5", "few blocks"],
)
def test_stages_get_requests_of_their_own_and_tokens_are_the_same(plainly, limits):
    engine = build(Stages, **limits)
    for each in REQUESTS:
        engine.submit(each)
    assert drive(engine) == plainly
    stages = engine._executor
    assert max(count for count, _ in stages.seen) == 2
    for (_, before), (count, sampled) in zip(stages.seen, stages.seen[1:], strict=False):
        assert count == 1 or not set(before) & set(sampled)


def test_logits_without_a_token_end_their_request_while_others_are_under_way(plainly):
    tokens, ends = plainly
    engine = build(Stages, max_chunk_tokens=5)
    for each in REQUESTS:
        engine.submit(each)
    engine._executor.faulty = "aaa"
    got, ended = drive(engine)
    assert ended == {**ends, "aaa": FinishReason.ERROR}
    assert got == {name: tokens[name] for name in tokens if name != "aaa"}


def test_a_request_that_leaves_while_a_stage_computes_it_gives_its_blocks_back(plainly):
    tokens, _ = plainly
    engine = build(Stages)
    for each in REQUESTS:
        engine.submit(each)
    engine.step()  # every prompt; then each stage has its share
    engine.step()
    assert len(engine._executor.under_way) == 1
    for name in ("a", "aa", "aaa", "aaaa"):
        assert engine.cancel(name)
    got, _ = drive(engine)
    assert got == {"aaaaa": tokens["aaaaa"][-len(got["aaaaa"]) :]}
    assert len(got["aaaaa"]) >= 10


def test_steps_of_stages_do_not_count_the_same_time_twice():
    now = 0.0

    class Slow(Stages):
        def collect(self):
            nonlocal now
            now += 1.0
            return super().collect()

    engine = build(Slow, clock=lambda: now)
    observed = []
    cost = engine._scheduler.cost
    cost.observe = lambda work, seconds: observed.append(seconds)
    for each in REQUESTS:
        engine.submit(each)
    durations = []
    while (step := engine.step()) is not None:
        durations.append(step.duration_s)
    assert durations == [1.0] * int(now)
    # What a stream waits for its token is another matter.
    assert observed[0] == 1.0
    assert observed.count(2.0) > len(durations) / 2
