"""Who takes a step plan and returns its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from engine.execution.copies import make_copies
from engine.execution.inputs import step_inputs
from engine.scheduling.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from engine.execution.pool import KVPool
    from engine.models.model import Model
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
        # A preempted request may be back in the same plan: first out, then in.
        for request_id in plan.left:
            self._sampler.leave(request_id)
        for entered in plan.entered:
            self._sampler.enter(
                entered.request_id, entered.params, entered.token_ids, entered.num_prompt_tokens
            )
        if not plan.chunks:
            return StepResult({})
        with torch.inference_mode():
            make_copies(self._pool, plan.copies)
            ids, positions, step = step_inputs(plan, self._pool.block_tokens, self._model.device)
            logits = self._model.forward(ids, positions, self._pool, step)
            sampled = [chunk for chunk in plan.chunks if chunk.sample]
            request_ids = [chunk.request_id for chunk in sampled]
            tokens = self._sampler.sample(logits, request_ids, [chunk.end for chunk in sampled])
        return StepResult(dict(zip(request_ids, tokens, strict=True)))

    def close(self) -> None:
        """See `Executor.close`. Nothing here outlives the objects themselves."""
