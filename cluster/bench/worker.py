"""The process that puts load on, apart from the one that reads CPU times and talks to Ray.

`python -m cluster.bench.worker` takes one JSON command a line on standard input and answers each
with one JSON line on standard output:

    {"do": "engine", "args": {...}, "settings": {...}}    build an engine here
    {"do": "server", "url": "http://...", "resend": false}    the server to ask
    {"do": "closed", "side": SIDE, "asks": [...], "concurrency": 8}
    {"do": "arrivals", "side": SIDE, "asks": [...], "over_s": 1.0}
    {"do": "at_times", "side": SIDE, "asks": [...], "times_s": [0.0, 0.4, ...]}

SIDE is `engine` or `server`. Torch is imported by the first command only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.client import Client, StreamResult
from cluster.bench.loads import Ask, Target, arrivals, at_times, closed_loop
from cluster.errors import ClusterError
from engine.errors import EngineError


class Server:
    """`loads.Target` over HTTP."""

    def __init__(self, url: str, *, resend: bool = False) -> None:
        self._client = Client(url, resend=resend)

    async def warm(self, count: int) -> None:
        await self._client.warm(count)

    async def ask(self, ask: Ask) -> StreamResult:
        import orjson

        return await self._client.stream(ask.path, orjson.dumps(ask.body))

    def close(self) -> None:
        self._client.close()


class Commands:
    """Carries out the commands of one worker."""

    def __init__(self) -> None:
        self._targets: dict[str, Any] = {}

    async def on(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EngineError."""
        match command["do"]:
            case "engine":
                from cluster.bench.in_process import InProcess

                engine = InProcess(command["args"], command["settings"])
                self._targets["engine"] = engine
                return {"threads": _torch_threads(), "dtype": engine.built.model.dtype}
            case "server":
                self._targets["server"] = Server(command["url"], resend=command["resend"])
                return {}
            case "closed":
                results = await closed_loop(
                    self._target(command), _asks(command), command["concurrency"]
                )
            case "arrivals":
                results = await arrivals(self._target(command), _asks(command), command["over_s"])
            case "at_times":
                asks = _asks(command)
                await self._target(command).warm(min(len(asks), 64))
                results = await at_times(self._target(command), asks, command["times_s"])
            case other:
                raise AssertionError(f"no such command: {other}")
        # Failures have no end; the parent gives up on them anyway.
        ended = [result.end_s for result in results if result.end_s is not None]
        wall_s = max(ended, default=0.0) - min(result.sent_s for result in results)
        return {"results": [result.to_json() for result in results], "wall_s": wall_s}

    def close(self) -> None:
        for target in self._targets.values():
            target.close()

    def _target(self, command: Mapping[str, Any]) -> Target:
        return self._targets[command["side"]]


def _asks(command: Mapping[str, Any]) -> list[Ask]:
    return [Ask(**{**ask, "prompt_ids": tuple(ask["prompt_ids"])}) for ask in command["asks"]]


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Load:
    """What one load brought."""

    results: list[dict[str, Any]]
    """One an ask, in their order, as `StreamResult.to_json`."""

    wall_s: float
    """From the first request to the end of the last answer."""


class Worker:
    """The parent's end. Raises ClusterError where the worker dies."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "cluster.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            # Linux shares the processor out by session first, and each replica leads its own: in
            # ours the engine would get less of a busy machine than the one it is compared with.
            start_new_session=True,
        )
        self.pid = self._child.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        # A child that died leaves words behind that nobody will take.
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def engine(self, args: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
        return self._ask({"do": "engine", "args": args, "settings": settings})

    def server(self, url: str, *, resend: bool = False) -> None:
        """resend: see `Client`."""
        self._ask({"do": "server", "url": url, "resend": resend})

    def closed(self, side: str, asks: Sequence[Ask], concurrency: int) -> Load:
        """Raises ClusterError if any request failed."""
        return self._load(
            {"do": "closed", "side": side, "asks": _wire(asks), "concurrency": concurrency}
        )

    def arrivals(self, side: str, asks: Sequence[Ask], over_s: float) -> Load:
        """As `closed`."""
        return self._load({"do": "arrivals", "side": side, "asks": _wire(asks), "over_s": over_s})

    def at_times(self, side: str, asks: Sequence[Ask], times_s: Sequence[float]) -> Load:
        """As `closed`; each request at its time in seconds."""
        return self._load(
            {"do": "at_times", "side": side, "asks": _wire(asks), "times_s": list(times_s)}
        )

    def _load(self, command: Mapping[str, Any]) -> Load:
        answer = self._ask(command)
        results = answer["results"]
        failed = [result["error"] for result in results if result["error"]]
        if failed:
            raise ClusterError(
                f"{len(failed)} of {len(results)} requests failed, so nothing was measured; "
                f"the first: {failed[0]}"
            )
        return Load(results, answer["wall_s"])

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ClusterError(
                f"the load process ended with status {self._child.wait()}; its last words are above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer


def _wire(asks: Sequence[Ask]) -> list[dict[str, Any]]:
    return [asdict(ask) for ask in asks]


async def _serve() -> None:
    commands = Commands()
    loop = asyncio.get_running_loop()
    try:
        # Read in a thread: with the engine idle there is nothing else to wait for.
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            try:
                answer = await commands.on(json.loads(line))
            except EngineError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        commands.close()


def main() -> None:
    try:
        import uvloop
    except ImportError:  # Not on every platform; the numbers then hold a little more of the client.
        asyncio.run(_serve())
    else:
        uvloop.run(_serve())


if __name__ == "__main__":
    main()
