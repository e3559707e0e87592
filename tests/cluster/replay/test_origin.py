from __future__ import annotations

import sys

from cluster.replay import origin


def test_a_command_is_told_without_its_key(monkeypatch):
    words = ["/x/bin/tailrace", "replay", "t", "--api-key", "sk-1", "--api-key=sk-2", "--rate", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert origin.command() == (
        *("tailrace", "replay", "t", "--api-key", "...", "--api-key=...", "--rate", "2"),
    )


def test_configurations_are_told_without_their_secrets():
    told = origin._told(
        {
            "args": {"block_tokens": 32, "max_context_tokens": 4096, "source": "fake"},
            "user_config": {
                "keys": [{"sha256": "abc"}],
                "redis_url": "redis://user:pass@host/0",
                "headers": {"Authorization": "Bearer x"},
                "secret_file": None,
            },
        }
    )
    assert told == {
        "args": {"block_tokens": 32, "max_context_tokens": 4096, "source": "fake"},
        "user_config": {
            "keys": "...",
            "redis_url": "redis://...@host/0",
            "headers": {"Authorization": "..."},
            "secret_file": None,
        },
    }


def test_the_block_size_is_that_of_the_models_where_it_is_one():
    def model(**args):
        return {"import_path": "deployments.app:model", "args": args}

    gateway = {"import_path": "deployments.app:gateway"}
    assert origin.cache_block_tokens([gateway, model(block_tokens=32)]) == 32
    assert origin.cache_block_tokens([model(), model()]) == 16
    assert origin.cache_block_tokens([model(), model(block_tokens=32)]) is None
    assert origin.cache_block_tokens(None) is None
