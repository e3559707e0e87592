"""Ranks of a replica: child actors in its placement group."""

# Ray's actor handles are not typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.settings import RANK_CPUS
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.execution.ranks.launch import RankProcesses
    from engine.execution.ranks.wire import RankOrder

logger = logging.getLogger(__name__)


class RankActor:
    """One rank in a process of its own. Ends with its owner, the replica."""

    def where(self) -> tuple[int, str]:
        """Process id and node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self, order: dict[str, Any]) -> None:
        """Come up and compute; returns never. Raises what ended it."""
        from engine.execution.ranks.channel import ChannelError
        from engine.execution.ranks.wire import RankOrder
        from engine.execution.ranks.worker import serve_rank

        try:
            serve_rank(RankOrder.from_json(order))
        except ChannelError as error:
            # The replica is gone or has given this rank up: its memory is wanted back now, not
            # when Ray has noticed.
            logging.getLogger(__name__).warning("rank %d ends: %s", order["rank"], error)
            os._exit(0)


class ActorRanks:
    """A `RankLauncher` for a replica with a placement group: rank i runs in bundle i + 1."""

    own_gpu = True

    def __init__(self, *, host: str | None = None) -> None:
        """Call in the replica's constructor. `host`: as of `RankLauncher`. Raises ConfigError where
        the replica has no placement group."""
        self.host = host
        self._group = ray.util.get_current_placement_group()
        if self._group is None:
            raise ConfigError(
                "tensor_parallel and pipeline_parallel need a placement group: serve the model "
                "with deployments.app:model, and set no placement_group_bundles of its own"
            )

    def start(self, orders: list[RankOrder]) -> RankProcesses:
        """See `RankLauncher.start`."""
        return _Actors(self._group, orders)


class _Actors:
    def __init__(self, group: Any, orders: list[RankOrder]) -> None:
        actor = ray.remote(RankActor)
        self._actors: list[Any] = []
        self._where: list[Any] = []
        self._runs: list[Any] = []
        self._node = ray.get_runtime_context().get_node_id()
        for order in orders:
            handle: Any = actor.options(
                num_cpus=RANK_CPUS,
                num_gpus=int(order.device != "cpu"),
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(order.num_threads)}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=1 + order.rank
                ),
            ).remote()
            self._actors.append(handle)
            self._where.append(handle.where.remote())
            self._runs.append(handle.run.remote(order.to_json()))

    def failures(self) -> list[str]:
        """See `RankProcesses.failures`."""
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        said: list[str] = []
        for rank, run in enumerate(self._runs):
            if run not in ended:
                continue
            try:
                ray.get(run)
            except RayError as error:
                said.append(f"rank {rank}: {str(error).strip().splitlines()[-1]}")
            else:
                said.append(f"rank {rank} ended")
        return said

    def kill(self) -> None:
        """See `RankProcesses.kill`."""
        here, _ = ray.wait(self._where, num_returns=len(self._where), timeout=0)
        for handle, where in zip(self._actors, self._where, strict=True):
            with contextlib.suppress(RayError):
                ray.kill(handle, no_restart=True)
            if where not in here:
                continue
            # Ray asks a process to end itself, which one that is stopped cannot hear.
            with contextlib.suppress(RayError, ProcessLookupError):
                pid, node = ray.get(where)
                if node == self._node:
                    os.kill(pid, signal.SIGKILL)
