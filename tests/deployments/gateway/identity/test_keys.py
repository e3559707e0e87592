import os

import pytest
import yaml
from pydantic import ValidationError

from deployments.gateway.identity.config import Ceilings, Directory, Tenant
from deployments.gateway.identity.keyring import KeyRing, hash_key, new_key, tenant_salt
from deployments.gateway.identity.source import KeySource
from deployments.gateway.limits.store import Claim
from engine.errors import ConfigError, RequestError

KEY, OTHER = "tr-key-of-a-team", "tr-key-of-another"


def directory(tenants=None, **fields):
    return Directory.model_validate(
        {
            "keys": [
                {"id": "one", "sha256": hash_key(KEY), "tenant": "team", **fields},
                {"id": "two", "sha256": hash_key(OTHER), "tenant": "others"},
            ],
            "tenants": {"team": {}, "others": {}, **(tenants or {})},
        }
    )


def bearer(key):
    return f"Bearer {key}".encode()


def test_a_key_names_its_tenant():
    ring = KeyRing(directory())
    identity = ring.identify(bearer(KEY))
    assert (identity.tenant, identity.key_id, identity.operator) == ("team", "one", False)
    assert ring.identify(bearer(OTHER)).tenant == "others"
    assert ring.identify(b"bearer  " + KEY.encode()).tenant == "team"


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (None, "no API key was sent"),
        (b"", "not `Bearer KEY`"),
        (b"Bearer ", "not `Bearer KEY`"),
        (b"Basic dXNlcjpwYXNz", "not `Bearer KEY`"),
        (b"Bearer tr-secret-guess", "not known here"),
        (b"Bearer \xff\xfe", "not known here"),
        (bearer(KEY[:-1]), "not known here"),
        (bearer(hash_key(KEY)), "not known here"),
    ],
)
def test_anything_else_is_refused_without_an_echo(header, says):
    with pytest.raises(RequestError) as caught:
        KeyRing(directory()).identify(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert says in str(caught.value)
    assert "secret-guess" not in str(caught.value)


def test_without_keys_everybody_is_the_default_tenant():
    ring = KeyRing(Directory())
    assert ring.open
    for header in (None, b"Bearer anything"):
        identity = ring.identify(header)
        assert (identity.tenant, identity.key_id, identity.salt) == ("default", None, "")
        assert identity.claims(tokens=100, retry=True) == []
        assert identity.operator


def test_a_key_expires():
    now = [0.0]
    ring = KeyRing(directory(expires="2030-01-01T00:00:00Z"), clock=lambda: now[0])
    assert ring.identify(bearer(KEY)).tenant == "team"
    now[0] = 1_893_456_000.0  # that very second
    with pytest.raises(RequestError, match=r"'one' expired on 2030-01-01"):
        ring.identify(bearer(KEY))


def test_tenants_have_salts_of_their_own():
    salts = [KeyRing(directory()).identify(bearer(key)).salt for key in (KEY, OTHER)]
    assert len({*salts, tenant_salt("default")}) == 3


def test_rights_are_those_that_both_key_and_tenant_have():
    tenants = {"team": {"tiers": ["default", "flex", "batch"], "max_n": 4, "models": ["a", "b"]}}
    ring = KeyRing(
        directory(tenants, tiers=["batch", "priority", "default"], max_n=8, models=["b", "c"])
    )
    identity = ring.identify(bearer(KEY))
    assert identity.tiers == ("batch", "default")
    assert identity.ceilings.max_n == 4
    assert identity.models == {"b"}
    assert identity.ceilings.max_output_tokens is None


def test_each_ceiling_is_the_lower_one_of_key_and_tenant():
    names = list(Ceilings.model_fields)
    low, high = {name: 2000 for name in names}, {name: 3000 for name in names}
    for tenant, key in ((low, high), (high, low), ({}, low), (low, {})):
        identity = KeyRing(directory({"team": tenant}, **key)).identify(bearer(KEY))
        assert identity.ceilings.model_dump() == low


def test_a_key_of_a_tenant_that_nobody_declared_is_refused_where_tenants_are_declared():
    written = Directory.model_validate(
        {
            "keys": [{"id": "one", "sha256": hash_key(KEY), "tenant": "taem"}],
            "tenants": {"team": {"tokens_per_minute": 100}},
        }
    )
    with pytest.raises(ConfigError, match=r"'one': there is no tenant 'taem'; tenants are: team"):
        KeyRing(written)
    # Where none are, a tenant is only a name to count under.
    bare = Directory(keys=written.keys)
    assert KeyRing(bare).identify(bearer(KEY)).tenant == "taem"


def test_a_key_whose_tenant_was_forgotten_does_not_escape_the_tenants_limits():
    written = {
        "keys": [{"id": "one", "sha256": hash_key(KEY)}],
        "tenants": {"team": {"tokens_per_minute": 100}},
    }
    with pytest.raises(
        ConfigError, match=r"'one': there is no tenant 'default' \(it names"
    ) as told:
        KeyRing(Directory.model_validate(written))
    assert hash_key(KEY) not in str(told.value)
    written["tenants"]["default"] = {"tokens_per_minute": 10}
    identity = KeyRing(Directory.model_validate(written)).identify(bearer(KEY))
    assert identity.claims(tokens=1, retry=False) == [Claim("tenant:default", "tokens", 10, 1)]


@pytest.mark.parametrize(
    ("quota", "retries"),
    [
        ({}, None),
        ({"requests_per_minute": 100}, 25),
        ({"requests_per_minute": 3}, 1),
        ({"requests_per_minute": 100, "retries_per_minute": 100}, 100),
        ({"requests_per_minute": 100, "retries_per_minute": 0}, 0),
        ({"retries_per_minute": 7}, 7),
    ],
)
def test_retries_are_a_quarter_of_the_requests_unless_it_is_said_otherwise(quota, retries):
    identity = KeyRing(directory({"team": quota})).identify(bearer(KEY))
    claims = identity.claims(tokens=1, retry=True)
    assert [c.limit for c in claims if c.kind == "retries"] == [
        r for r in [retries] if r is not None
    ]
    assert not [c for c in identity.claims(tokens=1, retry=False) if c.kind == "retries"]


def test_a_request_takes_from_its_key_and_from_its_tenant():
    tenants = {"team": {"tokens_per_minute": 5000, "concurrency": 3, "retries_per_minute": 0}}
    identity = KeyRing(directory(tenants, requests_per_minute=10)).identify(bearer(KEY))
    assert identity.claims(tokens=70, retry=False) == [
        Claim("key:one", "requests", 10, 1),
        Claim("tenant:team", "tokens", 5000, 70),
        Claim("tenant:team", "concurrency", 3, 1),
    ]
    assert Claim("tenant:team", "retries", 0, 1) in identity.claims(tokens=70, retry=True)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"id": "a", "sha256": KEY}, "64 lowercase hexadecimal digits"),
        ({"id": "a b", "sha256": hash_key("x")}, "pattern"),
        ({"id": "a", "sha256": hash_key("x"), "expires": "2030-01-01T00:00:00"}, "time zone"),
        ({"id": "a", "sha256": hash_key("x"), "tiers": []}, "tiers is empty"),
        ({"id": "a", "sha256": hash_key("x"), "rpm": 5}, "Extra inputs"),
        ({"id": "one", "sha256": hash_key("x")}, "'one' is there twice"),
        ({"id": "a", "sha256": hash_key(KEY)}, "'one' and 'a' are the same key"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry, says):
    with pytest.raises(ValidationError, match=says):
        Directory.model_validate(
            {"keys": [{"id": "one", "sha256": hash_key(KEY), "tenant": "team"}, entry]}
        )


