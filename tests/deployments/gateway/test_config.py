from __future__ import annotations

from typing import Any

import pytest

from deployments.gateway.config import GatewayConfig
from deployments.gateway.events import EventLog, Submitted
from deployments.gateway.state import GatewayState
from deployments.metrics import Registry
from engine.errors import ConfigError


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
        ({"limits_store": "memcached://x"}, ["limits_store='memcached://x'"]),
        ({"admission": {"max_waiting": -1}}, ["admission.max_waiting=-1"]),
        ({"tiers": {"default": {"ttft": 1}}}, ["tiers.default.ttft", "ttft_s"]),
        ({"tiers": {"default": {"itl_s": 0}}}, ["tiers.default.itl_s=0", "greater than 0"]),
        ({"tiers": {"default": {"objective": 1}}}, ["tiers.default.objective=1", "less than 1"]),
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
