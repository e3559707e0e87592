"""Who takes a step plan and returns its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from engine.execution.copies import make_copies
from engine.execution.inputs import step_inputs
from engine.scheduling.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from engine.attention.backend import StepContext
    from engine.execution.pool import KVPool
    from engine.models.model import Model
    from engine.request import RequestId
    from engine.sampling.sampler import Sampler


class Executor(Protocol):
    """Computes plans in the order given, one at a time."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one pass. One token for each chunk with `sample`.

        Repeating a plan whose execution raised is harmless: it writes the same KV again.
        """
        ...

    def close(self) -> None:
        """Give up what the executor holds. It takes no plan afterwards; closing again is fine."""
        ...


P = TypeVar("P")


@runtime_checkable
class OverlappingExecutor(Executor, Protocol[P]):
    """An executor that takes a plan in two parts, for a pipeline of passes."""

    def prepare(self, plan: StepPlan) -> P:
        """What can be done before the passes ahead of it have ended, also while one runs."""
        ...

    def run(self, prepared: P, last: StepResult) -> StepResult:
        """`execute` the rest. `last`: tokens of the pass before, which `PENDING` stands for."""
        ...


@runtime_checkable
class StagedExecutor(Executor, Protocol):
    """An executor that computes several plans at a time, each further on than the next."""

    depth: int
    """Plans that may be under way."""

    def submit(self, plan: StepPlan) -> None:
        """Begin a pass behind those under way. It must not need a token that they sample."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest pass under way. Raises as `execute`; the others go on."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan and its tensors."""

    plan: StepPlan
    inputs: tuple[Tensor, Tensor, StepContext] | None
    """See `step_inputs`; None for a plan without chunks."""

    pending: tuple[tuple[int, RequestId], ...]
    """Rows of the ids whose token is not known yet, each with the request that samples it."""


class LocalExecutor:
    """Computes in this process, on the caller's thread."""

    def __init__(self, model: Model, pool: KVPool, sampler: Sampler) -> None:
        """`pool` has the model's layout. The sampler's state of a request lives from the plan that
        enters it to the plan that says it left."""
        assert pool.layout == model.layout, f"{pool.layout} is not {model.layout}"
        self._model = model
        self._pool = pool
        self._sampler = sampler

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. Raises `UnusableLogits`, which names the request at fault: the
        step can be planned again without it."""
        return self.run(self.prepare(plan), StepResult({}))

    def prepare(self, plan: StepPlan) -> Prepared:
        """See `OverlappingExecutor.prepare`."""
        if not plan.chunks:
            return Prepared(plan, None, ())
        pending: list[tuple[int, RequestId]] = []
        row = 0
        for chunk in plan.chunks:
            if chunk.pending:
                pending.append((row, chunk.request_id))
            row += len(chunk.token_ids)
        inputs = step_inputs(plan, self._pool.block_tokens, self._model.device)
        return Prepared(plan, inputs, tuple(pending))

    def run(self, prepared: Prepared, last: StepResult) -> StepResult:
        """See `OverlappingExecutor.run`. Raises as `execute`."""
        plan = prepared.plan
        # A preempted request may be back in the same plan: first out, then in.
        for request_id in plan.left:
            self._sampler.leave(request_id)
        for entered in plan.entered:
            self._sampler.enter(
                entered.request_id, entered.params, entered.token_ids, entered.num_prompt_tokens
            )
        if prepared.inputs is None:
            return StepResult({})
        ids, positions, step = prepared.inputs
        with torch.inference_mode():
            if prepared.pending:
                rows = [row for row, _ in prepared.pending]
                known = [last.tokens[request_id].token_id for _, request_id in prepared.pending]
                ids[rows] = torch.tensor(known, dtype=ids.dtype, device=ids.device)
            make_copies(self._pool, plan.copies)
            logits = self._model.forward(ids, positions, self._pool, step)
            sampled = [chunk for chunk in plan.chunks if chunk.sample]
            request_ids = [chunk.request_id for chunk in sampled]
            tokens = self._sampler.sample(logits, request_ids, [chunk.end for chunk in sampled])
        return StepResult(dict(zip(request_ids, tokens, strict=True)))

    def close(self) -> None:
        """See `Executor.close`. Nothing here outlives the objects themselves."""
