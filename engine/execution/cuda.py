"""What only a CUDA device can do: record graphs, bring tokens back without a stall."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.execution.graphs import Graph

_WARM_UPS = 2
"""Runs before a recording: libraries allocate their workspaces and choose kernels in the first."""


class CudaRecorder:
    """Records into `torch.cuda.CUDAGraph`s that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """See `Recorder.record`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a replica pin memory and copy KV meanwhile: their calls are none of this
        # recording's business.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()
        return graph, result
