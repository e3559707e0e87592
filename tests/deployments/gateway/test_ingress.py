"""Generations that go past Serve's wrapper, and everything that does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from deployments.gateway import ingress
from deployments.gateway.api import generations
from deployments.gateway.edge import straight_in
from deployments.gateway.state import GatewayState
from engine.errors import RequestError


def unready() -> GatewayState:
    raise RequestError("this is the gateway", code="gateway")


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Of Serve's wrapper, which says so, behind the layer that it was told to install."""
    app: Any = PlainTextResponse("serve")
    for layer in ingress.middlewares():
        app = layer.cls(app, *layer.args, **layer.kwargs)
    yield TestClient(app)
    ingress.open_door(None)


def test_only_generations_go_straight_in_and_only_while_the_door_is_open(client: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert client.post(path).text == "serve"
    ingress.open_door(straight_in(generations(unready)))
    for path in ("/v1/chat/completions", "/v1/completions"):
        reply = client.post(path, headers={"x-request-id": "mine"})
        assert reply.json()["error"]["code"] == "gateway"
        assert reply.headers["x-request-id"] == "mine"
        assert client.get(path).text == "serve"
    for path in ("/tokenize", "/v1/chat/completions/", "/-/healthz"):
        assert client.post(path).text == "serve"
    ingress.open_door(None)
    assert client.post("/v1/completions").text == "serve"


def test_importing_the_layer_brings_in_next_to_nothing() -> None:
    code = (
        "import sys, deployments.gateway.ingress\n"
        "ours = ('deployments', 'engine', 'fastapi', 'ray')\n"
        "print(sorted(m for m in sys.modules if m.startswith(ours)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ["deployments", "deployments.gateway", "deployments.gateway.ingress"]
    assert done.stdout.strip() == str(loaded)
