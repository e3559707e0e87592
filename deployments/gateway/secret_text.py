"""Secrets that a configuration names instead of containing: in the environment, or in a file."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from engine.errors import ConfigError

MAX_FILE_BYTES = 65_536


class SecretSource(BaseModel):
    """Where a gateway finds a secret when it adopts the configuration. One of the two."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """An environment variable of the gateway's process. White space around it is cut."""

    file: str | None = Field(default=None, min_length=1)
    """A file on the gateway's machine, such as a mounted secret. White space around it is cut."""

    @model_validator(mode="after")
    def _one_of_them(self) -> SecretSource:
        if (self.env is None) == (self.file is None):
            raise ValueError("name one place: either env or file")
        return self


SECRET_TAGS = ("inline", "source")
"""What validation puts into the path of a field, by how the secret was given."""


def _kind(value: Any) -> str:
    return "source" if isinstance(value, dict | SecretSource) else "inline"


SecretText = Annotated[
    Annotated[str, Tag("inline")] | Annotated[SecretSource, Tag("source")], Discriminator(_kind)
]
"""The secret itself, or where it is."""


def read_secret(
    value: str | SecretSource, field: str, environment: Mapping[str, str] | None = None
) -> str:
    """The secret, without white space around it.

    Raises ConfigError naming the field and the place, never the content. Control characters are
    refused: libraries that send headers repeat one that they cannot send in their errors.
    """
    if isinstance(value, str):
        return _plain(value.strip(), f"{field}: the value")
    if value.env is not None:
        where = f"{field}: the environment variable {value.env}"
        found = (os.environ if environment is None else environment).get(value.env, "").strip()
    else:
        assert value.file is not None
        where = f"{field}: the file {value.file!r}"
        try:
            with Path(value.file).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            found = content.decode().strip()
        except OSError as error:
            raise ConfigError(
                f"{where}: {error.strerror}; make it readable for the gateways, or correct the path"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where} is not text; write the secret as UTF-8") from None
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{where} has more than {MAX_FILE_BYTES} bytes: that is no secret")
    if not found:
        raise ConfigError(f"{where} is empty or not there; put the secret there on every gateway")
    return _plain(found, where)


def _plain(found: str, where: str) -> str:
    if any(unicodedata.category(character) == "Cc" for character in found):
        raise ConfigError(
            f"{where} has control characters in it, such as the end of a line: write the secret "
            "alone, in one line"
        )
    return found
