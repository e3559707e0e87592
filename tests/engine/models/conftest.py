"""Drives a model through plans as the engine would, with the sampler left out."""

import pytest
import torch

from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.scheduling.plan import Chunk, StepPlan


class Sequence:
    """One sequence in a pool of its own."""

    def __init__(self, model, *, block_tokens=16, capacity=256, seed=0, fill=None):
        count = -(-capacity // block_tokens)
        g = torch.Generator().manual_seed(seed)
        self.model = model
        self.blocks = tuple((torch.randperm(count, generator=g) + 1).tolist())
        self.pool = KVPool(model.layout, count + 1, block_tokens)
        if fill is not None:
            self.pool.data.fill_(fill)

    def logits(self, ids, first=0, size=None):
        """Behind the last of `ids`, computed from position `first` on in chunks of `size`."""
        size = size or len(ids)
        out = None
        for at in range(0, len(ids), size):
            piece = Chunk(
                request_id="a",
                first_token=first + at,
                token_ids=tuple(ids[at : at + size]),
                blocks=self.blocks,
                sample=at + size >= len(ids),
            )
            flat, positions, step = step_inputs(StepPlan(chunks=(piece,)), self.pool.block_tokens)
            out = self.model.forward(flat, positions, self.pool, step)
        return out[0]

    def greedy(self, ids, count, size=None):
        tokens = list(ids)
        logits = self.logits(ids, size=size)
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = self.logits(tokens[-1:], first=len(tokens) - 1)
        return tokens[len(ids) :]


@pytest.fixture
def sequence():
    return Sequence
