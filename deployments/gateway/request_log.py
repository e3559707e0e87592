"""The request log: a line of JSON for each request that was understood, without its text.

It holds what replaying the traffic takes (`tailrace replay requests.jsonl`): when it came, how long
prompt and answer were, which prompts begin alike, and what became of it. Prompts are told apart by
a chain of hashes over blocks of 64 tokens, keyed with a secret of the deployment, so that nobody
who reads the log can tell a prompt by hashing guesses. Tenants are hashed the same way.

The event loop appends to a list. Once a second a thread hashes, encodes and writes what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from deployments.background import background
from deployments.gateway.config import RequestLogging
from engine.errors import ConfigError
from engine.request import Request

logger = logging.getLogger(__name__)

VERSION = 1
BLOCK_TOKENS = 64
FLUSH_EVERY_S = 1.0
MOST_WAITING = 50_000
"""Requests noted but not written, where the disk does not keep up. Further ones are dropped and
counted in the gateway's log."""

_SAMPLING: tuple[tuple[str, Any], ...] = (
    ("temperature", 1.0),
    ("top_p", 1.0),
    ("top_k", 0),
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("ignore_eos", False),
)
"""What is told of the sampling where it differs from these. Stop strings are text and are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """One request of a client as it ended. Cheap to make: nothing is copied."""

    at_unix_s: float
    """When it came."""

    endpoint: str
    stream: bool
    model: str
    tier: str
    tenant: str
    requests: tuple[Request, ...]
    """One a prompt."""

    n: int
    completion_tokens: int
    cached_tokens: int
    finish: tuple[str, ...]
    """Reasons of the choices that have one."""

    status: int
    """Of HTTP; 499 where the client left."""

    code: str | None
    phases: Sequence[tuple[str, float]]
    ttft_s: float | None
    duration_s: float


class RequestLog:
    """One gateway's log. Everything but the writing happens on its event loop."""

    def __init__(self, secret: bytes, own_id: str) -> None:
        """`secret` is the deployment's; what the log is keyed with cannot be turned back into it.
        `own_id` tells this gateway's file from another's on the same machine."""
        self._key = hashlib.blake2b(secret, person=b"tailrace/req-log").digest()
        self._own_id = own_id
        self._settings: RequestLogging | None = None
        self._file: _RotatingFile | None = None
        self._waiting: list[Noted] = []
        self._dropped = 0
        self._writer: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    @property
    def path(self) -> Path | None:
        """The file that is written. None: off."""
        return None if self._file is None else self._file.path

    def note(self, noted: Noted) -> None:
        """Remember it until the next writing."""
        if self._file is None:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(noted)

    async def configure(self, settings: RequestLogging | None) -> None:
        """Begin, go on elsewhere or stop. Raises ConfigError where the file cannot be written, and
        changes nothing."""
        if settings == self._settings:
            return
        before = self._settings
        if settings is not None and before is not None and settings.path == before.path:
            assert self._file is not None, "a log that is on has its file"
            self._settings = self._file.settings = settings
            return
        new = None if settings is None else _RotatingFile(settings, self._own_id)
        async with self._writing:
            await self._flush()
            if self._file is not None:
                self._file.close()
            self._settings, self._file = settings, new
        if self._writer is None:
            self._writer = background(self._write_on(), "request log")

    async def close(self) -> None:
        """Write what came and end."""
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None
        async with self._writing:
            await self._flush()
            if self._file is not None:
                self._file.close()
            self._settings = self._file = None

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            async with self._writing:
                await self._flush()

    async def _flush(self) -> None:
        file = self._file
        if file is None or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning(
                "%d requests are missing from %s: writing does not keep up", dropped, file.path
            )
        await asyncio.to_thread(self._write, file, batch)

    def _write(self, file: _RotatingFile, batch: Sequence[Noted]) -> None:
        """In a thread."""
        try:
            for noted in batch:
                file.write(b"".join(lines(noted, self._key)))
            file.flush()
        except OSError as error:
            logger.warning("%d requests could not be written: %s", len(batch), error)


