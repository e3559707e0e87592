"""How much memory there is for KV, and how much of it an engine takes.

Free memory is measured, not assumed: on a CPU the least of what the kernel says is available and
what each memory limit (cgroup) around this process leaves, on a GPU what the driver says.

Engines that start together on one host must not count the same bytes twice. Each announces what it
will take before it loads its weights (`Claims`), measures while holding a lock, subtracts what
others announced and have not taken yet, and takes its pool's memory at once, page by page, before
it lets the lock go. So a pool that starts has its memory: running out later is preemption and
refusal of requests, not a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError
from engine.text.source import resolve_source

logger = logging.getLogger(__name__)

CPU_FRACTION: Final = 0.1
GPU_FRACTION: Final = 0.9
"""Of free memory, for KV, where the configuration names no size."""

_UNLIMITED: Final = 1 << 60
"""Version 1 of cgroups writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What one device has left, and who says so."""

    num_bytes: int
    source: str
    """In words, as `MemAvailable` or `the memory limit of cgroup /a`."""

    announced_bytes: int = 0
    """Subtracted already: what other engines on this host are about to take."""

    usual_fraction: float = CPU_FRACTION
    """What a KV pool takes of it where nothing is configured."""

    def __str__(self) -> str:
        others = (
            f", {megabytes(self.announced_bytes)} that other engines are about to take subtracted"
            if self.announced_bytes
            else ""
        )
        return f"{megabytes(max(self.num_bytes, 0))} ({self.source}{others})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one engine's memory is used for: what start-up and `tailrace status` tell."""

    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    """Tokens of context that fit at once."""

    free_bytes: int | None
    """Measured beside the loaded weights, before the pool was taken. None: not measured."""

    context_tokens: int
    """The longest request."""

    @property
    def full_batch(self) -> int:
        """Requests of the longest context that fit at once."""
        return self.kv_tokens // self.context_tokens

    def batch_at(self, context_tokens: int) -> int:
        """Requests of so many tokens each that fit at once."""
        return self.kv_tokens // context_tokens

    def __str__(self) -> str:
        return self.told(1024)

    def told(self, context_tokens: int) -> str:
        """In words, with the largest batch of requests of so many tokens, and of the longest."""
        free = "" if self.free_bytes is None else f" of {megabytes(self.free_bytes)} free"
        short = min(context_tokens, self.context_tokens)
        more = (
            ""
            if short == self.context_tokens
            else f", {self.full_batch} of {self.context_tokens} tokens"
        )
        return (
            f"weights {megabytes(self.weight_bytes)}, KV {megabytes(self.kv_bytes)}{free}: "
            f"{self.kv_tokens} tokens; largest batch {self.batch_at(short)} of {short} tokens{more}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The size of a KV pool as configured: one of a number of blocks, of bytes, or a fraction."""

    num_blocks: int | None
    kv_memory_bytes: int | None
    kv_memory_fraction: float | None
    """None: `CPU_FRACTION` or `GPU_FRACTION`."""

    block_tokens: int
    useful_tokens: int
    """More than all requests that may run can hold is not taken: the prefix cache alone would use
    it. For a fraction only."""

    def blocks(self, bytes_per_token: int, free: FreeMemory | None) -> int:
        """How many blocks to allocate, block 0 included.

        free: None where memory cannot be measured.

        Raises ConfigError for an explicit size that does not fit, and for one without room for a
        block; it names need, free memory and the way out.
        """
        block_bytes = bytes_per_token * self.block_tokens
        if self.num_blocks is not None:
            what, count = f"num_blocks={self.num_blocks}", self.num_blocks
        elif self.kv_memory_bytes is not None:
            what = f"kv_memory_bytes={self.kv_memory_bytes}"
            count = self.kv_memory_bytes // block_bytes
        else:
            if free is None:
                raise ConfigError(
                    "the free memory of CPU ranks on other machines is not measured: set "
                    "kv_memory_bytes"
                )
            fraction = self.kv_memory_fraction or free.usual_fraction
            what = f"kv_memory_fraction={fraction:g} of {free}"
            count = int(max(free.num_bytes, 0) * fraction) // block_bytes
            count = min(count, -(-self.useful_tokens // self.block_tokens) + 1)
        if count < 2:
            raise ConfigError(
                f"{what}: one block of {self.block_tokens} tokens takes {block_bytes} bytes and "
                "two are needed: raise it, free memory, or use a smaller model"
            )
        if free is not None and count * block_bytes > free.num_bytes:
            raise ConfigError(
                f"{what}: the KV pool needs {megabytes(count * block_bytes)}, free are {free}: "
                f"lower it to at most {max(free.num_bytes, 0)} bytes "
                f"({max(free.num_bytes, 0) // block_bytes} blocks), leave it out to take "
                "kv_memory_fraction of what is free, quantise the weights, or free memory"
            )
        return count


def megabytes(num_bytes: int) -> str:
    """For people: `512 MB`, `1.5 GB`."""
    if abs(num_bytes) >= 10**10:
        return f"{num_bytes / 1e9:.0f} GB"
    if abs(num_bytes) >= 10**9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"


def free_host_memory(root: Path = Path("/")) -> FreeMemory:
    """What this process may still take of the host's memory. `root`: of /proc and /sys, for tests.

    Raises ConfigError where the kernel does not say.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024
            for line in meminfo.splitlines()
            if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"{root}proc/meminfo: free memory cannot be read ({error!r}): set kv_memory_bytes"
        ) from error
    best = FreeMemory(available, "MemAvailable")
    for free in _limits(root):
        if free.num_bytes < best.num_bytes:
            best = free
    return best


def _limits(root: Path) -> Iterator[FreeMemory]:
    """What each memory limit around this process leaves, the outer ones too."""
    for hierarchy, path in _groups(root):
        version2 = hierarchy == "0"
        base = root / ("sys/fs/cgroup" if version2 else "sys/fs/cgroup/memory")
        parts = [part for part in path.split("/") if part]
        # In a container the group's own path may not be visible: the mount's root is then it.
        for depth in range(len(parts), -1, -1):
            found = _left_by(base.joinpath(*parts[:depth]), version2)
            if found is not None:
                name = "/" + "/".join(parts[:depth])
                yield FreeMemory(found, f"the memory limit of cgroup {name}")


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Hierarchy and path of the groups that limit memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" or "memory" in controllers.split(","):
            yield hierarchy, path


def _left_by(group: Path, version2: bool) -> int | None:
    """Bytes below one group's limit; cached files count as free. None: no limit, or no group."""
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit = (group / names[0]).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((group / names[1]).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(stat.get(names[2], 0))


class Claims:
    """What engines of this host have announced and not taken yet: one small file for each process.

    The directory belongs to the user. What a process that died announced counts no longer. Where
    there can be no such directory, each engine measures by itself.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if directory is None:
            shared = Path("/dev/shm")
            base = shared if shared.is_dir() else Path(tempfile.gettempdir())
            directory = base / f"tailrace-memory-{os.getuid()}"
        self._directory = directory

    @contextlib.contextmanager
    def locked(self) -> Generator[int]:
        """While one engine measures and takes, others wait. Yields what others have announced.

        Not for a thread that holds it.
        """
        with contextlib.ExitStack() as stack:
            try:
                if self._usable():
                    file = stack.enter_context((self._directory / "lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                _tell_unusable(self._directory, str(error))
            yield self.others()

    def announce(self, num_bytes: int) -> None:
        """This process will take so many bytes more. Call `clear` when it has, or does not."""
        if not self._usable():
            return
        pid = os.getpid()
        body = json.dumps({"pid": pid, "started": _started(pid), "bytes": num_bytes})
        new = self._directory / f".{pid}"
        try:
            new.write_text(body)
            new.replace(self._directory / f"{pid}.json")
        except OSError as error:
            _tell_unusable(self._directory, str(error))

    def clear(self) -> None:
        """This process takes nothing more."""
        try:
            (self._directory / f"{os.getpid()}.json").unlink(missing_ok=True)
        except OSError as error:
            _tell_unusable(self._directory, str(error))

    def _usable(self) -> bool:
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            ours = self._directory.stat().st_uid == os.getuid()
        except OSError as error:
            _tell_unusable(self._directory, str(error))
            return False
        if not ours:
            _tell_unusable(self._directory, "it belongs to another user")
        return ours

    def others(self) -> int:
        """Bytes that other living processes have announced."""
        total = 0
        for path in self._directory.glob("*.json"):
            try:
                claim: Mapping[str, Any] = json.loads(path.read_text())
                pid, started, num_bytes = claim["pid"], claim["started"], int(claim["bytes"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being replaced, or not ours
            if _started(pid) != started:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            elif pid != os.getpid():
                total += num_bytes
        return total


_unusable: set[Path] = set()


def _tell_unusable(directory: Path, reason: str) -> None:
    """Once."""
    if directory in _unusable:
        return
    _unusable.add(directory)
    logger.warning(
        "%s cannot be used (%s): engines that start on this host at the same time may count the "
        "same free memory twice",
        directory,
        reason,
    )


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the machine did. None: there is none."""
    try:
        # The name may hold spaces and brackets; what follows it does not.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def free_memory(
    device_type: str,
    device_index: int | None = None,
    *,
    announced_bytes: int = 0,
    limit_bytes: int | None = None,
) -> FreeMemory:
    """What an engine may still take on a device: `cpu` or `cuda`.

    announced_bytes: what others on this host will take. limit_bytes: what this process may hold of
    the host's memory in all, if that is declared. Raises ConfigError where it cannot be measured.
    """
    if device_type == "cuda":
        import torch  # only where there is a GPU to ask

        free, _ = torch.cuda.mem_get_info(device_index)
        return FreeMemory(
            int(free), f"the driver, for GPU {device_index or 0}", usual_fraction=GPU_FRACTION
        )
    if device_type != "cpu":
        raise ConfigError(
            f"free memory of {device_type} devices cannot be measured: set kv_memory_bytes"
        )
    free = free_host_memory()
    free = replace(
        free, num_bytes=free.num_bytes - announced_bytes, announced_bytes=announced_bytes
    )
    if limit_bytes is None:
        return free
    below = limit_bytes - _resident_bytes()
    return min(
        free, FreeMemory(below, "the memory this replica declares"), key=lambda f: f.num_bytes
    )


def free_on_devices(ranks: Sequence[tuple[int | None, int]]) -> FreeMemory | None:
    """What ranks with a device each may still take, all together: none more than the fullest can.

    ranks: bytes free on its device beside the weights, None where it has none, and bytes of a token
    that it keeps. None: not all of them have a device.
    """
    tokens: list[int] = []
    for free, token_bytes in ranks:
        if free is None:
            return None
        tokens.append(free // token_bytes)
    fullest = min(range(len(tokens)), key=tokens.__getitem__)
    return FreeMemory(
        tokens[fullest] * sum(token_bytes for _, token_bytes in ranks),
        f"the drivers, for {len(tokens)} ranks: rank {fullest} has the least room",
        usual_fraction=GPU_FRACTION,
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def expected_bytes(source: str) -> int:
    """About what the weights of a model source will take: the size of its files.

    What is expanded at load takes more, up to four times for codes of 4 bits.
    """
    path = resolve_source(source).path
    if path is None:
        return 0
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
