"""A real Redis on a free port, without persistence."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from programs import program


class RedisServer:
    def __init__(self, folder: str, *, password: str | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        who = "" if password is None else f":{password}@"
        self.url = f"redis://{who}127.0.0.1:{self.port}/0"
        self._command = [
            *(
                program("redis-server", "redis-server"),
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
            ),
            *("--save", "", "--appendonly", "no", "--dir", folder),
            *(() if password is None else ("--requirepass", password)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "Redis does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: str, *, password: str | None = None) -> Iterator[RedisServer]:
    server = RedisServer(folder, password=password)
    server.start()
    try:
        yield server
    finally:
        server.kill()
