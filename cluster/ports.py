"""Ports: find free ones, and say who holds one that is taken."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection, Iterator

from cluster.errors import ClusterError, PortBusy
from engine.errors import ConfigError

# Below the range from which the kernel picks ports for outgoing connections (32768 on Linux, 49152
# elsewhere), so that nobody takes one by chance between our look and the listener's start.
_LOW, _HIGH = 20000, 32000


def check_free(host: str, port: int, *, setting: str, way_out: str) -> None:
    """Raise unless `host:port` can be listened on now.

    Raises:
        PortBusy: somebody listens there; the message names the holder when it can be known.
        ConfigError: no such address here, or the port needs privileges.
    """
    try:
        _bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(
                f"{setting}={port}: port {port} on {host} is taken by {holder(port)}; {way_out}"
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"{setting}={port}: ports below 1024 need privileges; use 1024 or more"
            ) from error
        raise ConfigError(
            f"http_options.host={host!r}: cannot listen there ({error.strerror or error}); "
            "use 127.0.0.1 for this machine only, 0.0.0.0 for every interface"
        ) from error


def holder(port: int) -> str:
    """Who listens on `port`, in words: `python (pid 12)`, or `another process`."""
    import psutil

    try:
        for connection in psutil.net_connections("inet"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass  # Other users' sockets are hidden from us: the port is busy all the same.
    return "another process"


def free_ports(count: int, *, avoid: Collection[int] = ()) -> list[int]:
    """`count` different ports nobody listens on, none of them in `avoid`."""
    found: list[int] = []
    for port in _candidates():
        if port not in avoid and _is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise ClusterError(f"no {count} free ports between {_LOW} and {_HIGH}; end something")


def free_range(size: int, *, avoid: Collection[int]) -> tuple[int, int]:
    """First and last port of `size` consecutive free ones, none of them in `avoid`."""
    for first in _candidates():
        block = range(first, first + size)
        if block.stop > _HIGH:
            continue
        if not any(port in block for port in avoid) and all(map(_is_free, block)):
            return block[0], block[-1]
    raise ClusterError(f"no {size} consecutive free ports above {_LOW}; end something")


def _candidates() -> Iterator[int]:
    # Random, not ascending: two clusters that start together should not look at the same ones.
    return iter(random.SystemRandom().sample(range(_LOW, _HIGH), _HIGH - _LOW))


def _is_free(port: int) -> bool:
    try:
        _bind("0.0.0.0", port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: connections in TIME_WAIT don't count, listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
