"""`tailrace bench transfer`: KV of one prompt between two processes, over the link and by NIXL.

The sender has computed everything before it is asked, so that nothing but the transfer is timed:
from asking to the last byte checked. The two take turns on one pair of processes, so that a machine
whose speed drifts is equally unkind to both.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from cluster.bench.summary import Summary, percentile, significant
from cluster.bench.transfer_worker import FINGERPRINT, MAX_UNACKED_BYTES, Shape, SourceProcess
from cluster.errors import ClusterError
from engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from deployments.lifecycle.pull import PullClient
    from engine.execution.pool import KVPool

Say = Callable[[str], None]
CONNECTORS = ("link", "nixl")
CONNECT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    pairs: int = 50
    num_tokens: int = 512


def bench_transfer(effort: Effort, say: Say) -> dict[str, Any]:
    """Times, CPU and the ratio of each pair.

    Raises:
        ConfigError: NIXL is not installed.
        EngineError: a transfer failed.
    """
    from engine.transfer.nixl import require_nixl

    require_nixl()
    shape, secret = Shape(num_tokens=effort.num_tokens), secrets.token_bytes(32)
    source = SourceProcess(shape, secret, with_nixl=True)
    try:
        return asyncio.run(_measure(effort, shape, secret, source, say))
    finally:
        source.close()


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"{result['tokens']} tokens, {result['bytes'] / 1e6:.1f} MB, {result['pairs']} pairs:"]
    for name in CONNECTORS:
        ms, cpu = result[f"{name}_ms"], result[f"{name}_cpu_ms"]
        lines.append(
            f"  {name}  p50 {ms['p50']} ms, p90 {ms['p90']} ms; CPU of both ends {cpu:.1f} ms"
        )
    ratio = "{ratio:.2f} of the time (quartiles {ratio_p25:.2f}, {ratio_p75:.2f})".format(**result)
    lines.append(f"  nixl / link  {ratio}")
    return lines


async def _measure(
    effort: Effort, shape: Shape, secret: bytes, source: SourceProcess, say: Say
) -> dict[str, Any]:
    from deployments.lifecycle.pull import PullClient
    from deployments.lifecycle.reads import BlockReads, start_agents
    from deployments.link.client import Dialer
    from deployments.link.link import LinkHandlers

    pool = shape.pool(seed=None)
    pulls = PullClient(pool.layout, window_bytes=16 << 20, stall_s=10.0, silence_s=10.0)
    agents = await start_agents(pool, window_bytes=MAX_UNACKED_BYTES)
    reads = pulls.reads = BlockReads(agents, pool.layout, shape.block_tokens)
    pulls.dialer = Dialer(
        secret,
        "decode",
        "receiver",
        LinkHandlers(
            on_message=pulls.on_message,
            on_payload=pulls.on_payload,
            on_payload_done=pulls.on_payload_done,
            on_close=pulls.on_close,
        ),
        expect_role="prefill",
    )
    sender = psutil.Process(source.pid)
    times: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    cpu: dict[str, float] = dict.fromkeys(CONNECTORS, 0.0)
    try:
        await pulls.dialer.get(source.address)
        began = time.monotonic()
        while not reads.num_connected:
            if time.monotonic() - began > CONNECT_S:
                raise ClusterError(f"the agents are not connected after {CONNECT_S:g} s")
            await asyncio.sleep(0.01)
        one = _Pull(pulls, pool, shape, source.address)
        for pair in range(-2, effort.pairs):  # two to warm up
            for name in CONNECTORS if pair % 2 else reversed(CONNECTORS):
                pulls.reads = reads if name == "nixl" else None
                before = time.process_time() + sum(sender.cpu_times()[:2])
                seconds, connector = await one.run()
                spent = time.process_time() + sum(sender.cpu_times()[:2]) - before
                if connector != name:
                    raise ClusterError(f"a pull that was to go by {name} went by {connector}")
                if pair >= 0:
                    times[name].append(seconds)
                    cpu[name] += spent
            if pair >= 0 and pair % 10 == 9:
                say(f"{pair + 1} pairs of {effort.pairs}")
    finally:
        await pulls.dialer.close()
        await asyncio.to_thread(agents.close)
    ratios = [b / a for a, b in zip(times["link"], times["nixl"], strict=True)]
    return {
        "tokens": shape.num_tokens,
        "bytes": shape.num_tokens * pool.layout.bytes_per_token,
        "pairs": effort.pairs,
        **{f"{name}_ms": Summary.of(times[name], 1000.0).to_json() for name in CONNECTORS},
        **{f"{name}_cpu_ms": significant(1000 * cpu[name] / effort.pairs) for name in CONNECTORS},
        "ratio": significant(statistics.median(ratios)),
        "ratio_p25": significant(percentile(ratios, 25)),
        "ratio_p75": significant(percentile(ratios, 75)),
    }


class _Pull:
    """The same prompt again and again, into the same blocks."""

    def __init__(self, pulls: PullClient, pool: KVPool, shape: Shape, address: str) -> None:
        from engine.cache.hashing import hash_chain, root_hash

        self._pulls, self._pool, self._shape, self._address = pulls, pool, shape, address
        self._request = Request(
            request_id="r",
            prompt_ids=tuple(i % 1000 for i in range(shape.num_tokens)),
            params=SamplingParams(max_tokens=1),
        )
        root = root_hash(FINGERPRINT, "")
        self._chain = tuple(hash_chain(root, self._request.token_ids, shape.block_tokens))

    async def run(self) -> tuple[float, str]:
        """Seconds, and what carried it."""
        from engine.transfer.nixl_intake import ReadIntake

        shape = self._shape
        blocks = tuple(range(1, shape.num_blocks + 1))
        intake = ReadIntake(self._pool, blocks, first_token=0, num_tokens=shape.num_tokens)
        began = time.monotonic()
        prefilled = await self._pulls.pull(
            self._address,
            self._request,
            intake,
            chain=self._chain,
            chain_tokens=shape.block_tokens,
        )
        return time.monotonic() - began, prefilled.connector
