"""The coordinator against ranks that are made up: wrong answers, no answers, too many."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from engine.execution.ranks.channel import Channel, ChannelError, Kind
from engine.execution.ranks.executor import RankExecutor, RankFailed
from engine.execution.ranks.wire import PlanReader
from engine.models.shard import Grid
from engine.request import SampledToken
from engine.sampling.sampler import UnusableLogits
from engine.scheduling.plan import Chunk, StepPlan

PLAN = StepPlan(
    chunks=(Chunk(request_id="a", first_token=0, token_ids=(1, 2), blocks=(3,), sample=True),)
)


class Processes:
    def __init__(self, ranks):
        self.ranks = ranks
        self.kills = 0

    def failures(self):
        return ["rank 1 ended with status -9"] if self.kills == 0 else []

    def kill(self):
        self.kills += 1
        for rank in self.ranks:
            rank.close()


def done(number, tokens=None):
    return [Kind.DONE, number, tokens]


def sampled(number):
    return done(number, [("a", [7, None, []])])


PATIENT_S = 240.0
"""These ranks send no signs of life: a busy machine may keep them from answering for seconds."""


class Group:
    """An executor over two ranks, each answering a step with what `answers[rank](number)` says."""

    def __init__(self, *answers, stages=1, silence_s=PATIENT_S):
        pairs = [socket.socketpair() for _ in answers]
        self.ranks = [Channel(there) for _, there in pairs]
        here = [Channel(own) for own, _ in pairs]
        for channel in (*self.ranks, *here):
            channel.max_frame_bytes = 1 << 20
        self.processes = Processes(self.ranks)
        self.plans, self.cuts = [], []
        for rank, answer in zip(self.ranks, answers, strict=True):
            threading.Thread(target=self._serve, args=(rank, answer), daemon=True).start()
        grid = Grid(tensor_parallel=len(answers) // stages, pipeline_parallel=stages)
        self.executor = RankExecutor(here, self.processes, grid, silence_s=silence_s)

    def _serve(self, rank, answer):
        plans = PlanReader()
        try:
            while True:
                _, number, wire, cut = rank.receive()
                self.cuts.append(cut)
                self.plans.append(plans.from_wire(wire))
                for message in answer(number):
                    rank.send(message)
        except ChannelError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.close()
        for rank in self.ranks:
            rank.close()


def test_a_step_ends_when_every_rank_has_answered():
    late = threading.Event()

    def slow(number):
        late.wait(5)
        return [[Kind.BEAT], done(number)]

    with Group(lambda n: [sampled(n)], slow) as group:
        threading.Timer(0.2, late.set).start()
        assert group.executor.execute(PLAN).tokens == {"a": SampledToken(7)}
        assert late.is_set()
        assert group.executor.execute(PLAN).tokens == {"a": SampledToken(7)}
        assert group.plans == [PLAN] * 4


def test_unusable_logits_are_told_of_their_request_and_the_group_goes_on():
    answers = iter([[Kind.UNUSABLE, 1, "a", 2, float("inf")], sampled(2)])
    with Group(lambda n: [next(answers)], lambda n: [done(n)]) as group:
        with pytest.raises(UnusableLogits, match="request a") as caught:
            group.executor.execute(PLAN)
        assert (caught.value.request_id, caught.value.position) == ("a", 2)
        assert group.executor.execute(PLAN).tokens == {"a": SampledToken(7)}


def test_steps_of_two_stages_are_under_way_together():
    go_on = threading.Event()

    def last(number):
        go_on.wait(5)
        return [[Kind.UNUSABLE, 1, "a", 2, float("inf")] if number == 1 else sampled(number)]

    with Group(lambda n: [done(n)], last, stages=2) as group:
        group.executor.submit(PLAN)
        group.executor.submit(PLAN)
        # The first stage has answered both before the last one has answered any.
        deadline = time.monotonic() + 10
        while len(group.plans) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        go_on.set()
        with pytest.raises(UnusableLogits, match="request a"):
            group.executor.collect()
        assert group.executor.collect().tokens == {"a": SampledToken(7)}
        assert group.executor.execute(PLAN).tokens == {"a": SampledToken(7)}
        # Only a step that nothing else keeps the stages busy beside is cut.
        assert sorted(group.cuts) == [False] * 2 + [True] * 4


def garbage(n):
    return [["not", "a", "kind"]]


def twice(group):
    for _ in range(2):  # an answer too many may come after its step
        group.executor.execute(PLAN)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda n: [done(n + 1)], "an answer of kind 21 to no question"),
        (lambda n: [done(n), done(n)], "answered twice|to no question"),
        (lambda n: [[Kind.DONE]], "an answer of kind 21 to no question"),
        (lambda n: [[Kind.UNUSABLE, n]], "an answer of kind 22 to no question"),
        (lambda n: [[Kind.READY, {}]], "an answer of kind 10 to no question"),
        (lambda n: [[Kind.FAILED, "RuntimeError: no more memory"]], "failed: .*no more memory"),
        (garbage, "malformed frame: kind 'not' is not known"),
    ],
)
def test_a_rank_that_does_not_keep_to_the_protocol_ends_the_group(answer, said):
    with Group(lambda n: [sampled(n)], answer) as group:
        heard = []
        group.executor.on_failure = heard.append
        with pytest.raises(RankFailed, match=said):
            twice(group)
        assert group.processes.kills == 1
        assert heard == [group.executor.failure]
        assert "status -9" in str(heard[0])
        with pytest.raises(RankFailed, match=said):
            group.executor.execute(PLAN)


def test_a_rank_that_is_silent_ends_the_group():
    with Group(lambda n: [sampled(n)], lambda n: [], silence_s=1.0) as group:
        with pytest.raises(RankFailed, match=r"not heard of for \d+ s"):
            group.executor.execute(PLAN)
        assert group.processes.kills == 1


@pytest.mark.parametrize("tokens", [None, 5, [("a", [])], [("a", 7)], [(1, [7, None, []])]])
def test_tokens_that_are_none_end_the_group(tokens):
    answers = (lambda n: [done(n, tokens)], lambda n: [done(n)])
    with Group(*answers) as group, pytest.raises(RankFailed, match="malformed tokens"):
        group.executor.execute(PLAN)


def test_a_rank_that_takes_no_plan_ends_the_group():
    end = threading.Event()

    def stuck(number):
        yield done(number)
        end.wait(30)  # and reads no more

    large = replace(PLAN.chunks[0], token_ids=(1,) * 200_000)
    with Group(lambda n: [sampled(n)], stuck) as group:
        group.executor.execute(PLAN)
        group.executor._channels[1].limit_sends(0.5)
        with pytest.raises(RankFailed, match=r"rank 1: .* takes nothing"):
            group.executor.execute(StepPlan(chunks=(large,)))
        assert group.processes.kills == 1
        end.set()


def test_what_a_rank_says_between_steps_ends_the_group():
    with Group(lambda n: [sampled(n)], lambda n: [done(n)]) as group:
        group.executor.execute(PLAN)
        group.ranks[1].send(done(9))
        deadline = time.monotonic() + 240
        while group.executor.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "to no question" in str(group.executor.failure)


def test_giving_a_group_up_says_why():
    def never(number):
        time.sleep(0.2)
        group.executor.kill("a step never ends")
        return []

    group = Group(lambda n: [sampled(n)], never)
    with group, pytest.raises(RankFailed, match="a step never ends"):
        group.executor.execute(PLAN)
