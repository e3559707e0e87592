"""The executor for a model on a device: one copy in, a graph where one fits, one copy out."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.execution.copies import make_copies
from engine.execution.graphs import DecodeGraphs
from engine.execution.packed import PackedInputs
from engine.execution.pool import KVPool
from engine.models.model import Model
from engine.sampling.batched import BatchedSampler
from engine.scheduling.plan import Chunk, StepPlan, StepResult


class DeviceExecutor:
    """Computes in this process on the model's device. See `Executor`.

    Works on a CPU as well, which is how it is tested.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        sampler: BatchedSampler,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`pool` has the model's layout. `graphs`: recorded, of the same model and pool."""
        assert pool.layout == model.layout, f"{pool.layout} is not {model.layout}"
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._graphs = graphs
        self._inputs = PackedInputs(model.device)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. Raises `UnusableLogits`, which names the request at fault."""
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
            logits = None if self._graphs is None else self._graphs.run(plan)
            if logits is None:
                fields, step = self._inputs.load(
                    plan, self._pool.block_tokens, self._pool.num_blocks
                )
                logits = self._model.forward(fields.ids, fields.positions, self._pool, step)
            sampled = [chunk for chunk in plan.chunks if chunk.sample]
            request_ids = [chunk.request_id for chunk in sampled]
            tokens = self._sampler.sample(logits, request_ids, [chunk.end for chunk in sampled])
            if not sampled and self._model.device.type == "cuda":
                # Nothing was fetched, so nothing waited: after a step its KV may be read by others.
                torch.cuda.current_stream(self._model.device).synchronize()
        return StepResult(dict(zip(request_ids, tokens, strict=True)))

    def warm_up(self, num_tokens: int) -> None:
        """Compute steps of the largest size, whose KV goes to block 0, which is nobody's.

        Kernels are compiled and chosen now rather than in somebody's first request, and memory that
        such a step has not got is missed now.
        """
        page = self._pool.block_tokens
        row = Chunk(request_id="", first_token=0, token_ids=(0,), blocks=(0,), sample=True)
        for others in (0, 1):
            length = max(1, num_tokens - others)
            prompt = replace(row, token_ids=(0,) * length, blocks=(0,) * -(-length // page))
            plan = StepPlan(chunks=(prompt, *(row,) * others))
            with torch.inference_mode():
                fields, step = self._inputs.load(plan, page, self._pool.num_blocks)
                self._model.forward(fields.ids, fields.positions, self._pool, step)

    def close(self) -> None:
        """See `Executor.close`. Nothing here outlives the objects themselves."""
