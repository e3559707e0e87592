from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.text.source import resolve_source


def make_package(monkeypatch: pytest.MonkeyPatch, root: Path, name: str, files: list[str]) -> Path:
    package = root / name
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for file in files:
        (package / file).write_bytes(b"")
    monkeypatch.syspath_prepend(root)
    return package


def test_the_only_gguf_of_a_package_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = make_package(monkeypatch, tmp_path, "a_model", ["weights.gguf", "other.txt"])
    source = resolve_source("package:a-model")
    assert (source.kind, source.name, source.path) == ("gguf", "weights", package / "weights.gguf")
    assert "a_model" not in sys.modules


@pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"]])
def test_a_package_with_none_or_two_ggufs_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str]
):
    make_package(monkeypatch, tmp_path, f"model_{len(files)}", files)
    with pytest.raises(ConfigError, match=f"found {len(files)}"):
        resolve_source(f"package:model_{len(files)}")


@pytest.mark.parametrize("name", ["no_such_package_here", "", "os.path", "../etc"])
def test_a_package_that_is_not_installed_is_refused(name: str):
    with pytest.raises(ConfigError, match="pip install"):
        resolve_source(f"package:{name}")


@pytest.mark.parametrize("name", ["fake", "tiny", "synthetic"])
def test_built_ins_have_no_files(name: str):
    source = resolve_source(name)
    assert (source.kind, source.path) == ("builtin", None)
    with pytest.raises(ConfigError, match="built in"):
        _ = source.files


def test_paths_are_told_apart_by_what_is_there(tmp_path: Path):
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert resolve_source(str(gguf)).kind == "gguf"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert resolve_source(str(tmp_path)).kind == "directory"


def test_an_incomplete_directory_names_what_is_missing_and_what_is_there(tmp_path: Path):
    (tmp_path / "config.json").touch()
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"tokenizer\.json, \*\.safetensors not found.*m\.gguf"):
        resolve_source(str(tmp_path))


def test_other_strings_name_the_way_out(tmp_path: Path):
    (tmp_path / "m.bin").touch()
    for source in ("", "no/such/file.gguf", str(tmp_path / "m.bin")):
        with pytest.raises(ConfigError, match="use `package:NAME`"):
            resolve_source(source)
