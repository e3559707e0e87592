import json

import pytest
from click.testing import CliRunner

from cluster.keys import keys
from deployments.gateway.identity.config import Directory
from deployments.gateway.identity.source import KeySource
from engine.errors import ConfigError


def call(*arguments):
    return CliRunner().invoke(keys, arguments, catch_exceptions=False)


def made(*arguments):
    return json.loads(call("new", "--json", *arguments).stdout)


def test_a_key_is_shown_once_and_its_file_lets_it_in(tmp_path):
    path = tmp_path / "keys.yaml"
    first = made("--id", "one", "--tenant", "team", "--file", str(path))
    second = made("--id", "two", "--operator", "--file", str(path))
    ring = KeySource(Directory(), str(path)).ring
    identity = ring.identify(f"Bearer {first['key']}".encode())
    assert (identity.tenant, identity.key_id, identity.operator) == ("team", "one", False)
    assert ring.identify(f"Bearer {second['key']}".encode()).operator
    assert first["key"] not in path.read_text()


def test_without_a_file_the_entry_is_printed_beside_the_key():
    done = call("new", "--id", "one", "--expires", "2031-01-31T00:00:00Z")
    key = done.stdout.strip()
    assert key.startswith("tr-")
    assert key not in done.stderr
    assert "sha256:" in done.stderr
    assert "2031-01-31" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--id", "a b"], "id='a b'"),
        (["--id", "a", "--tenant", "../x"], r"tenant='\.\./x'"),
        (["--id", "a", "--expires", "tomorrow"], "expires='tomorrow'"),
        (["--id", "a", "--expires", "2031-01-31T00:00:00"], "no time zone"),
    ],
)
def test_wrong_options_name_value_and_way_out(arguments, says):
    with pytest.raises(ConfigError, match=says):
        call("new", *arguments)


def test_an_id_is_not_given_twice_and_the_file_stays_as_it_was(tmp_path):
    path = tmp_path / "keys.yaml"
    made("--id", "one", "--file", str(path))
    before = path.read_text()
    with pytest.raises(ConfigError, match="'one' already"):
        call("new", "--id", "one", "--file", str(path))
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_key_of_a_tenant_that_the_file_does_not_declare_is_not_made(tmp_path):
    """Gateways would refuse the whole file."""
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {team: {weight: 2}}\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"no tenant 'default' in it.*team"):
        call("new", "--id", "one", "--file", str(path))
    assert path.read_text() == before
    made("--id", "one", "--tenant", "team", "--file", str(path))
    assert call("check", str(path)).stdout == "one  team\n"
    path.write_text(path.read_text().replace("tenant: team", "tenant: taem"))
    with pytest.raises(ConfigError, match="'one': there is no tenant 'taem'"):
        call("check", str(path))


def test_check_lists_keys_and_refuses_a_broken_file(tmp_path):
    path = tmp_path / "keys.yaml"
    made("--id", "one", "--tenant", "team", "--file", str(path))
    assert call("check", str(path)).stdout == "one  team\n"
    path.write_text("keys: [{id: one, sha256: tr-secret}]")
    with pytest.raises(ConfigError, match="64 lowercase") as caught:
        call("check", str(path))
    assert "tr-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        call("check", str(tmp_path / "none.yaml"))
