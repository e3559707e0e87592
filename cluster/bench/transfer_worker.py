"""A prefill replica with everything computed: `python -m cluster.bench.transfer_worker`.

Takes one JSON line on standard input, answers with one on standard output (the address of its
link), and serves until standard input ends. Real pool, real exports, real link; no model.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from cluster.errors import ClusterError
from engine.outputs import Computed, Output, StepOutput
from engine.request import FinishReason, Request, SampledToken

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.execution.pool import KVPool

FINGERPRINT = "bench"
MAX_UNACKED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """KV of one prompt. The defaults are SmolLM2-135M's."""

    num_tokens: int = 512
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "bfloat16"
    block_tokens: int = 16

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    def pool(self, seed: int | None) -> KVPool:
        """Room for the prompt and block 0; filled with numbers that depend on the seed."""
        import torch

        from engine.execution.pool import KVPool
        from engine.models.model import KVLayout

        layout = KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            fingerprint=FINGERPRINT,
        )
        pool = KVPool(layout, self.num_blocks + 1, self.block_tokens)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
        return pool


class _Computed:
    """An engine whose every prompt is in the same blocks. `told` gets the step it took."""

    def __init__(self, shape: Shape) -> None:
        self.told: Any = None
        self._blocks = tuple(range(shape.num_blocks, 0, -1))

    def submit(self, request: Request, *, hold_s: float) -> None:
        step = StepOutput(
            outputs=[Output(request.request_id, SampledToken(1), "", FinishReason.LENGTH, 0)],
            computed=[Computed(request.request_id, 0, request.num_tokens, self._blocks)],
            num_tokens=request.num_tokens,
            prompts=[(request.request_id, request.num_tokens)],
        )
        asyncio.get_running_loop().call_soon(self.told, step)

    def renew(self, request_id: str, hold_s: float) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...
    def unfinished(self, request_ids: Iterable[str]) -> set[str]:
        return set()


async def _serve(shape: Shape, secret: bytes, with_nixl: bool) -> None:
    from deployments.lifecycle.export import ExportServer
    from deployments.lifecycle.reads import BlockOffers, start_agents
    from deployments.link.link import Link, LinkHandlers
    from deployments.link.server import LinkServer
    from engine.cache.hashing import hash_chain, root_hash

    pool, engine = shape.pool(seed=1), _Computed(shape)

    def chain(request: Request, chain_tokens: int) -> tuple[bytes, ...]:
        return tuple(hash_chain(root_hash(FINGERPRINT, ""), request.token_ids, chain_tokens))

    exports = ExportServer(
        cast("Engine", engine), pool, chain=chain, max_unacked_bytes=MAX_UNACKED_BYTES
    )
    engine.told = exports.on_step
    if with_nixl:
        agents = await start_agents(pool, window_bytes=MAX_UNACKED_BYTES)
        exports.offers = BlockOffers(agents)

    def opened(link: Link) -> None:
        if exports.offers is not None:
            exports.offers.announce(link)

    server = LinkServer(
        secret,
        "prefill",
        "source",
        handlers=LinkHandlers(
            on_message=exports.on_message, on_open=opened, on_close=exports.on_close
        ),
    )
    await server.start()
    print(json.dumps({"address": server.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close("the bench is over")
    if exports.offers is not None:
        await asyncio.to_thread(exports.offers.close)


class SourceProcess:
    """The parent's end. Raises ClusterError where the process does not start."""

    def __init__(self, shape: Shape, secret: bytes, *, with_nixl: bool) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "cluster.bench.transfer_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._child.pid
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        job = {"shape": asdict(shape), "secret": secret.hex(), "with_nixl": with_nixl}
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("{"):  # NIXL writes lines of its own
                self.address: str = json.loads(line)["address"]
                return
        raise ClusterError(f"the sending process ended with status {self._child.wait()}")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


if __name__ == "__main__":
    _job = json.loads(sys.stdin.readline())
    asyncio.run(_serve(Shape(**_job["shape"]), bytes.fromhex(_job["secret"]), _job["with_nixl"]))
