import itertools
import math

import pytest
import torch

from engine.execution.executor import LocalExecutor
from engine.execution.pool import KVPool
from engine.models.fake import FakeModel
from engine.models.tiny import tiny_model
from engine.request import SamplingParams
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Chunk, Entered, StepPlan

MODELS = {"fake": FakeModel(), "tiny": tiny_model()}
PROMPTS = {"a": list(b"Hello"), "b": list(b"A much longer prompt than that"), "c": [256]}


class Driver:
    """Plans by hand: every request in blocks of its own."""

    def __init__(self, model, *, block_tokens=8, temperature=0.0, fill=0.0, **params):
        self.model, self.block_tokens = model, block_tokens
        columns = -(-96 // block_tokens)
        self.pool = KVPool(model.layout, 1 + len(PROMPTS) * columns, block_tokens)
        self.pool.data.fill_(fill)
        self.sampler = Sampler(model.vocab_size, model.eos_token_ids)
        self.executor = LocalExecutor(model, self.pool, self.sampler)
        self.params = {
            name: SamplingParams(max_tokens=80, temperature=temperature, seed=i, **params)
            for i, name in enumerate(PROMPTS)
        }
        free = torch.randperm(len(PROMPTS) * columns, generator=torch.Generator().manual_seed(4))
        self.blocks = {
            name: tuple((part + 1).tolist())
            for name, part in zip(PROMPTS, free.split(columns), strict=True)
        }
        self.ids = {name: list(ids) for name, ids in PROMPTS.items()}

    def entered(self, name):
        return Entered(
            request_id=name,
            params=self.params[name],
            token_ids=tuple(self.ids[name]),
            num_prompt_tokens=len(PROMPTS[name]),
        )

    def chunk(self, name, first, stop):
        return Chunk(
            request_id=name,
            first_token=first,
            token_ids=tuple(self.ids[name][first:stop]),
            blocks=self.blocks[name],
            sample=stop == len(self.ids[name]),
        )

    def execute(self, *chunks, entered=(), left=()):
        plan = StepPlan(
            chunks=chunks, entered=tuple(self.entered(name) for name in entered), left=left
        )
        tokens = self.executor.execute(plan).tokens
        for name, token in tokens.items():
            self.ids[name].append(token.token_id)
        return tokens

    def output(self, name):
        return self.ids[name][len(PROMPTS[name]) :]

    def alone(self, count):
        """Each request by itself, whole."""
        for name in PROMPTS:
            self.execute(self.chunk(name, 0, len(self.ids[name])), entered=[name])
            for _ in range(count - 1):
                n = len(self.ids[name])
                self.execute(self.chunk(name, n - 1, n))
        return {name: self.output(name) for name in PROMPTS}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_batches_and_chunks_sample_the_tokens_of_each_request_alone(model, temperature):
    want = Driver(model, temperature=temperature).alone(12)
    d = Driver(model, temperature=temperature, block_tokens=16, fill=math.nan)
    done = d.execute(d.chunk("a", 0, 5), d.chunk("b", 0, 7), entered=["a", "b"])
    assert done.keys() == {"a"}, "the prompt of b goes on"
    d.execute(d.chunk("b", 7, 30), d.chunk("a", 5, 6), d.chunk("c", 0, 1), entered=["c"])
    for _ in range(12):
        rows = [d.chunk(n, len(d.ids[n]) - 1, len(d.ids[n])) for n in ("c", "a", "b")]
        d.execute(*rows)
    assert {name: d.output(name)[:12] for name in PROMPTS} == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_left_and_entered_again_goes_on_with_its_own_counts(temperature):
    """Preempted in mid-answer and recomputed, with penalties that depend on the history."""
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    model = MODELS["fake"]
    want = Driver(model, temperature=temperature, **penalties).alone(16)["b"]
    d = Driver(model, temperature=temperature, **penalties)
    d.execute(d.chunk("b", 0, 30), entered=["b"])
    for _ in range(7):
        d.execute(d.chunk("b", len(d.ids["b"]) - 1, len(d.ids["b"])))
    d.pool.data.fill_(math.nan)
    d.execute(d.chunk("b", 0, len(d.ids["b"])), left=("b",), entered=["b"])
    for _ in range(7):
        d.execute(d.chunk("b", len(d.ids["b"]) - 1, len(d.ids["b"])))
    assert d.output("b") == want


def test_sampler_state_lives_from_entered_to_left():
    d = Driver(MODELS["fake"])
    d.execute(d.chunk("a", 0, 5), d.chunk("c", 0, 1), entered=["a", "c"])
    assert d.sampler.num_requests == 2
    assert d.execute(left=("a", "c")) == {}
    assert d.sampler.num_requests == 0


def test_repeating_a_plan_writes_and_answers_the_same():
    d = Driver(MODELS["tiny"], temperature=1.0)
    plan = StepPlan(chunks=(d.chunk("b", 0, 30),), entered=(d.entered("b"),))
    first = d.executor.execute(plan)
    stored = d.pool.data.clone()
    assert d.executor.execute(plan) == first
    assert torch.equal(d.pool.data, stored)


def test_positions_count_from_the_start_of_the_prompt():
    """The noise of a token depends on its absolute position, however the prompt was cut."""
    seen = []

    class Recorder(Sampler):
        def sample(self, logits, request_ids, positions):
            seen.extend(zip(request_ids, positions, strict=True))
            return super().sample(logits, request_ids, positions)

    d = Driver(MODELS["fake"])
    d.sampler = Recorder(512, (257,))
    d.executor = LocalExecutor(d.model, d.pool, d.sampler)
    d.execute(d.chunk("a", 0, 3), entered=["a", "c"])
    d.execute(d.chunk("a", 3, 5), d.chunk("c", 0, 1))
    d.execute(d.chunk("c", 1, 2), d.chunk("a", 5, 6))
    assert seen == [("a", 5), ("c", 1), ("c", 2), ("a", 6)]


def test_a_pool_of_another_layout_is_refused():
    pool = KVPool(MODELS["tiny"].layout, 4, 8)
    with pytest.raises(AssertionError):
        LocalExecutor(MODELS["fake"], pool, Sampler(512, (257,)))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nan_in_free_and_padding_blocks_changes_nothing(model):
    clean, poisoned = Driver(model), Driver(model)
    for d in (clean, poisoned):
        d.execute(d.chunk("a", 0, 5), d.chunk("b", 0, 30), entered=["a", "b"])
    for _ in range(20):
        used = {
            (poisoned.blocks[n][at // 8], at % 8)
            for n in ("a", "b")
            for at in range(len(poisoned.ids[n]) - 1)
        }
        for block, offset in itertools.product(range(poisoned.pool.num_blocks), range(8)):
            if (block, offset) not in used:
                poisoned.pool.data[block, :, :, offset] = math.nan
        for d in (clean, poisoned):
            d.execute(*(d.chunk(n, len(d.ids[n]) - 1, len(d.ids[n])) for n in ("a", "b")))
    assert poisoned.ids == clean.ids
