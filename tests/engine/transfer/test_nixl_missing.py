"""Where NIXL is not installed, a replica that should read by it says so and does not start."""

from __future__ import annotations

import sys

import pytest
from nixl_source import make_pool

from engine.errors import ConfigError
from engine.transfer.nixl import NixlAgent, require_nixl


@pytest.fixture
def missing(monkeypatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)


def test_it_is_refused_with_what_to_install(missing):
    with pytest.raises(ConfigError, match=r"pip install 'tailrace\[nixl\]'.*transport: link"):
        require_nixl()


def test_an_agent_does_not_start(missing):
    agent = NixlAgent(make_pool(2, None), lambda *_: None, window_bytes=1)
    with pytest.raises(ConfigError, match="can't be imported"):
        agent.start()
    agent.close()
