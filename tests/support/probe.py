"""A driver of the session's Ray in a process of its own: asks replicas and queues what they hold.

One JSON object a line on standard input, one answer a line on standard output: `{"ok": ...}` or
`{"error": "..."}`. The tests' own process may have imported ray with other settings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
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
        self._second: Any = None

    def stats(self, app: str, deployment: str, replica: str, timeout_s: float) -> dict[str, Any]:
        """What one replica says of itself."""
        from ray import serve

        if (app, deployment) not in self._handles:
            handle = serve.get_deployment_handle(deployment, app_name=app)
            self._handles[app, deployment] = handle
        call = self._handles[app, deployment].stats.remote({"target": replica})
        return call.result(timeout_s=timeout_s)

    def queue(self, app: str, timeout_s: float) -> dict[str, Any]:
        """The snapshot of the queue that leads; of one that stands by while none does."""
        import ray
        from ray.exceptions import RayError

        until = time.monotonic() + timeout_s
        asked = [actor.snapshot.remote() for actor in self._queues(app).values()]
        told: dict[str, Any] | None = None
        while asked and (told is None or not told["leads"]):
            left_s = max(0.0, until - time.monotonic())
            answered, asked = ray.wait(asked, num_returns=1, timeout=left_s)
            if not answered:
                break
            with suppress(RayError):  # its process has just died
                told = ray.get(answered[0])
        if told is None:
            raise TimeoutError(f"no queue of {app} answers")
        return told

    def queue_at(self, app: str, place: int, timeout_s: float) -> dict[str, Any] | None:
        """The snapshot of one of the two; None while it does not answer."""
        import ray
        from ray.exceptions import RayError

        actors = list(self._queues(app).values())
        try:
            return ray.get(actors[place].snapshot.remote(), timeout=timeout_s)
        except (IndexError, RayError):
            return None

    def _queues(self, app: str) -> dict[str, Any]:
        """Handles by name, of those that there are."""
        import ray

        found: dict[str, Any] = {}
        for name in (f"tailrace-queue:{app}", f"tailrace-queue:{app}:2"):
            with suppress(ValueError):
                found[name] = ray.get_actor(name, namespace="tailrace")
        return found

    def queue_exists(self, app: str) -> bool:
        return bool(self._queues(app))

    def watch(self, app: str, deployment: str, replica: str) -> None:
        """Let a decode replica note, a thousand times a second, when what it holds changes.
        Twice is once."""
        self._call(app, deployment, replica, _start_watch)

    def watched(self, app: str, deployment: str, replica: str) -> list[list[float]]:
        """`[monotonic seconds, streams, blocks held]` at every change since `watch`, which comes
        late for a replica that took the place of another."""
        self.watch(app, deployment, replica)
        return self._call(app, deployment, replica, _seen)

    def second_queue(self, app: str, decode: str, gateway: str) -> None:
        """One more queue of a model, as an actor of its own: its decode replica reports to both,
        and one gateway, which has no other model, asks the second."""
        import ray

        from deployments.admission.actor import NAMESPACE, QueueActor, queue_name

        named = {"name": queue_name("second"), "namespace": NAMESPACE, "num_cpus": 0}
        self._second = ray.remote(QueueActor).options(**named).remote("second", alone=True)
        address = ray.get(self._second.address.remote(), timeout=30)
        self._call(app, "Decode", decode, _report_to, address)
        self._call("gateway", "Gateway", gateway, _ask_queue_at, address)

    def one_queue(self, app: str, decode: str, gateway: str) -> None:
        """Undo `second_queue`."""
        import ray

        self._call("gateway", "Gateway", gateway, _ask_queue_at, None)
        self._call(app, "Decode", decode, _report_to, None)
        ray.kill(self._second)

    def _call(self, app: str, deployment: str, replica: str, function: Any, *arguments: Any) -> Any:
        import ray

        name = f"SERVE_REPLICA::{app}#{deployment}#{replica}"
        actor = ray.get_actor(name, namespace="serve")
        return ray.get(actor.__ray_call__.remote(function, *arguments))


def _service() -> Any:
    """The decode service of the replica in which this runs."""
    from deployments.decode import DecodeService

    return _the_only(DecodeService)


def _the_only(kind: type) -> Any:
    """The object of this type that there is in this process."""
    import gc

    gc.unfreeze()  # Serve freezes what was there when the replica was ready
    (found,) = [each for each in gc.get_objects() if isinstance(each, kind)]
    gc.freeze()
    return found


def _report_to(actor: Any, address: str | None) -> None:
    """Also to the queue at `address`; None: to its own alone."""
    from deployments.admission.client import QueueReporter

    service = _service()

    class Both:
        first = service.reporter
        second: Any = None

        def changed(self, report: Any) -> None:
            self.first.changed(report)
            self.second.changed(report)

        async def close(self) -> None:
            await self.first.close()
            await self.second.close()

    async def find() -> str:
        return str(address)

    def begin() -> None:
        both = Both()
        both.second = QueueReporter(find, service._secret, service.replica_id)
        service.reporter = both
        both.second.changed(service.report())
        both.second.start()

    def end() -> None:
        both, service.reporter = service.reporter, service.reporter.first
        service.closing = loop.create_task(both.second.close())

    kept = service.reporter if address is not None else service.reporter.first
    loop = kept._queues._kept[0]._task.get_loop()
    loop.call_soon_threadsafe(end if address is None else begin)


def _ask_queue_at(actor: Any, address: str | None) -> None:
    """A gateway asks the queue at `address` from now on; None: its own again."""
    from deployments.admission.client import QueueClient

    client = _the_only(QueueClient)
    links = client._queues._kept

    async def find() -> str:
        return str(address)

    async def nowhere() -> str:
        raise LookupError("this gateway asks another queue")

    if address is None:
        finders = client.found_before
    else:
        client.found_before = [kept._find_address for kept in links]
        finders = [find, nowhere]
    for kept, finder in zip(links, finders, strict=True):
        kept._find_address = finder
        if kept._link is not None:
            kept._task.get_loop().call_soon_threadsafe(kept._link.close, "another queue")


def _start_watch(actor: Any) -> None:
    import threading
    import time

    service = _service()
    if hasattr(service, "seen_by_tests"):
        return
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
