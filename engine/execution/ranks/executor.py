"""The coordinator's side: starts ranks, sends them plans, ends them all when one fails."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine.errors import ConfigError, EngineError
from engine.execution.ranks.channel import Channel, ChannelError, Kind, Listener, frame
from engine.execution.ranks.memory import RemoteMemory
from engine.execution.ranks.wire import (
    PlanWriter,
    RankOrder,
    RankReady,
    ready_from_wire,
    tokens_from_wire,
)
from engine.sampling.sampler import UnusableLogits
from engine.scheduling.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import ModelConfig
    from engine.execution.ranks.launch import RankLauncher, RankProcesses
    from engine.models.shard import Grid

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0
"""Until every rank has loaded its weights: a large model comes over a network file system."""

SILENCE_LIMIT_S = 10.0
"""A rank that sends no beat for so long is given up; it sends one a second."""

_MEMORY_LIMIT_S = 10.0
_WATCH_S = 0.5


class RankFailed(EngineError):
    """A rank died, hangs or cannot go on. The group is ended: nothing can be computed any more."""


@dataclass(slots=True)
class _Step:
    """A plan that was sent and what was answered to it."""

    number: int
    missing: set[int]
    tokens: dict[str, Any] = field(default_factory=dict[str, Any])
    unusable: UnusableLogits | None = None


class RankExecutor:
    """Implements `StagedExecutor` over a group of ranks.

    One lost rank loses the group, since each holds a part of every layer and of every request's
    KV: the others are killed at once, a step that runs raises, and `failure` says why. A thread
    watches while no step runs. `on_failure` is called once, on the thread that noticed.
    """

    def __init__(
        self,
        channels: list[Channel],
        processes: RankProcesses,
        grid: Grid,
        *,
        pids: tuple[int, ...] = (),
        store: TCPStore | None = None,
        silence_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """`channels`: of rank 0, 1, ..., each ready for steps. `pids`: theirs, for people.
        `store`: where the ranks found each other; they lean on it until they end."""
        self.pids = pids
        self._store = store
        self.failure: RankFailed | None = None
        self.on_failure: Callable[[RankFailed], None] | None = None
        self._channels = channels
        self.silence_s = silence_s
        self._processes = processes
        self._sampling_rank = grid.sampling_rank
        self._plans = PlanWriter()
        self._number = 0
        self._steps: deque[_Step] = deque()
        self.depth = grid.pipeline_parallel
        self._closed = False
        self._given_up: str | None = None
        self._lock = threading.Lock()
        """Held by whoever uses the channels: a step, or the watch between steps."""

        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        for rank, channel in enumerate(channels):
            self._poll.register(channel.fileno(), select.POLLIN)
            self._rank_of[channel.fileno()] = rank
        self._watch = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watch.start()

    @property
    def silence_s(self) -> float:
        """A rank not heard of, or that takes no part of a plan, for so long is given up."""
        return self._silence_s

    @silence_s.setter
    def silence_s(self, limit_s: float) -> None:
        self._silence_s = limit_s
        for channel in self._channels:
            channel.limit_sends(limit_s)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. Raises as `collect`."""
        self.submit(plan)
        assert len(self._steps) == 1, "another step is under way"
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """See `StagedExecutor.submit`. Raises `RankFailed`, as every call does from then on."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            assert len(self._steps) < self.depth, f"{self.depth} steps are under way"
            self._number += 1
            # One that is alone is cut, so that stages compute at once; others fill each other's
            # gaps, and each cut reads all weights again.
            cut = not self._steps
            data = frame([Kind.STEP, self._number, self._plans.to_wire(plan), cut])
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send_frame(data)
                except ChannelError as error:
                    raise self._fail(f"rank {rank}: {error}") from error
            self._steps.append(_Step(self._number, set(range(len(self._channels)))))

    def collect(self) -> StepResult:
        """See `StagedExecutor.collect`. Raises `UnusableLogits` as the local executor does, and
        `RankFailed`, after which every call raises it."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            step = self._steps[0]
            try:
                while step.missing:
                    self._hear(_WATCH_S)
            except (ChannelError, RankFailed) as error:
                raise self._fail(str(error)) from error
            self._steps.popleft()
        if step.unusable is not None:
            raise step.unusable
        return StepResult(step.tokens)

    def close(self) -> None:
        """See `Executor.close`. Ends every rank, also while a step runs: the step then raises."""
        if self._closed:
            return
        self._closed = True
        self._processes.kill()
        self._watch.join(timeout=5.0)
        with self._lock:
            for channel in self._channels:
                channel.close()

    def kill(self, reason: str) -> None:
        """Give the group up from another thread: a step that runs raises soon after."""
        if self.failure is None and not self._closed:
            logger.error("the group of ranks is given up: %s", reason)
            self._given_up = reason
            self._processes.kill()

    def _hear(self, timeout_s: float) -> None:
        """Take in what came. Raises RankFailed for a rank lost, silent, or out of turn, and
        ChannelError."""
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            rank = self._rank_of[descriptor]
            try:
                messages = self._channels[rank].arrived()
            except ChannelError as error:
                raise RankFailed(f"rank {rank}: {error}") from error
            for message in messages:
                if message[0] == Kind.FAILED:
                    raise RankFailed(f"rank {rank} failed: {message[-1]}")
                if message[0] != Kind.BEAT:
                    self._answered(rank, message)
        now = time.monotonic()
        for rank, channel in enumerate(self._channels):
            if now - channel.last_heard > self.silence_s:
                raise RankFailed(
                    f"rank {rank}: not heard of for {now - channel.last_heard:.0f} s: it hangs or "
                    "its machine is gone"
                )

    def _answered(self, rank: int, message: list[Any]) -> None:
        """A rank answers plans in the order in which it got them."""
        step = next((step for step in self._steps if rank in step.missing), None)
        length = {Kind.DONE: 3, Kind.UNUSABLE: 5}.get(Kind(message[0]))
        if step is None or length != len(message) or message[1] != step.number:
            raise RankFailed(f"rank {rank}: an answer of kind {message[0]} to no question")
        if rank == self._sampling_rank:
            if message[0] == Kind.UNUSABLE:
                step.unusable = UnusableLogits(*message[2:])
            else:
                step.tokens = tokens_from_wire(message[2])
        step.missing.discard(rank)

    def _watch_ranks(self) -> None:
        """Notice what happens to ranks while nobody waits for a step."""
        while not self._closed and self.failure is None:
            time.sleep(_WATCH_S)
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if self._closed or self.failure is not None:
                    return
                self._hear(0)
            except (ChannelError, RankFailed) as error:
                self._fail(str(error))
                return
            finally:
                self._lock.release()

    def _fail(self, reason: str) -> RankFailed:
        """End the group. Called with the lock held."""
        if self.failure is None:
            details = "; ".join(self._processes.failures())
            reason = self._given_up or reason
            self.failure = RankFailed(f"{reason}{' (' + details + ')' if details else ''}")
            if not self._closed:
                logger.error("a rank is lost, the group ends: %s", self.failure)
            self._processes.kill()
            if self.on_failure is not None and not self._closed:
                self.on_failure(self.failure)
        return self.failure


