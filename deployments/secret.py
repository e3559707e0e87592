"""The cluster's link secret: one file that every process of the cluster can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError

SECRET_FILE_VARIABLE = "TAILRACE_LINK_SECRET_FILE"


def read_link_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """The secret's bytes. Raises ConfigError naming the variable or file at fault.

    Read once, when a replica starts. Its content never appears in a message.
    """
    path = (environment or os.environ).get(SECRET_FILE_VARIABLE)
    if not path:
        raise ConfigError(
            f"{SECRET_FILE_VARIABLE} is not set: links are authenticated with the secret in the "
            "file it names; `tailrace up` makes one, on a cluster mount the same file everywhere"
        )
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE_VARIABLE}={path}: {error.strerror}") from error
    return secret
