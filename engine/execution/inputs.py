"""From a step plan to the index tensors of one pass."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import StepContext
from engine.scheduling.plan import StepPlan


def step_inputs(
    plan: StepPlan, block_tokens: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, StepContext]:
    """Token ids `[tokens]`, positions `[tokens]`, both int64, and the context of the pass.

    A pure function of its arguments, so every rank builds the same tensors from the same plan.
    `step.last` has one row for each chunk with `sample`, in the order of the chunks. The plan must
    hold at least one chunk, and no chunk may be empty.
    """
    chunks = plan.chunks
    assert chunks, "a pass without chunks has no inputs"
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    columns = max(-(-chunk.end // block_tokens) for chunk in chunks)
    table = np.zeros((len(chunks), columns), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        assert chunk.token_ids, f"request {chunk.request_id}: an empty chunk"
        ids.extend(chunk.token_ids)
        positions.extend(range(chunk.first_token, chunk.end))
        blocks = chunk.blocks
        slots.extend(
            blocks[at // block_tokens] * block_tokens + at % block_tokens
            for at in range(chunk.first_token, chunk.end)
        )
        used = -(-chunk.end // block_tokens)
        table[row, :used] = blocks[:used]
        if chunk.sample:
            last.append(len(ids) - 1)
    q_lens = tuple(len(chunk.token_ids) for chunk in chunks)
    k_lens = tuple(chunk.end for chunk in chunks)

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

    step = StepContext(
        slots=tensor(slots, torch.int64),
        cu_q=tensor([0, *accumulate(q_lens)], torch.int32),
        kv_lens=tensor(k_lens, torch.int32),
        block_table=tensor(table, torch.int32),
        last=tensor(last, torch.int64),
        max_q=max(q_lens),
        max_k=max(k_lens),
        uniform_q=q_lens[0] if len(set(q_lens)) == 1 else None,
        q_lens=q_lens,
        k_lens=k_lens,
    )
    return tensor(ids, torch.int64), tensor(positions, torch.int64), step
