"""Keys from `user_config` and from a file that is read again when it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import yaml
from pydantic import ValidationError

from deployments.gateway.identity.config import Directory
from deployments.gateway.identity.keyring import KeyRing
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024


class KeySource:
    """Keeps the key ring that is in force.

    A file that cannot be read, or is wrong, changes nothing: the keys read last stay in force, and
    `faults` counts. At start it is an error: a gateway must not open its doors for want of a file.
    """

    def __init__(self, inline: Directory, path: str | None) -> None:
        """Raises ConfigError naming file and fault."""
        self._inline = inline
        self._path = None if path is None else Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self.faults = 0
        self.ring = self._read()

    def refresh(self) -> bool:
        """Look at the file, off the event loop. True: the ring has changed."""
        if self._path is None:
            return False
        try:
            if _stamp_of(self._path) == self._stamp:
                return False
            self.ring = self._read()
        except (OSError, ConfigError) as error:
            self.faults += 1
            logger.error("the keys in force stay as they are: %s", error)
            return False
        logger.info("keys read again from %s", self._path)
        return True

    def _read(self) -> KeyRing:
        if self._path is None:
            return KeyRing(self._inline)
        try:
            stamp = _stamp_of(self._path)
            directory = read_directory(self._path).joined(self._inline)
        except OSError as error:
            raise ConfigError(
                f"keys_file={str(self._path)!r}: {error.strerror}; make it readable for the "
                "gateway, or correct the path"
            ) from error
        except ValueError as error:
            raise ConfigError(f"keys_file={str(self._path)!r}: {_told(error)}") from None
        if not directory.keys:
            raise ConfigError(
                f"keys_file={str(self._path)!r} has no keys, which would let everybody in; add one "
                "(`tailrace keys new`), or leave keys_file out to mean that"
            )
        ring = KeyRing(directory)
        self._stamp = stamp
        return ring


def read_directory(path: Path) -> Directory:
    """The content of a keys file (YAML or JSON). Raises OSError, ValueError."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes: at most {MAX_FILE_BYTES} are read")
    try:
        content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        # Not the parser's own message: it quotes the file.
        raise ValueError(f"{where}no YAML; correct it") from None
    return Directory.model_validate(content or {})


def _stamp_of(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _told(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    # Without the values: somebody may have written a key where its hash belongs.
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg'].removeprefix('Value error, ')}"
        for e in error.errors(include_url=False, include_input=False)
    )
