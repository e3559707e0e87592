"""A stage's work: what is handed on when, and what is sampled of it."""

from __future__ import annotations

import pytest
import torch

from engine.execution.pool import KVPool
from engine.execution.ranks.worker import RankWorker
from engine.models.model import KVLayout
from engine.models.shard import Grid, shards
from engine.models.tiny import TINY_ARCHITECTURE
from engine.request import SamplingParams
from engine.sampling.sampler import UnusableLogits
from engine.scheduling.plan import Chunk, Entered, StepPlan

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", fingerprint="f")


class Model:
    layout = LAYOUT
    device = torch.device("cpu")
    dtype = "float32"
    hidden_size = 4
    vocab_size = 8
    eos_token_ids = ()

    def __init__(self, events, logits=None):
        self.events, self._logits = events, logits

    def hidden(self, ids, positions, pool, step, hidden):
        self.events.append(f"compute {len(ids)}")
        return torch.zeros(len(step.last) if self._logits is not None else len(ids), 4)

    def logits(self, hidden):
        rows = [self._logits.pop(0) for _ in hidden]
        return torch.stack(rows) if rows else torch.empty(0, 8)


class Group:
    def __init__(self, events):
        self.events = events

    def send_on(self, x):
        self.events.append(f"send {len(x)}")

    def receive(self, rows, columns, dtype):
        self.events.append(f"receive {rows}")
        return torch.zeros(rows, columns, dtype=dtype)

    def end_step(self):
        self.events.append("end")


def worker(stage, logits=None):
    events = []
    shard = shards(TINY_ARCHITECTURE, Grid(pipeline_parallel=2))[stage]
    pool = KVPool(LAYOUT, 64, 8)
    return RankWorker(Model(events, logits), shard, Group(events), pool), events


def plan(*sizes, entered=False):
    chunks = tuple(
        Chunk(
            request_id=f"r{i}",
            first_token=0,
            token_ids=(1,) * size,
            blocks=tuple(range(-(-size // 8))),
            sample=True,
        )
        for i, size in enumerate(sizes)
    )
    names = [chunk.request_id for chunk in chunks] if entered else []
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0)
    return StepPlan(
        chunks=chunks,
        entered=tuple(
            Entered(request_id=name, params=params, token_ids=(1,), num_prompt_tokens=1)
            for name in names
        ),
    )


def test_a_stage_hands_each_micro_batch_on_before_it_computes_the_next():
    first, events = worker(0)
    assert first.execute(plan(200)) is None
    assert events == ["compute 50", "send 50"] * 4 + ["end"]


def test_a_stage_waits_for_one_micro_batch_at_a_time():
    last, events = worker(1, logits=[torch.arange(8.0)])
    tokens = last.execute(plan(200, entered=True))
    assert events == ["receive 50", "compute 50"] * 4 + ["end"]
    assert tokens["r0"].token_id == 7


def test_a_step_beside_others_is_computed_whole():
    first, events = worker(0)
    assert first.execute(plan(200), cut=False) is None
    assert events == ["compute 200", "send 200", "end"]


def test_unusable_logits_of_one_micro_batch_count_nothing_of_the_others():
    good, bad = torch.arange(8.0), torch.full((8,), torch.nan)
    last, _ = worker(1, logits=[good, bad, good, good])
    with pytest.raises(UnusableLogits) as caught:
        last.execute(plan(1, 1, entered=True))
    assert caught.value.request_id == "r1"
    # Had the 7 been counted already, its penalty would make it a tie with 6.
    tokens = last.execute(plan(1, 1))
    assert [token.token_id for token in tokens.values()] == [7, 7]


def test_a_step_without_chunks_only_tells_who_comes_and_goes():
    first, events = worker(0)
    assert first.execute(StepPlan(chunks=())) is None
    last, _ = worker(1)
    assert last.execute(StepPlan(chunks=())) == {}
    assert events == []
