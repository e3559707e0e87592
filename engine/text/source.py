"""Where a model comes from: one string of the configuration, resolved to something on disk."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError

BUILTIN_SOURCES = ("fake", "tiny", "synthetic")
"""Models that need no file. They share the byte tokenizer."""

SourceKind = Literal["builtin", "gguf", "directory"]

_FORMS = (
    "use `package:NAME`, a path to a .gguf file, a directory with config.json, tokenizer.json and "
    f"safetensors, or one of {', '.join(BUILTIN_SOURCES)}"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved model source. `path` is None for a built-in."""

    kind: SourceKind
    name: str
    """Of the built-in, the file without its suffix, or the directory."""

    path: Path | None

    @property
    def files(self) -> Path:
        """The file or directory. Raises ConfigError for a built-in, which has none."""
        if self.path is None:
            raise ConfigError(f"model source {self.name!r} is built in and has no files: {_FORMS}")
        return self.path


def resolve_source(source: str) -> Source:
    """Resolve `package:NAME`, a path or the name of a built-in.

    Raises ConfigError naming what was found instead and the way out.
    """
    if source in BUILTIN_SOURCES:
        return Source("builtin", source, None)
    if source.startswith("package:"):
        path = _gguf_in_package(source, source.removeprefix("package:"))
        return Source("gguf", path.stem, path)
    if not source:
        raise ConfigError(f"the model source is empty: {_FORMS}")
    path = Path(source).expanduser()
    if path.is_dir():
        _check_directory(path)
        return Source("directory", path.resolve().name, path)
    if not path.exists():
        raise ConfigError(f"model source {source!r}: no such file or directory: {_FORMS}")
    if path.suffix != ".gguf":
        raise ConfigError(f"model source {source!r} is a file, but not a .gguf: {_FORMS}")
    return Source("gguf", path.stem, path)


def _gguf_in_package(source: str, package: str) -> Path:
    module = package.replace("-", "_")
    # A dotted name would import the parent package: only top-level ones are looked up.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"model source {source!r}: no installed Python package is called {module!r}: "
            f"`pip install {package or 'NAME'}`, or {_FORMS}"
        )
    found = sorted(
        path
        for place in spec.submodule_search_locations or ()
        for path in Path(place).rglob("*.gguf")
    )
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConfigError(
            f"model source {source!r}: the package must hold exactly one .gguf file, found "
            f"{len(found)} ({names}): give the path of the file instead"
        )
    return found[0]


def _check_directory(path: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(ggufs)}: name that file" if ggufs else ""
        raise ConfigError(
            f"model directory {path}: {', '.join(missing)} not found in it{hint}: {_FORMS}"
        )
