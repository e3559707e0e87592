from pathlib import Path

import pytest

from deployments.gateway.secret_text import MAX_FILE_BYTES, SecretSource, read_secret
from engine.errors import ConfigError


def test_a_secret_is_itself_or_what_a_variable_or_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  from a file\n")
    assert read_secret("inline", "f") == "inline"
    assert read_secret(SecretSource(env="TOKEN"), "f", {"TOKEN": "from outside"}) == "from outside"
    assert read_secret(SecretSource(file=str(file)), "f") == "from a file"
    assert read_secret(SecretSource(env="TOKEN"), "f", {"TOKEN": "hunter2\n"}) == "hunter2"
    assert read_secret(" inline\n", "f") == "inline"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty or not there"),
        (b" \n", "is empty or not there"),
        (b"\xff\xfehunter2", "is not text"),
        (b"a\nhunter2", "has control characters in it"),
        (b"hunter2" * MAX_FILE_BYTES, "that is no secret"),
    ],
)
def test_a_file_that_holds_none_is_named_and_not_repeated(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_secret(SecretSource(file=str(file)), "tracing.headers.authorization")
    assert f"tracing.headers.authorization: the file {str(file)!r}" in str(refused.value)
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("secret", ["a\nhunter2", "a\rhunter2", "hunter2\0a", "hunter2\x7fa"])
def test_control_characters_are_refused_and_not_repeated(secret: str) -> None:
    for value, place in (
        (SecretSource(env="TOKEN"), "f: the environment variable TOKEN"),
        (secret, "f: the value"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_secret(value, "f", {"TOKEN": secret})
        assert f"{place} has control characters in it" in str(refused.value)
        assert "hunter2" not in str(refused.value)


def test_a_variable_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="store: the environment variable TOKEN is empty or not"):
        read_secret(SecretSource(env="TOKEN"), "store", {})
