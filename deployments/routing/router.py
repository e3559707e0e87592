"""Serve's request router for our pools: exact targets, plain calls, the running set made known.

Uses Serve 2.60's router interface, which is alpha, and four of its private methods; the release is
pinned and the tests run them on a real cluster.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from ray.serve._private.common import ReplicaQueueLengthInfo, RunningReplicaInfo
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from deployments.routing.directory import Directory
from engine.errors import EngineError


class ReplicaGone(EngineError):
    """The call's target is not among the running replicas."""


def target_of(request: PendingRequest) -> str | None:
    """The replica a call names: `target` of its first positional argument, if that is a dict."""
    first = request.args[0] if request.args else None
    return cast("dict[str, Any]", first).get("target") if isinstance(first, dict) else None


def _answer(request: PendingRequest) -> asyncio.Future[RunningReplica]:
    return cast("asyncio.Future[RunningReplica]", request.future)  # pyright: ignore[reportUnknownMemberType]


class PlainReplica(RunningReplica):
    """A replica that is called with plain actor calls.

    Serve makes each call a streaming generator whose first item says whether there was a place. At
    the end of such a task Ray 2.60 waits, on the replica's event loop, until the caller has
    acknowledged every item: a caller that hangs (stopped, swapped out, behind a dead network) would
    take the replica's links, streams and health checks with it. The answer of a plain call waits
    for nobody. The price is that a replica cannot say no, so its places are counted by the callers:
    each knows its own calls, and what the replica said when last asked.
    """

    def __init__(self, info: RunningReplicaInfo, router: RequestRouter) -> None:
        super().__init__(info)
        self._router = router

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        """As Serve's. The result of a unary call always tells that it was accepted."""
        if pr.metadata.is_streaming:
            return super().try_send_request(pr, with_rejection)
        result = super().try_send_request(pr, False)

        async def accepted() -> ReplicaQueueLengthInfo:
            # The call itself is counted already.
            ongoing = self._router.replica_queue_len_cache.get(self.replica_id) or 1
            return ReplicaQueueLengthInfo(accepted=True, num_ongoing_requests=ongoing)

        result.get_rejection_response = accepted
        return result


class DirectoryRouter(RequestRouter):
    """A call whose first argument is `{"target": replica_id, ...}` goes to that replica only.

    It raises `ReplicaGone` at once when that replica is not running, also when it stops while the
    call waits for a place on it. A call without a target goes to the least loaded replica.

    Every change of the running set is published to this process's `Directory`.

    Serve pickles a router class by value together with what the module that its path names holds.
    Configured as `deployments.routing.replicas:DirectoryRouter`, a re-export, the class travels by
    reference; in either case `Directory`, of another module, is the process's own.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Else Serve asks again without a pause while the chosen replicas are busy.
        pending_request.routing_context.should_backoff = True
        target = target_of(pending_request)
        if target is None:
            return [candidate_replicas]
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        # An empty group is never looked at, and Serve would ask for ever. With any other it first
        # looks whether the request is done, and a request whose target is gone is.
        return [chosen or candidate_replicas]

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        return PlainReplica(replica_info, self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._directory.publish(
            {r.replica_id.unique_id: r.replica_metadata for r in self.curr_replicas.values()}
        )
        self._fail_lost_targets()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._directory.drop(replica_id.unique_id)
        self._fail_lost_targets()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Checked here and not only in `choose_replicas`, which is not asked while no replica runs.
        target = target_of(pending_request)
        if target is not None and not self._runs(target):
            raise self._gone(target)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        # Calls made while serving one request share its internal id, so Serve's lookup could hand
        # the replica chosen for one of them to another. The metadata object is each call's own.
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not _answer(pending).done():
                return pending
        return None

    @property
    def _directory(self) -> Directory:
        return Directory.of(self._deployment_id.app_name, self._deployment_id.name)

    def _runs(self, target: str) -> bool:
        return any(replica_id.unique_id == target for replica_id in self.curr_replicas)

    def _gone(self, target: str) -> ReplicaGone:
        running = sorted(replica_id.unique_id for replica_id in self.curr_replicas)
        return ReplicaGone(
            f"replica {target!r} of {self._deployment_id.name!r} is not running; those that are: "
            f"{running}. Choose again from the directory"
        )

    def _fail_lost_targets(self) -> None:
        for pending in list(self._pending_requests_to_fulfill):
            target = target_of(pending)
            answer = _answer(pending)
            if target is not None and not answer.done() and not self._runs(target):
                answer.set_exception(self._gone(target))
                self._remove_pending_request_from_indices(pending)