def lines(noted: Noted, key: bytes) -> list[bytes]:
    """The lines of one request: one a prompt, which is what an engine sees."""
    tenant = hashlib.blake2b(noted.tenant.encode(), key=key, digest_size=8, person=b"tenant")
    out: list[bytes] = []
    for request in noted.requests:
        params = request.params
        value = {
            "log": VERSION,
            "at": round(noted.at_unix_s, 6),
            "endpoint": noted.endpoint,
            "stream": noted.stream,
            "model": noted.model,
            "tier": noted.tier,
            "tenant": tenant.hexdigest(),
            "prompt_tokens": len(request.prompt_ids),
            "max_tokens": params.max_tokens,
            "choices": noted.n,
            # Of several prompts only the sum is known.
            "completion_tokens": noted.completion_tokens // len(noted.requests),
            "cached_tokens": noted.cached_tokens // len(noted.requests),
            "sampling": {
                name: given
                for name, usual in _SAMPLING
                if (given := getattr(params, name)) != usual
            },
            "outcome": _OUTCOMES.get(noted.status, "failed"),
            "status": noted.status,
            "code": noted.code,
            "finish": noted.finish,
            "phases": {name: round(seconds, 6) for name, seconds in noted.phases},
            "ttft_s": None if noted.ttft_s is None else round(noted.ttft_s, 6),
            "duration_s": round(noted.duration_s, 6),
            "blocks": block_chain(request.prompt_ids, key, f"{noted.tenant}\0{noted.model}"),
        }
        out.append(orjson.dumps(value) + b"\n")
    return out


_OUTCOMES = {200: "finished", 499: "disconnected"}


def block_chain(token_ids: Sequence[int], key: bytes, domain: str) -> list[str]:
    """Hashes of the full blocks, each over all tokens before it too, in hexadecimal.

    `domain` is who may share with whom: equal prompts of two tenants have nothing in common here.
    """
    parent = hashlib.blake2b(domain.encode(), key=key, digest_size=8, person=b"domain").digest()
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    chain: list[str] = []
    for end in range(8 * BLOCK_TOKENS, len(packed) + 1, 8 * BLOCK_TOKENS):
        block = packed[end - 8 * BLOCK_TOKENS : end]
        parent = hashlib.blake2b(parent + block, key=key, digest_size=8, person=b"block").digest()
        chain.append(parent.hex())
    return chain


class _RotatingFile:
    """A file that one process writes, renamed to `.1`, `.2`, ... when it is full."""

    def __init__(self, settings: RequestLogging, own_id: str) -> None:
        """Raises ConfigError."""
        self.settings = settings
        """How large it grows and what is kept; may be replaced."""

        wanted = Path(settings.path).expanduser()
        # A gateway that is being replaced still writes its own: the new one takes another name.
        names = [wanted, wanted.with_name(f"{wanted.stem}-{own_id}{wanted.suffix}")]
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            for self.path in names:
                file = self._open(self.path)
                if file is not None:
                    self._file = file
                    return
        except OSError as error:
            raise ConfigError(
                f"user_config.request_log.path={settings.path!r}: {error.strerror}; name a file "
                "that this gateway may write"
            ) from error
        raise ConfigError(
            f"user_config.request_log.path={settings.path!r}: other gateways write it and "
            f"{names[1].name}; name another file"
        )

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        if self._size and self._size + len(data) > self.settings.max_bytes:
            self._rotate()
        self._file.write(data)
        self._size += len(data)

    def flush(self) -> None:
        """Raises OSError."""
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _open(self, path: Path) -> IO[bytes] | None:
        """The file, None while somebody else has it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        self._size = file.tell()
        return file

    def _rename(self) -> None:
        for number in range(self.settings.keep - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        if self.settings.keep:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        else:
            self.path.unlink()

    def _rotate(self) -> None:
        self._file.flush()
        if self.path.exists():  # else it was renamed already, and no new one could be opened
            self._rename()
        file = self._open(self.path)
        if file is None:
            raise BlockingIOError(f"{self.path}: taken by another process")
        # Only now: what cannot be opened must not leave us with a closed file.
        self._file.close()
        self._file = file


def unix_s(monotonic_s: float) -> float:
    """The wall clock's time of a moment of this process's monotonic clock."""
    return time.time() - (time.monotonic() - monotonic_s)
