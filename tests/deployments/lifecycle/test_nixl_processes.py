"""Pulls from another process that is stopped or killed while a READ is in flight."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal

import pytest

pytest.importorskip("nixl_cu12", reason="install the extra: pip install 'tailrace[nixl]'")

import torch
from nixl_source import stop
from pools import until

from cluster.bench.transfer_worker import FINGERPRINT, MAX_UNACKED_BYTES, Shape, SourceProcess
from deployments.lifecycle.pull import PullClient
from deployments.lifecycle.reads import BlockReads, start_agents
from deployments.link.client import Dialer
from deployments.link.link import LinkHandlers
from engine.cache.hashing import hash_chain, root_hash
from engine.errors import TransferError
from engine.request import Request, SamplingParams
from engine.transfer.nixl_intake import ReadIntake

SHAPE = Shape(num_tokens=128)
PROMPT = tuple(range(SHAPE.num_tokens))


class Receiver:
    """A decode replica as far as pulls go."""

    def __init__(self, secret: bytes) -> None:
        self.pool = SHAPE.pool(None)
        self.pulls = PullClient(self.pool.layout, window_bytes=1 << 24, stall_s=0.5, silence_s=5.0)
        handlers = LinkHandlers(
            on_message=self.pulls.on_message,
            on_payload=self.pulls.on_payload,
            on_payload_done=self.pulls.on_payload_done,
            on_close=self.pulls.on_close,
        )
        self.pulls.dialer = Dialer(secret, "decode", "d0", handlers, expect_role="prefill")

    async def start(self) -> None:
        self.agents = await start_agents(self.pool, window_bytes=MAX_UNACKED_BYTES)
        (self.agent,) = self.agents.members
        self.reads = BlockReads(self.agents, self.pool.layout, self.pool.block_tokens)
        self.pulls.reads = self.reads
        self._post = self.agent._post

    async def connect(self, address: str) -> None:
        await self.pulls.dialer.get(address)
        await until(lambda: self.reads.num_connected == 1, "the agents' connection")

    def before_post(self, act) -> None:
        """Do this just before the next READ is posted."""

        def post(read):
            self.agent._post = self._post
            act()
            return self._post(read)

        self.agent._post = post

    def intake(self) -> ReadIntake:
        blocks = tuple(range(1, SHAPE.num_blocks + 1))
        return ReadIntake(self.pool, blocks, first_token=0, num_tokens=SHAPE.num_tokens)

    async def pull(self, address: str, intake: ReadIntake):
        page = SHAPE.block_tokens
        chain = tuple(hash_chain(root_hash(FINGERPRINT, ""), PROMPT, page))
        request = Request(request_id="r", prompt_ids=PROMPT, params=SamplingParams(max_tokens=1))
        return await self.pulls.pull(address, request, intake, chain=chain, chain_tokens=page)

    async def close(self) -> None:
        await self.pulls.dialer.close()
        await asyncio.to_thread(self.agents.close)


@pytest.fixture
async def pair(monkeypatch):
    """A sender in a process of its own whose READs need that process, and a receiver here."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    secret = secrets.token_bytes(32)
    source = await asyncio.to_thread(SourceProcess, SHAPE, secret, with_nixl=True)
    receiver = Receiver(secret)
    try:
        await receiver.start()
        await receiver.connect(source.address)
        yield source, receiver
        await receiver.close()
    finally:
        await asyncio.to_thread(source.close)


def expected() -> torch.Tensor:
    """Block i of the sender's prompt lies in its block `num_blocks - i`."""
    return SHAPE.pool(1).data[1:].flip(0)


async def test_a_sender_stopped_in_the_middle_is_given_up_and_its_blocks_come_back(pair):
    source, receiver = pair
    receiver.before_post(lambda: stop(source.pid))
    intake, quiet = receiver.intake(), []
    with pytest.raises(TransferError) as late:
        await receiver.pull(source.address, intake)
    assert late.value.stage == "stall"
    assert intake.lent == SHAPE.num_blocks
    intake.on_quiet = lambda: quiet.append(True)
    os.kill(source.pid, signal.SIGCONT)
    await until(lambda: quiet, "the end of the READ")
    assert (intake.lent, intake.received_bytes, receiver.reads.num_open) == (0, 0, 0)
    again = receiver.intake()
    prefilled = await receiver.pull(source.address, again)
    assert (prefilled.connector, again.lent) == ("nixl", 0)
    assert torch.equal(receiver.pool.data[1:], expected())


async def test_a_sender_killed_in_the_middle_is_an_error_and_nothing_is_written_afterwards(pair):
    source, receiver = pair
    receiver.before_post(lambda: os.kill(source.pid, signal.SIGKILL))
    intake, quiet = receiver.intake(), []
    with pytest.raises(TransferError) as gone:
        await receiver.pull(source.address, intake)
    assert gone.value.stage == "link"
    intake.on_quiet = lambda: quiet.append(True)
    await until(lambda: quiet or not intake.lent, "the end of the READ")
    receiver.pool.data.zero_()
    await until(lambda: not receiver.reads.num_open, "the last READ")
    assert receiver.reads.num_connected == 0
    assert not receiver.pool.data.any()


async def test_a_pull_that_is_cancelled_in_the_middle_ends_at_once(pair):
    source, receiver = pair
    posted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopped() -> None:
        stop(source.pid)
        loop.call_soon_threadsafe(posted.set)

    receiver.before_post(stopped)
    intake, quiet = receiver.intake(), []
    pulling = asyncio.create_task(receiver.pull(source.address, intake))
    await posted.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert intake.lent == SHAPE.num_blocks
    intake.on_quiet = lambda: quiet.append(True)
    os.kill(source.pid, signal.SIGCONT)
    await until(lambda: quiet, "the end of the READ")
    assert receiver.reads.num_open == 0
