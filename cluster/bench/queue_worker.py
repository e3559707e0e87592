"""The admission queue in a process of its own, as Ray gives it one.

`python -m cluster.bench.queue_worker` reads the links' secret (hexadecimal) from standard input,
writes the address to dial to standard output, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from cluster.errors import ClusterError


class QueueProcess:
    """The parent's end. Raises ClusterError where the process dies at once."""

    def __init__(self, secret: bytes) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "cluster.bench.queue_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(secret.hex() + "\n")
        self._child.stdin.flush()
        self.address = self._child.stdout.readline().strip()
        if not self.address:
            self.close()
            raise ClusterError("the queue's process ended at once; its last words are above")

    def __enter__(self) -> QueueProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


async def _serve() -> None:
    from deployments.admission.actor import QueueActor

    loop = asyncio.get_running_loop()
    secret = bytes.fromhex(sys.stdin.readline().strip())
    actor = QueueActor("bench", secret, host="127.0.0.1")
    print(await actor.address(), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await actor.close()


def main() -> None:
    # As Ray runs an actor: on uvloop where there is one.
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve())
    else:
        uvloop.run(_serve())


if __name__ == "__main__":
    main()
