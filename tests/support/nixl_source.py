"""A process whose KV pool others read by NIXL, and the handle on it for a test.

Run as a program it prints its agent's card and then obeys lines: `sum BLOCK`, `fill SEED`, `quit`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import torch

from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.transfer.checksum import checksum
from engine.transfer.nixl import AgentCard, NixlAgent

REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32", fingerprint="f")
PAGE = 16


def make_pool(num_blocks: int, seed: int | None) -> KVPool:
    """Zeros, or bytes that depend on the seed and differ in every block."""
    pool = KVPool(LAYOUT, num_blocks, PAGE)
    if seed is not None:
        fill(pool, seed)
    return pool


def fill(pool: KVPool, seed: int) -> None:
    numbers = torch.arange(pool.data.numel(), dtype=torch.float32).view(pool.data.shape)
    torch.add(numbers, seed, out=pool.data)


def block_sum(pool: KVPool, block: int) -> int:
    return checksum(pool.block_bytes(block, 0, pool.layout.num_layers))


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread has stopped: the signal reaches a busy one later."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T"
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


class Source:
    """The process, with real signals."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(num_blocks), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        )
        line = self._line()
        self.card = AgentCard.from_wire(msgpack.unpackb(bytes.fromhex(line)))

    def sum(self, block: int) -> int:
        return int(self.ask(f"sum {block}"))

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def stop(self) -> None:
        stop(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("= "):  # the library writes its own lines
                return line[2:].strip()
        raise AssertionError(f"the source ended with {self.process.wait()}")


def _say(what: object) -> None:
    print("=", what, flush=True)


async def _serve(num_blocks: int, seed: int) -> None:
    pool = make_pool(num_blocks, seed)
    agent = NixlAgent(pool, lambda call, *args: call(*args), window_bytes=1 << 30)
    _say(msgpack.packb(agent.start().to_wire()).hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "sum":
            _say(block_sum(pool, int(arguments[0])))
        elif command == "fill":
            fill(pool, int(arguments[0]))
            _say("filled")
        elif command == "quit":
            break
    agent.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
