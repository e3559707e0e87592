"""The executor for a model on a device: one copy in, a graph where one fits, one copy out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.execution.copies import make_copies
from engine.execution.graphs import DecodeGraphs
from engine.execution.packed import PackedInputs
from engine.execution.pool import KVPool
from engine.models.model import Model
from engine.request import SamplingParams
from engine.sampling.batched import BatchedSampler
from engine.scheduling.plan import Chunk, StepPlan, StepResult, resolved


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

    def prepare(self, plan: StepPlan) -> StepPlan:
        """See `OverlappingExecutor.prepare`. Inputs are built when their tokens are known: graphs
        and copies have one buffer each on the host, which the pass before may still be read from.
        """
        return plan

    def run(self, prepared: StepPlan, last: StepResult) -> StepResult:
        """See `OverlappingExecutor.run`. Raises as `execute`."""
        return self.execute(resolved(prepared, last))

    def warm_up(
        self, *, max_step_tokens: int, max_context_tokens: int, max_running_requests: int
    ) -> None:
        """Compute steps of the largest size, whose KV goes to block 0, which is nobody's: prompts,
        prompts beside a decode step, and as many decode steps as there may be, with their tokens.

        Kernels are compiled and chosen now rather than in somebody's first request, and memory that
        such a step has not got is missed now.
        """
        most = min(max_step_tokens, max_running_requests * max_context_tokens)
        prompts = [min(max_context_tokens, most - at) for at in range(0, most, max_context_tokens)]
        self._try(prompts)
        self._try([*prompts[:-1], max(1, prompts[-1] - 1), 1])
        logits = self._try([1] * max_running_requests)
        params = SamplingParams(max_tokens=1)
        request_ids = [f"warm-up {i}" for i in range(max_running_requests)]
        for i, request_id in enumerate(request_ids):
            self._sampler.enter(request_id, replace(params, seed=i), (0,), 1)
        with torch.inference_mode():
            self._sampler.sample(logits.zero_(), request_ids, [1] * max_running_requests)
        for request_id in request_ids:
            self._sampler.leave(request_id)

    def _try(self, lengths: Sequence[int]) -> Tensor:
        """Logits of a row of each length."""
        page = self._pool.block_tokens
        chunks = [
            Chunk(
                request_id="",
                first_token=0,
                token_ids=(0,) * length,
                blocks=(0,) * -(-length // page),
                sample=True,
            )
            for length in lengths
        ]
        with torch.inference_mode():
            fields, step = self._inputs.load(
                StepPlan(chunks=tuple(chunks)), page, self._pool.num_blocks
            )
            logits = self._model.forward(fields.ids, fields.positions, self._pool, step)
        if self._model.device.type == "cuda":
            # The next step's inputs take the place of these on the host.
            torch.cuda.current_stream(self._model.device).synchronize()
        return logits

    def close(self) -> None:
        """See `Executor.close`. Nothing here outlives the objects themselves."""
