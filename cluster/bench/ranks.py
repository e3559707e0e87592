"""`tailrace bench ranks`: what a step costs its coordinator because others compute it.

The ranks hold an empty model: they read the plan, derive nothing, answer. What is left is the
channel. The same plans go to an executor of this process that computes as little, in turn with the
ranks; the difference of the medians is what the channel adds.

Imports torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from cluster.bench.summary import Summary, significant
from engine.execution.ranks.executor import RankGroupStart
from engine.execution.ranks.launch import LocalProcesses
from engine.models.shard import Grid
from engine.request import SampledToken
from engine.scheduling.plan import Chunk, StepPlan, StepResult

Say = Callable[[str], None]

BATCHES = (1, 16, 64)
CONTEXT_TOKENS = 1024
BLOCK_TOKENS = 16
_WARM_UPS = 50


def bench_ranks(*, ranks: int, steps: int, say: Say) -> dict[str, Any]:
    """Added microseconds a step for each batch size. Raises ConfigError if ranks do not start."""
    say(f"starting {ranks} ranks")
    start = RankGroupStart(
        None,
        Grid(tensor_parallel=ranks),
        LocalProcesses(),
        block_tokens=BLOCK_TOKENS,
        num_threads=1,
        limit_s=120.0,
    )
    start.allocate(2, ["/dev/null"] * ranks)  # an empty model keeps no KV
    executor = start.executor()
    found: dict[str, Any] = {}
    try:
        for batch in BATCHES:
            say(f"batch of {batch}: {steps} steps")
            plan = _plan(batch)
            ours: list[float] = []
            alone: list[float] = []
            for step in range(_WARM_UPS + steps):
                began = time.perf_counter()
                executor.execute(plan)
                between = time.perf_counter()
                _nothing(plan)
                ended = time.perf_counter()
                if step >= _WARM_UPS:
                    ours.append(between - began)
                    alone.append(ended - between)
            added = statistics.median(ours) - statistics.median(alone)
            found[str(batch)] = {
                "added_ms": significant(1000 * added),
                "step_ms": Summary.of(ours, 1000).to_json(),
                "in_process_ms": Summary.of(alone, 1000).to_json(),
            }
    finally:
        executor.close()
    return {"ranks": ranks, "steps": steps, "context_tokens": CONTEXT_TOKENS, "batches": found}


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"{result['ranks']} ranks, contexts of {result['context_tokens']} tokens"]
    for batch, found in result["batches"].items():
        step = found["step_ms"]
        lines.append(
            f"batch {batch:>3}: {found['added_ms']:.3f} ms added to a step "
            f"(p50 {step['p50']:.3f}, p99 {step['p99']:.3f})"
        )
    return lines


def _nothing(plan: StepPlan) -> StepResult:
    return StepResult({chunk.request_id: SampledToken(0) for chunk in plan.chunks if chunk.sample})


def _plan(batch: int) -> StepPlan:
    """A step of decoding, as long contexts make it: block tables are most of its bytes."""
    blocks = CONTEXT_TOKENS // BLOCK_TOKENS
    return StepPlan(
        chunks=tuple(
            Chunk(
                request_id=f"request-{i}/0",
                first_token=CONTEXT_TOKENS - 1,
                token_ids=(i,),
                blocks=tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)),
                sample=True,
            )
            for i in range(batch)
        )
    )
