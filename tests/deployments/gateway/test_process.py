import logging
from pathlib import Path

import pytest
from redis_server import redis_server

from deployments.gateway.limits.store import Claim
from deployments.gateway.process import GatewayProcess
from engine.errors import ConfigError


async def test_a_refused_configuration_leaves_limits_and_request_log_where_they_were(
    tmp_path: Path,
) -> None:
    process = GatewayProcess("gateway", b"x" * 32)
    refused = {
        "limits_store": "redis://127.0.0.1:1/0",
        "request_log": {"path": str(tmp_path / "requests.jsonl")},
        "keys_file": str(tmp_path / "missing.yaml"),
    }
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        await process.apply(refused)
    assert process.state.quotas._url is None
    assert process._request_log.path is None
    assert process.state.request_log is None
    await process.close()


PASSWORD = "hunter2/and:more"
ENCODED = "hunter2%2Fand%3Amore"


@pytest.mark.parametrize("where", ["env", "file"])
async def test_a_redis_with_a_password_is_named_by_a_variable_or_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(str(tmp_path), password=PASSWORD) as server:
        url = server.url.replace(PASSWORD, ENCODED)
        monkeypatch.setenv("STORE_OF_LIMITS", url)
        (tmp_path / "url").write_text(f"{url}\n")
        source = {"env": {"env": "STORE_OF_LIMITS"}, "file": {"file": str(tmp_path / "url")}}
        process = GatewayProcess("gateway", b"x" * 32)
        config = await process.apply({"limits_store": source[where]})
        claim = Claim("tenant:a", "tokens", 100, 60)
        quota = await process.state.quotas.take("one", [claim])
        assert not process.state.quotas.alone, "Redis was asked, and let us in"
        quota.close(0)
        # A configuration that is refused afterwards takes nothing away.
        with pytest.raises(ConfigError, match=r"missing\.yaml"):
            await process.apply({"limits_store": None, "keys_file": str(tmp_path / "missing.yaml")})
        assert process.state.quotas._url == url
        # The wrong password is not told to anybody either.
        wrong = tmp_path / "wrong"
        wrong.write_text(url.replace("hunter2", "hunter3"))
        await process.apply({"limits_store": {"file": str(wrong)}})
        (await process.state.quotas.take("two", [claim])).close(0)
        assert process.state.quotas.alone
        await process.close()
    assert "cannot be asked" in caplog.text
    for text in (caplog.text, repr(config), str(config.model_dump())):
        assert "hunter" not in text


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ({"env": "NOBODY_SET_THIS"}, "limits_store: the environment variable NOBODY_SET_THIS is"),
        ({"file": "/nowhere/at/all"}, "'/nowhere/at/all': No such file or directory"),
        ("redis://:hunter2/unencoded@127.0.0.1:6379", "limits_store: no URL of a Redis"),
    ],
)
async def test_a_store_that_cannot_be_used_changes_nothing_and_says_why_without_the_secret(
    store: object, says: str
) -> None:
    process = GatewayProcess("gateway", b"x" * 32)
    with pytest.raises(ConfigError) as refused:
        await process.apply({"revision": 5, "limits_store": store})
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert process.state.config.revision == 0
    await process.close()
