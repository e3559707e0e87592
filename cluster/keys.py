"""`tailrace keys`: make API keys, and check a file of them."""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from cluster.cli import emit, json_option, say
from deployments.gateway.identity.config import DEFAULT_TENANT, Directory, Key
from deployments.gateway.identity.keyring import KeyRing, hash_key, new_key
from deployments.gateway.identity.source import read_directory
from engine.errors import ConfigError


@click.group()
def keys() -> None:
    """API keys: only their hashes are ever written down."""


@keys.command()
@click.option("--id", "key_id", required=True, help="Name of the key in logs and metrics.")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True)
@click.option("--expires", metavar="TIME", help="ISO 8601 with time zone, as 2031-01-31T00:00:00Z.")
@click.option("--operator", is_flag=True, help="May look at every tenant's requests.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A keys_file to add it to; gateways that watch it take it in within seconds.",
)
@json_option
def new(
    key_id: str, tenant: str, expires: str | None, operator: bool, path: Path | None, as_json: bool
) -> None:
    """Make a key. It is shown once; the entry for `keys` or a keys_file holds its hash."""
    key = new_key()
    entry: dict[str, Any] = {"id": key_id, "sha256": hash_key(key), "tenant": tenant}
    if expires is not None:
        entry["expires"] = expires
    if operator:
        entry["operator"] = True
    try:
        Key.model_validate(entry | ({} if expires is None else {"expires": _time(expires)}))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'key'}={e['input']!r}: {e['msg']}"
            for e in error.errors(include_url=False)
        )
        raise ConfigError(f"{faults}; correct it") from None
    if path is not None:
        _add(path, entry)
    if as_json:
        emit({"key": key, "entry": entry, "file": None if path is None else str(path)})
        return
    click.echo(key)
    if path is None:
        say("shown once; its entry for `keys` in the gateway's user_config:")
        say(yaml.safe_dump([entry], sort_keys=False).rstrip())
    else:
        say(f"shown once; {path} has its hash")


@keys.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def check(path: Path, as_json: bool) -> None:
    """Say whether a gateway would take a keys_file."""
    directory = _read(path)
    KeyRing(
        directory
    )  # Tenants may also be declared beside the file: that is the gateway's to say.
    found = [
        {
            "id": key.id,
            "tenant": key.tenant,
            "operator": key.operator,
            "expires": None if key.expires is None else key.expires.isoformat(),
        }
        for key in directory.keys
    ]
    if as_json:
        emit({"keys": found, "tenants": sorted(directory.tenants)})
        return
    for entry in found:
        more = " operator" if entry["operator"] else ""
        until = f" until {entry['expires']}" if entry["expires"] else ""
        click.echo(f"{entry['id']}  {entry['tenant']}{more}{until}")


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(
            f"expires={text!r}: no time in ISO 8601; write it as 2031-01-31T00:00:00Z"
        ) from None


def _read(path: Path) -> Directory:
    try:
        return read_directory(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False, include_input=False)
        )
        raise ConfigError(f"{path}: {faults}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _add(path: Path, entry: dict[str, Any]) -> None:
    """Add an entry so that nobody ever reads half a file."""
    content: dict[str, Any] = {}
    if path.exists():
        directory = _read(path)
        if any(key.id == entry["id"] for key in directory.keys):
            raise ConfigError(f"{path}: it has a key {entry['id']!r} already; choose another id")
        tenants = directory.tenants
        if tenants and entry["tenant"] not in tenants:
            raise ConfigError(
                f"{path}: there is no tenant {entry['tenant']!r} in it, and gateways would refuse "
                f"the file; give --tenant one of {', '.join(sorted(tenants))}, or declare it first"
            )
        content = yaml.safe_load(path.read_text()) or {}
    content["keys"] = [*(content.get("keys") or []), entry]
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            yaml.safe_dump(content, file, sort_keys=False)
        if path.exists():
            os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
