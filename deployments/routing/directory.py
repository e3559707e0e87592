"""The running replicas of a deployment, as this process knows them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

Replicas = Mapping[str, Mapping[str, Any]]
"""What each replica's `record_replica_metadata` returned, by replica id (Serve's `unique_id`)."""

_NONE: Replicas = MappingProxyType({})


class Directory:
    """One deployment's running set. One object per deployment and process; see `of`.

    Written by `DirectoryRouter` on Serve's router thread, read from any thread or event loop. A
    snapshot never changes: a new one takes its place.
    """

    _known: ClassVar[dict[tuple[str, str], Directory]] = {}
    _known_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: Replicas = _NONE
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @classmethod
    def of(cls, app: str, deployment: str) -> Directory:
        """This process's directory of a deployment; empty until `watch` has had its effect."""
        with cls._known_lock:
            return cls._known.setdefault((app, deployment), cls())

    def watch(self, handle: Any) -> None:
        """Have `handle` (a DeploymentHandle of the deployment) keep this directory up to date.

        Serve makes a handle's router, which publishes here, on the handle's first use. Keep the
        handle: the router lives as long.
        """
        handle.options()

    def replicas(self) -> Replicas:
        """The running set now."""
        return self._replicas

    async def changed(self, seen: Replicas | None = None) -> None:
        """Wait for the next change; at once if the snapshot `seen` is out of date already."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if seen is not None and self._replicas is not seen:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
        try:
            await waiter
        finally:
            with self._lock:
                if (loop, waiter) in self._waiters:
                    self._waiters.remove((loop, waiter))

    async def changes(self) -> AsyncIterator[Replicas]:
        """The running set now, then after every change. What changes in between is one change."""
        while True:
            snapshot = self._replicas
            yield snapshot
            await self.changed(snapshot)

    def publish(self, replicas: Replicas) -> None:
        """Replace the running set. From any thread; nobody is told when nothing changed."""
        fresh = {replica_id: MappingProxyType(dict(meta)) for replica_id, meta in replicas.items()}
        with self._lock:
            if fresh == dict(self._replicas):
                return
            self._replicas = MappingProxyType(fresh)
            self._tell()

    def drop(self, replica_id: str) -> None:
        """One replica is known to be dead before Serve says so."""
        with self._lock:
            if replica_id in self._replicas:
                self._replicas = MappingProxyType(
                    {key: meta for key, meta in self._replicas.items() if key != replica_id}
                )
                self._tell()

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
