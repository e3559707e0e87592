"""The model that a peer serves: the first of our configuration, as far as it can be the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from cluster.bench.stack import models_in
from cluster.compare.peers import PeerOptions
from cluster.config import ServeConfig
from deployments.settings import ModelArgs, PoolSettings
from engine.errors import ConfigError
from engine.text.source import resolve_source


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModel:
    """What a peer must know of the model."""

    name: str
    """What clients ask for, the same as at our side."""

    args: ModelArgs
    settings: PoolSettings
    threads: int
    """As many as all replicas of ours together may use, at most one a core."""


def model_of(config: ServeConfig) -> PeerModel:
    """The first model of a configuration. Raises ConfigError where it serves none."""
    models = models_in(config.data["applications"])
    if not models:
        raise ConfigError(f"{config.source}: it serves no model of ours that a peer could serve")
    first = models[0]
    application = next(a for a in config.data["applications"] if a["name"] == first.app)
    replicas = sum(d.get("num_replicas", 1) for d in application.get("deployments") or [{}])
    cores = os.cpu_count() or 1
    return PeerModel(
        name=first.name,
        args=first.args,
        settings=first.settings,
        threads=min(cores, (first.args.num_threads or cores) * replicas),
    )


def program(name: str, options: PeerOptions, *, install: str) -> str:
    """Path of a program. Raises ConfigError naming the command that installs it."""
    places = [str(options.bin)] if options.bin else [str(Path(sys.executable).parent)]
    path = None if options.bin else os.environ.get("PATH")
    found = shutil.which(name, path=os.pathsep.join([*places, *([path] if path else [])]))
    if found is None:
        where = options.bin or "PATH"
        raise ConfigError(f"{name}: not in {where}; {install}")
    return found


def hugging_face_directory(model: PeerModel, options: PeerOptions) -> Path:
    """A directory as `from_pretrained` wants it: the model's own, or one made from its file.

    What was made is kept for the next time. Raises ConfigError.
    """
    if options.model is not None:
        return Path(options.model)
    source = resolve_source(model.args.source)
    if source.kind == "directory":
        return source.files
    if source.kind == "builtin":
        raise ConfigError(f"{model.args.source}: a built-in model has no weights for a peer")
    dtype = dtype_of(model)
    made = Path(platformdirs.user_cache_dir("tailrace", appauthor=False)) / "peers"
    directory = made / f"{source.name}-{dtype}"
    if not (directory / "config.json").exists():
        # In a process of its own: torch and transformers stay out of this one.
        command = [sys.executable, "-m", "cluster.compare.peers.export"]
        done = subprocess.run(
            [*command, model.args.source, dtype, str(directory)], capture_output=True, text=True
        )
        if done.returncode:
            raise ConfigError(
                f"{model.args.source}: it cannot be written for transformers:\n"
                f"{done.stderr.strip()[-2000:]}"
            )
    return directory


def dtype_of(model: PeerModel) -> str:
    """`auto` is bfloat16 here: peers are compared on processors that have it."""
    return "bfloat16" if model.args.dtype == "auto" else model.args.dtype
