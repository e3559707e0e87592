from __future__ import annotations

import sys
from typing import Any

import pytest

from deployments.gateway.config import GatewayConfig
from deployments.gateway.events import EventLog, Submitted
from deployments.gateway.identity.keyring import hash_key
from deployments.gateway.state import GatewayState
from deployments.metrics import Registry
from engine.errors import ConfigError, RequestError


def test_an_empty_user_config_is_a_whole_configuration() -> None:
    config = GatewayConfig.parse({})
    assert (config.revision, config.models, config.limits.max_n) == (0, (), 16)


def test_aliases_resolve_to_their_model_and_other_names_stay() -> None:
    config = GatewayConfig.parse({"models": [{"name": "a", "app": "x", "aliases": ["b"]}]})
    assert [config.canonical(name) for name in ("a", "b", "c")] == ["a", "a", "c"]


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"revison": 3}, ["user_config.revison", "no such field", "revision"]),
        ({"limits": {"max_tokens": 3}}, ["user_config.limits.max_tokens", "max_output_tokens"]),
        ({"limits": {"max_n": 0}}, ["user_config.limits.max_n=0", "greater than or equal to 1"]),
        ({"models": [{"name": "a"}]}, ["user_config.models.0.app", "missing"]),
        ({"models": [{"name": "a", "app": "x", "size": 1}]}, ["models.0.size", "aliases"]),
        (
            {"models": [{"name": "a", "app": "x"}, {"name": "b", "app": "y", "aliases": ["a"]}]},
            ["'a' names both 'a' and 'b'"],
        ),
        ({"limits": {"request_timeout_s": float("nan")}}, ["request_timeout_s=nan"]),
        ({"tiers": {"gold": {}}}, ["none called 'default'"]),
        ({"tiers": {"default": {}, "auto": {}}}, ["'auto' has another meaning"]),
        ({"tiers": {"default": {"share": 0.8}, "b": {"share": 0.3}}}, ["add up to 1.1"]),
        ({"tenants": {"t": {"tiers": ["gold"]}}}, ["tenant 't'", "no tier 'gold'", "priority"]),
        ({"keys": [{"id": "k", "sha256": "tr-oops"}]}, ["user_config.keys.0", "never the key"]),
        ({"limits_store": "memcached://x"}, ["user_config.limits_store: must begin", "redis://"]),
        ({"limits_store": {"path": "x"}}, ["user_config.limits_store.path", "env, file"]),
        ({"limits_store": {}}, ["user_config.limits_store: name one place: either env or file"]),
        ({"admission": {"max_waiting": -1}}, ["admission.max_waiting=-1"]),
        ({"tiers": {"default": {"ttft": 1}}}, ["tiers.default.ttft", "ttft_s"]),
        ({"tiers": {"default": {"itl_s": 0}}}, ["tiers.default.itl_s=0", "greater than 0"]),
        ({"tiers": {"default": {"objective": 1}}}, ["tiers.default.objective=1", "less than 1"]),
        (
            {"tiers": {"default": {"queue_s": 2, "max_wait_s": 1.5}}},
            ["tiers.default", "queue_s=2 is above max_wait_s=1.5", "raise max_wait_s"],
        ),
        (
            {"tiers": {"default": {"ttft_s": 9, "e2e_s": 3}}},
            ["tiers.default", "ttft_s=9 is above e2e_s=3", "lower ttft_s or raise e2e_s"],
        ),
    ],
)
def test_a_wrong_configuration_names_field_value_and_way_out(
    user_config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        GatewayConfig.parse(user_config)
    for word in words:
        assert word in str(raised.value)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        GatewayConfig.parse({"a": 1, "limits": {"max_n": 0}})
    assert len(str(raised.value).splitlines()) == 2


def test_a_refused_configuration_leaves_the_old_one() -> None:
    backend: Any = None
    state = GatewayState(backend, Registry())
    state.apply({"revision": 1, "limits": {"max_n": 2}})
    with pytest.raises(ConfigError):
        state.apply({"revision": 2, "limits": {"max_n": -2}})
    assert (state.config.revision, state.config.limits.max_n) == (1, 2)


@pytest.mark.parametrize(
    "config",
    [
        {"limits_store": "http://user:hunter2@host"},
        {"limits_store": {"password": "hunter2"}},
        {"limits_store": {"env": "not a name: hunter2"}},
        {"limits_store": ["hunter2"]},
        {"tracing": {"headers": {"authorization": {"value": "hunter2"}}}},
        {"tracing": {"headers": {"authorization": ["hunter2"]}}},
        {"tracing": {"endpoint": "ftp://user:hunter2@host"}},
        {"keys": [{"id": "a", "sha256": 5, "tenant": "hunter2 "}]},
    ],
)
def test_a_refusal_repeats_no_secret(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        GatewayConfig.parse(config)
    assert "hunter2" not in str(raised.value)
    assert f"user_config.{next(iter(config))}" in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {"tracing": {"headers": {"authorization": 8675309}}},
        {"tracing": {"headers": 8675309}},
        {"limits_store": 8675309},
        {"keys": [8675309]},
        {"keys": [{"id": "a", "sha256": 8675309, "tenant": "t"}]},
    ],
)
def test_a_number_where_a_secret_belongs_is_one(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        GatewayConfig.parse(config)
    assert "8675309" not in str(raised.value)


def test_a_number_out_of_range_is_told_wherever_it_stands() -> None:
    with pytest.raises(ConfigError, match=r"user_config\.tracing\.sample=7: "):
        GatewayConfig.parse({"tracing": {"sample": 7}})


def test_keys_of_a_refused_configuration_never_come_into_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend: Any = None
    state = GatewayState(backend, Registry())
    mine, theirs = ({"id": name, "sha256": hash_key(name)} for name in ("mine", "theirs"))
    state.apply({"keys": [mine]})
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)  # as if it were not installed
    with pytest.raises(ConfigError, match="is not installed"):
        state.apply({"keys": [theirs], "tracing": {"endpoint": "http://collector:4318"}})
    assert state.identify({b"authorization": b"Bearer mine"}).key_id == "mine"
    with pytest.raises(RequestError, match="not known"):
        state.identify({b"authorization": b"Bearer theirs"})


def test_a_smaller_event_log_keeps_the_newest() -> None:
    log = EventLog(100)
    for i in range(50):
        log.append(Submitted(request_id=str(i), at_s=float(i)))
    log.resize(16)
    log.append(Submitted(request_id="last", at_s=50.0))
    assert [event.request_id for event in log] == [*map(str, range(35, 50)), "last"]


async def test_a_live_change_applies_to_the_next_request(gateway: Any) -> None:
    body = {"model": "tiny", "prompt": "a", "n": 2}
    assert (await gateway.post("/v1/completions", body)).status == 200
    gateway.state.apply({"limits": {"max_n": 1}})
    assert (await gateway.post("/v1/completions", body)).status == 400
