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


def _pid(actor: Any) -> int:
    return os.getpid()


if __name__ == "__main__":
    main()