def test_new_keys_are_long_and_different():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 46


def write(path, keys, tenants=None):
    path.write_text(yaml.safe_dump({"keys": keys, "tenants": tenants or {}}))
    os.utime(path, ns=(0, hash(path.read_text()) % 10**18))


def test_a_keys_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, [{"id": "one", "sha256": hash_key(KEY)}])
    source = KeySource(Directory(), str(path))
    assert not source.refresh()
    with pytest.raises(RequestError):
        source.ring.identify(bearer(OTHER))
    write(path, [{"id": "two", "sha256": hash_key(OTHER)}])
    assert source.refresh()
    assert source.ring.identify(bearer(OTHER)).key_id == "two"
    with pytest.raises(RequestError):
        source.ring.identify(bearer(KEY))


@pytest.mark.parametrize(
    "content",
    [
        "keys: [",
        "keys: 5",
        "keys: []",
        "",
        "\x00",
        "- 1",
        f"{{keys: [{{id: one, sha256: {hash_key(KEY)}, tenant: gone}}], tenants: {{team: {{}}}}}}",
    ],
)
def test_a_broken_file_changes_nothing_and_counts(tmp_path, content):
    path = tmp_path / "keys.yaml"
    write(path, [{"id": "one", "sha256": hash_key(KEY)}])
    source = KeySource(Directory(), str(path))
    path.write_text(content)
    assert not source.refresh()
    path.unlink()
    assert not source.refresh()
    assert source.faults == 2
    assert source.ring.identify(bearer(KEY)).key_id == "one"


def test_a_gateway_does_not_start_without_its_file(tmp_path):
    with pytest.raises(ConfigError, match=r"keys_file=.*missing\.yaml.*No such file"):
        KeySource(Directory(), str(tmp_path / "missing.yaml"))
    empty = tmp_path / "empty.yaml"
    empty.write_text("tenants: {}")
    with pytest.raises(ConfigError, match="would let everybody in"):
        KeySource(Directory(), str(empty))


def test_a_key_written_where_its_hash_belongs_is_not_repeated(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, [{"id": "one", "sha256": "tr-very-secret"}])
    with pytest.raises(ConfigError) as caught:
        KeySource(Directory(), str(path))
    assert "very-secret" not in str(caught.value)


def test_a_file_and_inline_keys_add_up_and_may_not_contradict(tmp_path):
    path = tmp_path / "keys.yaml"
    write(
        path,
        [{"id": "three", "sha256": hash_key("third"), "tenant": "team"}],
        {"team": {"weight": 2}},
    )
    inline = Directory(keys=directory().keys, tenants={"others": Tenant()})
    source = KeySource(inline, str(path))
    assert source.ring.identify(bearer("third")).key_id == "three"
    assert source.ring.identify(bearer(KEY)).weight == 2
    with pytest.raises(ConfigError, match="team in keys_file and inline"):
        KeySource(directory({"team": {"weight": 3}}), str(path))
