"""The ranks' own network: sums inside a stage, hidden states between stages (torch.distributed)."""

# torch.distributed is only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine.models.shard import Grid


class RankGroup:
    """This process among all ranks of one model. Implements `TensorGroup` for its stage.

    Backend: gloo for tensors of the CPU, NCCL for those of a CUDA device. `limit_s` bounds the
    rendezvous and each operation; the coordinator ends a group that hangs long before.
    """

    def __init__(
        self, grid: Grid, rank: int, store: str, *, device: torch.device, limit_s: float
    ) -> None:
        """`store`: `host:port` of the coordinator's TCPStore. Blocks until all ranks are there."""
        self._grid = grid
        self._rank = rank
        self._device = device
        self._sending: list[tuple[Any, Tensor]] = []
        self._sent_before: list[tuple[Any, Tensor]] = []  # in the step before
        host, _, port = store.rpartition(":")
        if host == "127.0.0.1":
            # Else gloo resolves the host's name, which need not lead anywhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=limit_s)
        rendezvous = TCPStore(host, int(port), None, is_master=False, timeout=timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=rendezvous,
            rank=rank,
            world_size=grid.num_ranks,
            timeout=timeout,
        )
        self._stage: Any = None
        for stage in range(grid.pipeline_parallel):  # every rank takes part in making each group
            ranks = grid.stage_ranks(stage)
            made = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks:
                self._stage = made
        self._first = rank - rank % grid.tensor_parallel

    def sum(self, x: Tensor) -> Tensor:
        """See `TensorGroup.sum`."""
        if self._stage is not None and x.numel():
            dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """See `TensorGroup.gather`."""
        if self._stage is None:
            return [x]
        x = x.contiguous()
        parts: list[Tensor] | None = None
        if self._rank == self._first:
            parts = [torch.empty_like(x) for _ in range(self._grid.tensor_parallel)]
        dist.gather(x, parts, dst=self._first, group=self._stage)
        return parts

    def send_on(self, x: Tensor) -> None:
        """Hand hidden states to this rank's place in the next stage, without waiting for it."""
        x = x.contiguous()
        work = dist.isend(x, self._rank + self._grid.tensor_parallel)
        self._sending.append((work, x))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """What the stage before sent next, `[rows, columns]`."""
        x = torch.empty((rows, columns), dtype=dtype, device=self._device)
        dist.recv(x, self._rank - self._grid.tensor_parallel)
        return x

    def end_step(self) -> None:
        """Wait until what the step before handed on has left. What this one did may wait for the
        next stage, which computes; this stage has the next step to do meanwhile."""
        for work, _ in self._sent_before:
            work.wait()
        self._sent_before, self._sending = self._sending, []
