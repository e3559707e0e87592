from __future__ import annotations

import pytest

from cluster import config as configuration
from cluster.bench.stack import (
    SYNTHETIC,
    Stack,
    models_in,
    synthetic_only,
    with_settings,
    with_synthetic,
)
from cluster.errors import ClusterError, NotRunning


def test_the_synthetic_model_joins_a_configuration_and_the_file_stays_as_it_was():
    config = configuration.load()
    before = len(config.data["applications"])
    joined = with_synthetic(config)
    assert joined.applications == [*config.applications, SYNTHETIC]
    assert len(config.data["applications"]) == before
    models = {model.name: model for model in models_in(joined.data["applications"])}
    assert models[SYNTHETIC].args.source == "synthetic"
    assert not models[SYNTHETIC].args.prefill
    assert [model.app for model in models.values()] == [*config.applications[1:], SYNTHETIC]


def test_the_synthetic_model_binds_its_link_as_the_others_do():
    config = configuration.load()
    config.data["applications"][1]["args"]["link"] = {"host": "0.0.0.0"}
    joined = with_synthetic(config)
    assert joined.data["applications"][-1]["args"]["link"] == {"host": "0.0.0.0"}


def test_a_configuration_without_our_gateway_cannot_be_measured():
    config = configuration.load()
    del config.data["applications"][0]
    with pytest.raises(ClusterError, match="no application is built by deployments"):
        with_synthetic(config)


def test_models_are_those_a_gateway_names_with_the_settings_of_their_decode_pool():
    gateway = {
        "name": "front",
        "import_path": "deployments.app:gateway",
        "deployments": [
            {
                "name": "Gateway",
                "user_config": {"models": [{"name": "small", "app": "a"}]},
            }
        ],
    }
    model = {
        "name": "a",
        "import_path": "deployments.app:model",
        "args": {"name": "a", "source": "tiny"},
        "deployments": [
            {"name": "Prefill", "user_config": {"max_step_tokens": 64}},
            {"name": "Decode", "user_config": {"max_step_tokens": 32}},
        ],
    }
    other = {**model, "name": "b"}
    foreign = {"name": "x", "import_path": "somebody:app", "args": {"source": "tiny"}}
    (found,) = models_in([model, other, foreign, gateway])
    assert (found.name, found.app, found.args.source) == ("small", "a", "tiny")
    assert found.settings.max_step_tokens == 32


def test_without_a_session_and_url_there_is_nothing_to_look_at(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    with pytest.raises(NotRunning, match="tailrace up"):
        Stack.running(None)


def test_a_foreign_server_can_be_asked_but_not_looked_into(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    stack = Stack.running("http://elsewhere:8000/v1/")
    assert (stack.url, stack.is_ours) == ("http://elsewhere:8000", False)
    with pytest.raises(ClusterError, match="cannot be looked into"):
        stack.processes()


def test_a_cluster_of_the_synthetic_model_alone_has_the_gateway_and_its_pool_as_asked():
    tiers = {"default": {"max_wait_s": 0.7}}
    config = synthetic_only({"tiers": tiers}, {"max_running_requests": 8})
    (model,) = models_in(config.data["applications"])
    assert (model.name, model.settings.max_running_requests) == (SYNTHETIC, 8)
    gateway = config.data["applications"][0]["deployments"][0]["user_config"]
    assert gateway["tiers"] == tiers
    assert [route["name"] for route in gateway["models"]] == [SYNTHETIC]


def test_settings_join_those_of_their_deployment_and_nobody_elses():
    before = configuration.load()
    config = with_settings(before, {"Decode": {"max_running_requests": 3}})
    (model,) = models_in(config.data["applications"])
    assert model.settings.max_running_requests == 3
    gateway = config.data["applications"][0]["deployments"][0]["user_config"]
    assert gateway == before.data["applications"][0]["deployments"][0]["user_config"]