class RankGroupStart:
    """Brings a group up: processes, proofs, weights, then KV memory.

    ```
    start = RankGroupStart(...)      every rank loads its slices at the same time
    start.ready                      what each holds: decides how many blocks fit
    start.allocate(...)
    executor = start.executor()
    ```
    Closes everything it began when it raises.
    """

    def __init__(
        self,
        model: ModelConfig | None,
        grid: Grid,
        launcher: RankLauncher,
        *,
        block_tokens: int,
        num_threads: int,
        devices: list[str] | None = None,
        kv_reads: bool = False,
        limit_s: float = START_LIMIT_S,
    ) -> None:
        """`model`: None for an empty one. `devices`: of each rank; None: CPUs. `kv_reads`: see
        `read_channels`. Returns when all ranks have loaded. Raises ConfigError naming the rank that
        did not and why."""
        self.read_channels: list[Channel] = []
        """To each rank, once it has its memory: what it is to read of other replicas' KV. Empty
        where the group was started without `kv_reads`."""

        self._kv_reads = kv_reads
        self._grid = grid
        self._limit_s = limit_s
        key = secrets.token_bytes(32)
        self._listener = Listener(key, host=launcher.host)
        self._channels: dict[int, Channel] = {}
        self._processes: RankProcesses | None = None
        host = launcher.host or "127.0.0.1"
        # A socket of ours: the store by itself listens on every interface, and asks nobody who he
        # is.
        server = socket.create_server((host, 0))
        port: int = server.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
            master_listen_fd=server.detach(),
        )
        orders = [
            RankOrder(
                rank=rank,
                grid=grid,
                address=self._listener.address,
                key=key.hex(),
                store=f"{host}:{port}",
                model=model,
                block_tokens=block_tokens,
                num_threads=num_threads,
                device="cpu" if devices is None else devices[rank],
                start_limit_s=limit_s,
                kv_reads=kv_reads,
            )
            for rank in range(grid.num_ranks)
        ]
        try:
            self._processes = launcher.start(orders)
            deadline = time.monotonic() + limit_s
            self._accept_all(deadline)
            answers = self._answers(Kind.READY, deadline)
            self.ready: list[RankReady] = [ready_from_wire(answer[1:]) for answer in answers]
        except BaseException:
            self.close()
            raise

    def allocate(
        self, num_blocks: int, shared: list[str | None], *, limit_s: float | None = None
    ) -> list[RemoteMemory | None]:
        """Have each rank make its pool, in the file `shared` names or in memory of its own.

        limit_s: for all of them; None: as for loading. Returns how to reach the memory of those
        ranks that have their own.
        """
        self._limit_s = limit_s or self._limit_s
        remote: list[RemoteMemory | None] = [None] * self._grid.num_ranks
        opened: dict[tuple[int, str], Channel] = {}
        expected = {(rank, "memory") for rank, file in enumerate(shared) if file is None}
        if self._kv_reads:
            expected |= {(rank, "reads") for rank in self._channels}
        try:
            for rank, channel in self._channels.items():
                channel.send([Kind.ALLOCATE, num_blocks, shared[rank]])
            deadline = time.monotonic() + self._limit_s
            while expected:
                rank, purpose, channel = self._accept(deadline)
                if (rank, purpose) not in expected:
                    channel.close()
                    raise ChannelError(f"rank {rank} connected twice, or for nothing it was told")
                expected.discard((rank, purpose))
                opened[rank, purpose] = channel
                if purpose == "memory":
                    layout = self.ready[rank].layout
                    remote[rank] = RemoteMemory(channel, layout, timeout_s=_MEMORY_LIMIT_S)
            self._answers(Kind.ALLOCATED, deadline)
            if self._kv_reads:
                self.read_channels = [opened[rank, "reads"] for rank in sorted(self._channels)]
            return remote
        except BaseException:
            for channel in opened.values():
                channel.close()
            self.close()
            raise

    def executor(self) -> RankExecutor:
        """The group, ready for steps. This object is done then."""
        assert self._processes is not None
        self._listener.close()
        channels = [self._channels[rank] for rank in range(self._grid.num_ranks)]
        pids = tuple(rank.pid for rank in self.ready)
        return RankExecutor(channels, self._processes, self._grid, pids=pids, store=self._store)

    def close(self) -> None:
        """Give up."""
        if self._processes is not None:
            self._processes.kill()
        for channel in self._channels.values():
            channel.close()
        self._listener.close()

    def _accept_all(self, deadline: float) -> None:
        while len(self._channels) < self._grid.num_ranks:
            rank, purpose, channel = self._accept(deadline)
            if purpose != "steps" or rank in self._channels or rank >= self._grid.num_ranks:
                raise ConfigError(f"rank {rank} came twice, or is none of this group's")
            self._channels[rank] = channel

    def _accept(self, deadline: float) -> tuple[int, str, Channel]:
        while time.monotonic() < deadline:
            accepted = self._listener.accept(1.0)
            if accepted is not None:
                return accepted
            assert self._processes is not None
            failures = self._processes.failures()
            if failures:
                raise ConfigError(f"the ranks did not start: {'; '.join(failures)}")
        missing = sorted(set(range(self._grid.num_ranks)) - self._channels.keys())
        raise ConfigError(
            f"ranks {missing} did not connect within {self._limit_s:g} s: see their logs"
        )

    def _answers(self, kind: Kind, deadline: float) -> list[list[Any]]:
        """The next message of every rank, which must be of this kind. One that fails ends the wait
        for all: the others wait for it."""
        answers: dict[int, list[Any]] = {}
        poll = select.poll()
        rank_of = {channel.fileno(): rank for rank, channel in self._channels.items()}
        for descriptor in rank_of:
            poll.register(descriptor, select.POLLIN)
        while len(answers) < len(self._channels):
            if time.monotonic() > deadline:
                missing = sorted(self._channels.keys() - answers.keys())
                raise ConfigError(f"ranks {missing} did not start within {self._limit_s:g} s")
            for descriptor, _ in poll.poll(1000):
                rank = rank_of[descriptor]
                try:
                    messages = self._channels[rank].arrived()
                except ChannelError as error:
                    raise ConfigError(
                        f"rank {rank} did not start: {error}{self._said()}"
                    ) from error
                for message in messages:
                    if message[0] == Kind.FAILED:
                        raise ConfigError(f"rank {rank} did not start: {message[-1]}")
                    if message[0] == kind:
                        answers[rank] = message
                    elif message[0] != Kind.BEAT:
                        raise ConfigError(f"rank {rank}: kind {message[0]} while it starts")
        return [answers[rank] for rank in range(self._grid.num_ranks)]

    def _said(self) -> str:
        time.sleep(0.2)  # an exit status follows the end of the connection
        assert self._processes is not None
        said = "; ".join(self._processes.failures())
        return f" ({said})" if said else ""


def shared_file(descriptor: int) -> str:
    """How another process of this machine opens an anonymous file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
