"""A driver of the session's Ray in a process of its own: asks replicas and queues what they hold.

One JSON object a line on standard input, one answer a line on standard output: `{"ok": ...}` or
`{"error": "..."}`. The tests' own process may have imported ray with other settings.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.head import connect
from cluster.state import StateDir


def main() -> None:
    state = StateDir(Path(sys.argv[1]))
    record = state.load()
    assert record is not None, "no session runs there"
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever Ray prints goes elsewhere
    connect(state, record)
    probe = Probe()
    print(json.dumps({"ok": "connected"}), file=out, flush=True)
    for line in sys.stdin:
        call: dict[str, Any] = json.loads(line)
        try:
            answer = {"ok": getattr(probe, call.pop("op"))(**call)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), file=out, flush=True)


class Probe:
    def __init__(self) -> None:
        self._handles: dict[tuple[str, str], Any] = {}

    def stats(self, app: str, deployment: str, replica: str, timeout_s: float) -> dict[str, Any]:
        """What one replica says of itself."""
        from ray import serve

        if (app, deployment) not in self._handles:
            handle = serve.get_deployment_handle(deployment, app_name=app)
            self._handles[app, deployment] = handle
        call = self._handles[app, deployment].stats.remote({"target": replica})
        return call.result(timeout_s=timeout_s)

    def queue(self, app: str, timeout_s: float) -> dict[str, Any]:
        """The queue's snapshot and its process id."""
        import ray

        actor = ray.get_actor(f"tailrace-queue:{app}", namespace="tailrace")
        calls = [actor.snapshot.remote(), actor.__ray_call__.remote(_pid)]
        snapshot, pid = ray.get(calls, timeout=timeout_s)
        return {**snapshot, "pid": pid}

    def queue_exists(self, app: str) -> bool:
        import ray

        try:
            ray.get_actor(f"tailrace-queue:{app}", namespace="tailrace")
        except ValueError:
            return False
        return True

    def watch(self, app: str, deployment: str, replica: str) -> None:
        """Let a decode replica note, a thousand times a second, when what it holds changes."""
        self._call(app, deployment, replica, _start_watch)

    def watched(self, app: str, deployment: str, replica: str) -> list[list[float]]:
        """`[monotonic seconds, streams, blocks held]` at every change since `watch`."""
        return self._call(app, deployment, replica, _seen)

    def _call(self, app: str, deployment: str, replica: str, function: Any) -> Any:
        import ray

        name = f"SERVE_REPLICA::{app}#{deployment}#{replica}"
        return ray.get(ray.get_actor(name, namespace="serve").__ray_call__.remote(function))


def _pid(actor: Any) -> int:
    return os.getpid()


def _service() -> Any:
    """The decode service of the replica in which this runs."""
    import gc

    from deployments.decode import DecodeService

    gc.unfreeze()  # Serve freezes what was there when the replica was ready
    (service,) = [found for found in gc.get_objects() if isinstance(found, DecodeService)]
    gc.freeze()
    return service


def _start_watch(actor: Any) -> None:
    import threading
    import time

    service = _service()
    seen: list[list[float]] = []

    def watch() -> None:
        while True:
            held = service.host.engine.stats().num_held_blocks
            state = [service.streams.num_streams, held]
            if not seen or seen[-1][1:] != state:
                seen.append([time.monotonic(), *state])
                del seen[:-1000]
            time.sleep(0.001)

    service.seen_by_tests = seen
    threading.Thread(target=watch, daemon=True).start()


def _seen(actor: Any) -> list[list[float]]:
    return _service().seen_by_tests


if __name__ == "__main__":
    main()
