from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.gateway.api import create_app
from deployments.gateway.state import GatewayState
from engine.errors import EngineError, RequestError


async def test_the_openai_client_lists_and_reads_models(gateway: Any) -> None:
    gateway.backend.serve("org/other", root="package:other", max_context_tokens=64)
    async with gateway.client() as client:
        listed = [model async for model in client.models.list()]
        one = await client.models.retrieve("org/other")
        alias = await client.models.retrieve("gpt-4o")
    assert [model.id for model in listed] == ["tiny", "org/other"]
    assert (one.id, one.root, one.max_model_len) == ("org/other", "package:other", 64)
    assert alias.id == "tiny"


async def test_a_listed_model_has_every_key(gateway: Any) -> None:
    assert (await gateway.raw("GET", "/v1/models")).json() == {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "tailrace",
                "root": "fake",
                "parent": None,
                "max_model_len": 256,
            }
        ],
    }


async def test_health_is_200_with_a_model_and_503_without(gateway: Any) -> None:
    well = await gateway.raw("GET", "/health")
    assert (well.status, well.json()) == (200, {"status": "ok", "models": ["tiny"], "revision": 0})
    gateway.backend.infos.clear()
    ill = await gateway.raw("GET", "/health")
    assert (ill.status, ill.error["code"]) == (503, "no_models")
    assert ill.headers["retry-after"] == "1"


async def test_tokenize_and_detokenize_are_inverse_and_take_the_only_model(gateway: Any) -> None:
    reply = await gateway.post("/tokenize", {"prompt": "héy", "return_token_strs": True})
    assert reply.json() == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [104, 0xC3, 0xA9, 121],
        "token_strs": ["h", "�", "�", "y"],
    }
    back = await gateway.post("/detokenize", {"model": "tiny", "tokens": reply.json()["tokens"]})
    assert back.json() == {"prompt": "héy"}


async def test_tokenize_applies_the_chat_template(gateway: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    with_prompt = (await gateway.post("/tokenize", body)).json()["tokens"]
    bare = await gateway.post("/tokenize", body | {"add_generation_prompt": False})
    assert bytes(with_prompt) == b"user: a\nassistant: "
    assert bytes(bare.json()["tokens"]) == b"user: a\n"


async def test_a_model_must_be_named_where_there_are_several(gateway: Any) -> None:
    gateway.backend.serve("other")
    reply = await gateway.post("/tokenize", {"prompt": "a"})
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "tiny, other" in reply.error["message"]


async def test_the_openapi_document_names_bodies_and_errors(gateway: Any) -> None:
    document = (await gateway.raw("GET", "/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in [
        ("/v1/chat/completions", "ChatRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
    ]:
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert operation["responses"]["default"]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/Error"
        }
    assert {"Message", "Tool", "Function", "StreamOptions", "Error"} <= set(schemas)
    references = {
        part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]
    }
    assert references <= set(schemas)


def test_without_a_state_every_route_answers_a_well_formed_error() -> None:
    def starting() -> GatewayState:
        raise EngineError("the gateway is starting")

    with TestClient(create_app(starting)) as client:
        for method, path in [("GET", "/health"), ("POST", "/v1/completions")]:
            reply = client.request(method, path, json={})
            assert reply.status_code == 500
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("root_path", ["", "/tailrace"])
def test_generations_are_answered_below_a_root_path_too(root_path: str) -> None:
    def starting() -> GatewayState:
        raise RequestError("reached", code="reached")

    with TestClient(create_app(starting), root_path=root_path) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = client.post(root_path + path, json={})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "reached")
            assert reply.headers["x-request-id"].startswith("req_")
            refused = client.get(root_path + path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_the_request_id_is_left_to_a_server_that_adds_it_itself() -> None:
    def starting() -> GatewayState:
        raise EngineError("starting")

    with TestClient(create_app(starting, echo_request_id=False)) as client:
        assert "x-request-id" not in client.get("/health").headers
        assert "x-request-id" not in client.post("/v1/completions").headers


def test_importing_the_api_brings_in_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, deployments.gateway.api\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
