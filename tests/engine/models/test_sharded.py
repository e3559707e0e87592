"""A decoder in parts, each on a thread: the logits of the whole, whatever the family has."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.execution.wire_order import wire_views
from engine.models.architecture import Architecture, Rope
from engine.models.decoder import Decoder
from engine.models.shard import Grid, shards
from engine.scheduling.plan import Chunk, StepPlan

BASE = Architecture(
    name="llama",
    vocab_size=50,
    hidden_size=24,
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    intermediate_size=35,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=256,
    tied_embeddings=False,
)
FAMILIES = {
    "nine heads, three KV heads": BASE,
    "tied": replace(BASE, tied_embeddings=True),
    "biases": replace(BASE, qkv_bias=True),
    "norms of heads": replace(BASE, qk_norm=True),
    "window": replace(BASE, window=5, num_heads=8, num_kv_heads=8),
    "one KV head": replace(BASE, num_heads=8, num_kv_heads=1),
    "gelu": replace(BASE, activation="gelu_tanh"),
}
PAGE = 4


class Threads:
    """A `TensorGroup` of threads."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=240)
        self._given = [None] * size

    def of(self, rank):
        return _Member(self, rank)

    def exchange(self, rank, x):
        self._given[rank] = x.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class _Member:
    def __init__(self, group, rank):
        self._group, self._rank = group, rank

    def sum(self, x):
        return sum(self._group.exchange(self._rank, x))

    def gather(self, x):
        found = self._group.exchange(self._rank, x)
        return found if self._rank == 0 else None


def tensors(a):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in a.tensor_shapes().items()
    }


def plans():
    """Two prompts in chunks, then a token each."""
    ids = {"a": tuple(range(7, 18)), "b": tuple(range(30, 36))}
    blocks = {"a": (3, 1, 5), "b": (2, 4)}

    def chunk(name, first, stop):
        return Chunk(
            request_id=name,
            first_token=first,
            token_ids=ids[name][first:stop],
            blocks=blocks[name],
            sample=stop == len(ids[name]),
        )

    yield StepPlan(chunks=(chunk("a", 0, 6), chunk("b", 0, 5)))
    yield StepPlan(chunks=(chunk("a", 6, 10), chunk("b", 5, 6)))
    yield StepPlan(chunks=(chunk("a", 10, 11),))


def inputs(plan):
    return step_inputs(plan, PAGE)


def whole(a, kv_dtype="auto"):
    model = Decoder(a, tensors(a), dtype=torch.float64, fingerprint="f", kv_dtype=kv_dtype)
    pool = KVPool(model.layout, 6, PAGE)
    out = []
    for plan in plans():
        ids, positions, step = inputs(plan)
        out.append(model.forward(ids, positions, pool, step))
    return out, pool


def in_parts(a, grid, kv_dtype="auto"):
    """Logits of the first rank of the last stage, and every rank's pool."""
    groups = [Threads(grid.tensor_parallel) for _ in range(grid.pipeline_parallel)]
    parts = shards(a, grid)
    between = {}
    arrived = threading.Condition()
    pools, logits, failed = {}, [], []

    def run(shard):
        try:
            model = Decoder(
                a,
                tensors(a),
                dtype=torch.float64,
                fingerprint="f",
                shard=shard,
                group=groups[shard.stage].of(shard.tensor_rank),
                kv_dtype=kv_dtype,
            )
            pools[shard.rank] = pool = KVPool(model.layout, 6, PAGE)
            for number, plan in enumerate(plans()):
                ids, positions, step = inputs(plan)
                hidden = None
                if not shard.is_first_stage:
                    at = (number, shard.rank)
                    with arrived:
                        assert arrived.wait_for(lambda at=at: at in between, timeout=240)
                        hidden = between[at]
                hidden = model.hidden(ids, positions, pool, step, hidden)
                if not shard.is_last_stage:
                    with arrived:
                        between[number, shard.rank + grid.tensor_parallel] = hidden
                        arrived.notify_all()
                    continue
                found = model.logits(hidden)
                assert (found is None) == (shard.tensor_rank > 0 and hidden.shape[0] > 0)
                if shard.tensor_rank == 0:
                    logits.append(found)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(shard,)) for shard in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    return logits, pools, parts


@pytest.mark.parametrize("grid", [(2, 1), (3, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("a", FAMILIES.values(), ids=FAMILIES)
def test_parts_give_the_logits_and_the_kv_of_the_whole(a, grid):
    expected, reference = whole(a)
    size = Grid(tensor_parallel=grid[0], pipeline_parallel=grid[1])
    logits, pools, parts = in_parts(a, size)
    assert [tuple(x.shape) for x in logits] == [(0, 50), (1, 50), (1, 50)][: len(logits)]
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    for shard in parts:
        kept = reference.data[:, slice(*shard.layers), :, :, slice(*shard.kv_heads)]
        torch.testing.assert_close(pools[shard.rank].data, kept, rtol=0, atol=1e-11)


def test_parts_round_their_kv_to_the_codes_of_the_whole():
    expected, reference = whole(BASE, kv_dtype="int8")
    logits, pools, parts = in_parts(BASE, Grid(tensor_parallel=2), kv_dtype="int8")
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    for shard in parts:
        assert pools[shard.rank].layout.fingerprint == reference.layout.fingerprint != "f"
        for block in (3, 1, 2):
            ours = pools[shard.rank].gather(block, 0, 2, 0, 3)
            assert any(ours)
            theirs = reference.gather(block, 0, 2, 0, 3, shard.kv_heads)
            codes = [bytes(x) for x in (ours, theirs)]
            views = [wire_views(x, reference.layout, 3, shard.num_kv_heads)[0] for x in codes]
            assert (views[0] == views[1]).all()


def test_each_rank_takes_its_own_weights_only():
    a = FAMILIES["biases"]
    full = Decoder(a, tensors(a), dtype=torch.float64, fingerprint="f").weight_bytes
    grid = Grid(tensor_parallel=3, pipeline_parallel=3)
    taken = sum(
        Decoder(
            a,
            tensors(a),
            dtype=torch.float64,
            fingerprint="f",
            shard=shard,
            group=Threads(1).of(0),
        ).weight_bytes
        for shard in shards(a, grid)
    )
    padding = 2 * (3 * 17 - 50) * a.hidden_size * 8  # rows of embedding and head
    assert taken == full + padding
