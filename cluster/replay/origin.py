"""Where a run took place: this machine, these versions, and the server as far as it is ours."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import psutil

from cluster.errors import ClusterError

_VECTOR = ("amx", "asimd", "avx", "bf16", "fma", "i8mm", "sse4", "sve")
_SECRET = re.compile(r"key|secret|passw|credential|^auth|^tokens?$", re.IGNORECASE)


def machine() -> dict[str, Any]:
    """Of the client."""
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "vector_extensions": _vector_extensions(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("tailrace", "ray", "torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> tuple[str, ...]:
    """The command line, without the value of `--api-key`."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=..."
        elif i and words[i - 1] == "--api-key":
            words[i] = "..."
    return tuple(words)


def cpu_wait_s() -> float | None:
    """Seconds that this process's main thread waited for a core so far; None if unknown."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def own_applications(url: str) -> list[dict[str, Any]] | None:
    """The Serve applications deployed at `url`, secrets left out; None if that is no session of
    this state directory."""
    from cluster.bench.stack import Stack

    try:
        stack = Stack.running(url)
        if not stack.is_ours:
            return None
        return [_told(config) for config in stack.configs()]
    except ClusterError:
        return None


def cache_block_tokens(applications: list[dict[str, Any]] | None) -> int | None:
    """Block size of the prefix caches of these applications, where it is one."""
    from deployments.settings import block_tokens_of

    if applications is None:
        return None
    found = {
        block_tokens_of(application.get("args") or {})
        for application in applications
        if application.get("import_path") == "deployments.app:model"
    }
    return found.pop() if len(found) == 1 else None


def _told(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {
            key: "..." if _SECRET.search(key) and each is not None else _told(each)
            for key, each in items
        }
    if isinstance(value, list):
        return [_told(each) for each in cast("list[Any]", value)]
    if isinstance(value, str) and re.search(r"://[^/@]*:[^/@]*@", value):
        return re.sub(r"://[^/@]*@", "://...@", value)
    return value


def _vector_extensions() -> str:
    """Flags of the processor that decide which kernels run."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return " ".join(sorted(each for each in flags if each.startswith(_VECTOR)))


def _cpuinfo(key: str) -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return None
