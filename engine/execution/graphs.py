"""Decode steps as captured graphs: one launch instead of hundreds.

A graph repeats what was recorded on the tensors it was recorded on, so a step is copied into the
static inputs of a shape at least as large and padded (`packed.fill`). What decides is here and runs
on a CPU; `engine.execution.cuda` does the recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import StepContext
from engine.execution.packed import Fields, InputShape, fill
from engine.execution.pool import KVPool
from engine.models.model import Model
from engine.scheduling.plan import StepPlan


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Enqueue it again, on the tensors it was recorded on."""
        ...


class Recorder(Protocol):
    """Records work. Recordings share memory: none may run while another does."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """`run` once for good, and once to be recorded: the recording and its result."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """What one recording can hold."""

    rows: int
    columns: int
    """Of the block table: kernels size their grids by it, so it is worth a bucket."""


def row_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, 8, then steps of an eighth of the power of two below.

    A padded row costs about what a real one does, so padding stays under an eighth from 64 on.
    """
    sizes = {size for size in (1, 2, 4) if size < most}
    size = 8
    while size < most:
        sizes.add(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return (*sorted(sizes), most)


def column_buckets(most: int) -> tuple[int, ...]:
    """Widths of the block table to record: the most, and quarters of it down to 4."""
    widths = [most]
    while widths[-1] // 4 >= 4:
        widths.append(-(-widths[-1] // 4))
    return tuple(reversed(widths))


class GraphBuckets:
    """Which recording serves a step."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        """Both ascending."""
        self.rows = tuple(rows)
        self.columns = tuple(columns)

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Every shape, the largest first: smaller ones then find room in its memory."""
        return tuple(
            GraphShape(rows, columns)
            for rows in reversed(self.rows)
            for columns in reversed(self.columns)
        )

    def choose(self, plan: StepPlan, block_tokens: int) -> GraphShape | None:
        """The smallest shape that holds the step; None: it is computed without a graph.

        Steps with prompts in them aren't held: they are large enough to hide their launches. Nor is
        a single prompt token, whose row nobody samples.
        """
        chunks = plan.chunks
        if not chunks or any(len(c.token_ids) != 1 or not c.sample for c in chunks):
            return None
        row = bisect_left(self.rows, len(chunks))
        wanted = max(-(-chunk.end // block_tokens) for chunk in chunks)
        column = bisect_left(self.columns, wanted)
        if row == len(self.rows) or column == len(self.columns):
            return None
        return GraphShape(self.rows[row], self.columns[column])


@dataclass(slots=True)
class _Recorded:
    host: Tensor
    there: Tensor
    fields: Fields
    """Of `host`."""

    graph: Graph
    logits: Tensor


class DecodeGraphs:
    """Records each shape once, at start-up, and computes decode steps by them."""

    def __init__(
        self, model: Model, pool: KVPool, buckets: GraphBuckets, recorder: Recorder
    ) -> None:
        self.buckets = buckets
        self.num_replays = 0
        self._model = model
        self._pool = pool
        self._recorder = recorder
        self._recorded: dict[GraphShape, _Recorded] = {}
        self._logits: Tensor | None = None  # of every recording: one set, not one for each

    def record(self) -> None:
        """Record every shape. They write to block 0 only, so a pool in use is safe."""
        for shape in self.buckets.shapes:
            self._recorded[shape] = self._record(shape)

    def _record(self, shape: GraphShape) -> _Recorded:
        inputs = InputShape(
            tokens=shape.rows, rows=shape.rows, columns=shape.columns, sampled=shape.rows
        )
        device, page = self._model.device, self._pool.block_tokens
        with torch.inference_mode(False):
            host = torch.empty(
                inputs.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
            there = torch.empty(inputs.num_bytes, dtype=torch.uint8, device=device)
        fields = Fields.of(host, inputs)
        fill(fields, StepPlan(chunks=()), page, self._pool.num_blocks)
        there.copy_(host)
        static = Fields.of(there, inputs)
        longest = shape.columns * page
        step = StepContext(
            slots=static.slots,
            cu_q=static.cu_q,
            kv_lens=static.kv_lens,
            block_table=static.block_table,
            last=static.last,
            max_q=1,
            # Bounds that hold for every step replayed: real lengths stay on the device.
            max_k=longest,
            uniform_q=1,
            q_lens=(1,) * shape.rows,
            k_lens=(longest,) * shape.rows,
        )
        graph, logits = self._recorder.record(
            lambda: self._put(self._model.forward(static.ids, static.positions, self._pool, step))
        )
        return _Recorded(host, there, fields, graph, logits)

    def _put(self, logits: Tensor) -> Tensor:
        """Into the first rows of what all recordings share. The largest is the first to be run,
        which it is before it is recorded, so that this is memory of its own."""
        if self._logits is None:
            with torch.inference_mode(False):
                self._logits = torch.empty(
                    (self.buckets.rows[-1], logits.shape[1]),
                    dtype=logits.dtype,
                    device=logits.device,
                )
        return self._logits[: logits.shape[0]].copy_(logits)

    def run(self, plan: StepPlan) -> Tensor | None:
        """Logits `[rows, vocab]` of a decode step; None where no recording holds it.

        They are overwritten by the next step. Row i is that of chunk i.
        """
        shape = self.buckets.choose(plan, self._pool.block_tokens)
        if shape is None:
            return None
        recorded = self._recorded[shape]
        fill(recorded.fields, plan, self._pool.block_tokens, self._pool.num_blocks)
        recorded.there.copy_(recorded.host, non_blocking=True)
        recorded.graph.replay()
        self.num_replays += 1
        return recorded.logits[: len(plan.chunks)]
