"""The index tensors of a step in one run of bytes: one copy to the device instead of seven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import StepContext
from engine.scheduling.plan import StepPlan

_WIDE = 8
_NARROW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """How many of each there are."""

    tokens: int
    rows: int
    columns: int
    """Of the block table."""

    sampled: int

    @property
    def num_bytes(self) -> int:
        wide = 3 * self.tokens + self.sampled
        return _WIDE * wide + _NARROW * (self.rows + 1 + self.rows + self.rows * self.columns)

    @classmethod
    def of(cls, plan: StepPlan, block_tokens: int) -> InputShape:
        """Exactly what the plan needs."""
        chunks = plan.chunks
        return cls(
            tokens=plan.num_tokens,
            rows=len(chunks),
            columns=max(-(-chunk.end // block_tokens) for chunk in chunks),
            sampled=sum(chunk.sample for chunk in chunks),
        )


@dataclass(frozen=True, slots=True)
class Fields:
    """Views of one buffer, on the host or on the device."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    cu_q: Tensor
    kv_lens: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, buffer: Tensor, shape: InputShape) -> Fields:
        """Cut `buffer`, uint8 and at least `shape.num_bytes` long."""
        at = 0

        def take(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            size = count * dtype.itemsize
            part = buffer[at : at + size].view(dtype)
            at += size
            return part

        # The wide ones come first, so that all are aligned.
        ids, positions, slots = (take(shape.tokens, torch.int64) for _ in range(3))
        last = take(shape.sampled, torch.int64)
        cu_q = take(shape.rows + 1, torch.int32)
        kv_lens = take(shape.rows, torch.int32)
        table = take(shape.rows * shape.columns, torch.int32)
        return cls(ids, positions, slots, last, cu_q, kv_lens, table.view(shape.rows, -1))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.numpy()


def fill(host: Fields, plan: StepPlan, block_tokens: int, num_blocks: int) -> None:
    """Write the plan's tensors into host memory, and padding into what the shape has beyond it.

    A padding row is one token at position 0 that lies in block 0, which is never handed out: it
    writes there, reads there, and is nobody's. (Never an empty row: flash-attn takes row i of the
    queries for sequence i.) Rows that pad need as many padding tokens as there are rows missing.

    Raises IndexError for a block outside the pool: kernels read and write where they are told.
    """
    ids, positions, slots = _numpy(host.ids), _numpy(host.positions), _numpy(host.slots)
    cu_q, kv_lens, table = _numpy(host.cu_q), _numpy(host.kv_lens), _numpy(host.block_table)
    last = _numpy(host.last)
    cu_q[0] = 0
    table[:] = 0
    at = sampled = 0
    for row, chunk in enumerate(plan.chunks):
        end = at + len(chunk.token_ids)
        used = -(-chunk.end // block_tokens)
        table[row, :used] = chunk.blocks[:used]
        ids[at:end] = chunk.token_ids
        if end - at == 1:
            position = chunk.first_token
            positions[at] = position
            slots[at] = (
                chunk.blocks[position // block_tokens] * block_tokens + position % block_tokens
            )
        else:
            run = np.arange(chunk.first_token, chunk.end)
            positions[at:end] = run
            slots[at:end] = (
                table[row, run // block_tokens].astype(np.int64) * block_tokens + run % block_tokens
            )
        at = end
        cu_q[row + 1] = at
        kv_lens[row] = chunk.end
        if chunk.sample:
            last[sampled] = at - 1
            sampled += 1
    rows = len(plan.chunks)
    missing = len(kv_lens) - rows
    assert len(ids) - at == missing, "a padding row is one token"
    if missing:
        ids[at:] = 0
        positions[at:] = 0
        slots[at:] = 0
        kv_lens[rows:] = 1
        cu_q[rows + 1 :] = np.arange(at + 1, at + 1 + missing)
        last[sampled:] = 0
    if table.size and not 0 <= int(table.min()) <= int(table.max()) < num_blocks:
        raise IndexError(
            f"the plan names a block outside [0, {num_blocks}): "
            f"{int(table.min())}..{int(table.max())}"
        )


class PackedInputs:
    """Buffers for steps of changing shapes, used over and over.

    The host's is pinned where there is a CUDA device: only from there is a copy asynchronous. Steps
    are computed one at a time and their tokens waited for, so by the time of the next `load` the
    last copy has been made; the device's side is ordered by its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._there = torch.empty(0, dtype=torch.uint8)

    def load(
        self, plan: StepPlan, block_tokens: int, num_blocks: int
    ) -> tuple[Fields, StepContext]:
        """The plan's tensors on the device. They are overwritten by the next call."""
        shape = InputShape.of(plan, block_tokens)
        self._reserve(shape.num_bytes)
        fill(Fields.of(self._host, shape), plan, block_tokens, num_blocks)
        size = shape.num_bytes
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        fields = Fields.of(self._there, shape)
        q_lens = tuple(len(chunk.token_ids) for chunk in plan.chunks)
        k_lens = tuple(chunk.end for chunk in plan.chunks)
        step = StepContext(
            slots=fields.slots,
            cu_q=fields.cu_q,
            kv_lens=fields.kv_lens,
            block_table=fields.block_table,
            last=fields.last,
            max_q=max(q_lens),
            max_k=max(k_lens),
            uniform_q=q_lens[0] if len(set(q_lens)) == 1 else None,
            q_lens=q_lens,
            k_lens=k_lens,
        )
        return fields, step

    def _reserve(self, num_bytes: int) -> None:
        if self._host.numel() >= num_bytes:
            return
        room = max(2 * num_bytes, 1 << 16)
        with torch.inference_mode(False):
            self._host = torch.empty(
                room, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
            self._there = torch.empty(room, dtype=torch.uint8, device=self._device)
