"""What is compared: something that can be brought up, loaded, and taken down again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from cluster import processes, session
from cluster.compare.edits import MODEL_BUILDER, applications
from cluster.compare.ready import Variant
from cluster.ports import free_ports
from cluster.replay.server import base_url
from cluster.state import Record, StateDir

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A side that answers."""

    url: str
    ready_s: float | None = None
    """From nothing to answering; None where it ran before."""

    replicas: Mapping[str, str] = field(default_factory=dict[str, str])
    """Readable names of the replicas that its metrics tell of."""

    block_tokens: int | None = None
    """Of its prefix cache, where that is known."""

    processes: Callable[[], list[psutil.Process]] = list[psutil.Process]
    """Its processes on this machine, as far as they are known."""


class Side(Protocol):
    """One of the things compared."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, Any]:
        """For the report, in plain values."""
        ...

    def serving(self, say: Say) -> AbstractContextManager[Served]:
        """Up inside the `with`, gone behind it. Raises ClusterError, ConfigError."""
        ...


class ConfigSide:
    """A configuration of ours, in a session with a state directory of its own."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    @property
    def name(self) -> str:
        return self._variant.name

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "configuration",
            "source": self._variant.config.source,
            "changes": list(self._variant.changes),
            "configuration": self._variant.config.data,
        }

    @contextmanager
    def serving(self, say: Say) -> Iterator[Served]:
        # Beside the others, so that nothing of one side is warm for another; short, since Unix
        # sockets lie below it.
        home = Path(tempfile.mkdtemp(prefix="tr-compare-"))
        state = StateDir(home)
        up: session.Up | None = None
        try:
            config = self._variant.config
            up = session.bring_up(state, config, port=free_ports(1)[0], say=say)
            assert up.record is not None, "a session that was started has a record"
            yield Served(
                url=up.url,
                ready_s=up.ready_s,
                replicas=_replica_names(state),
                block_tokens=_block_tokens(config.data),
                processes=_of(up.record),
            )
        finally:
            session.take_down(state)
            if up is not None and up.child is not None:
                up.child.wait()
            shutil.rmtree(home, ignore_errors=True)


class UrlSide:
    """A server that somebody else runs."""

    def __init__(self, name: str, url: str) -> None:
        """Raises ClusterError for what is no address."""
        self._name = name
        self._url = base_url(url)

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> dict[str, Any]:
        return {"name": self._name, "kind": "url", "url": self._url}

    @contextmanager
    def serving(self, say: Say) -> Iterator[Served]:
        yield Served(url=self._url)


def _replica_names(state: StateDir) -> dict[str, str]:
    """`Decode 1` for what metrics call by its replica's id."""
    names: dict[str, str] = {}
    for application in session.status(state).applications:
        for deployment in application.deployments:
            for number, replica in enumerate(deployment.replicas, 1):
                names[replica.replica_id] = f"{deployment.name} {number}"
    return names


def _block_tokens(data: Mapping[str, Any]) -> int | None:
    from deployments.settings import block_tokens_of

    models = applications(data, MODEL_BUILDER)
    found = {block_tokens_of(each.get("args") or {}) for each in models}
    return found.pop() if len(found) == 1 else None


def _of(record: Record) -> Callable[[], list[psutil.Process]]:
    return lambda: processes.of_session(record.session)
