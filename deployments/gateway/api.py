"""The HTTP surface: routes, error shapes, OpenAPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from deployments.gateway.backend import Backend
from deployments.gateway.config import GatewayConfig
from deployments.gateway.edge import Edge, FrontDoor, Posts, call_of, read_body
from deployments.gateway.errors import Failure, Headers, describe, refusal, retry_after
from deployments.gateway.explain_routes import add_explain
from deployments.gateway.identity.keyring import Identity
from deployments.gateway.ids import draw_name
from deployments.gateway.limits.quotas import LimitExceeded
from deployments.gateway.openai import model_body
from deployments.gateway.page import add_page
from deployments.gateway.prepare import (
    Plan,
    find_model,
    limits_of,
    prepare_chat,
    prepare_completion,
    tokenise,
    tokenise_chat,
    visible_models,
)
from deployments.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from deployments.gateway.state import GatewayState
from deployments.gateway.work import Generation
from deployments.metrics import CONTENT_TYPE
from engine.errors import EngineError, RequestError

_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_REF = "#/components/schemas/{model}"
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Any refusal or failure.",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events.", "content": {"text/event-stream": {}}},
    **_ERRORS,
}

_WHO = "tailrace.who"
"""In the scope of a request whose sender is known: the state that knows it, and who it is."""

_BEHIND_THE_DOOR = AssertionError("`FrontDoor` answers this before any router")


async def _chat(
    backend: Backend,
    config: GatewayConfig,
    identity: Identity,
    body: bytes,
    model: str | None = None,
) -> Plan:
    asked = parse(ChatRequest, body)
    if model is not None:
        asked.model = model
    return await prepare_chat(backend, config, identity, asked)


async def _completion(
    backend: Backend,
    config: GatewayConfig,
    identity: Identity,
    body: bytes,
    model: str | None = None,
) -> Plan:
    asked = parse(CompletionRequest, body)
    if model is not None:
        asked.model = model
    return await prepare_completion(backend, config, identity, asked)


def generations(get_state: Callable[[], GatewayState]) -> Posts:
    """The requests that are answered before any router sees them."""
    return {
        "/v1/chat/completions": lambda: Generation(get_state(), "chat", _chat),
        "/v1/completions": lambda: Generation(get_state(), "completions", _completion),
    }


def create_app(get_state: Callable[[], GatewayState], *, echo_request_id: bool = True) -> FrontDoor:
    """The application. `get_state` is asked at every request: the app may exist before its state.

    Built in the process that serves it: an app cannot be unpickled (starlette's State recurses).

    `echo_request_id=False` where the server in front (Ray Serve) adds `x-request-id` itself.
    """
    app = _declare(get_state, echo_request_id)
    return FrontDoor(app, generations(get_state), echo_request_id)


def _declare(get_state: Callable[[], GatewayState], echo_request_id: bool) -> FastAPI:
    app = FastAPI(
        title="Tailrace",
        description="OpenAI's API for the models of this cluster.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Edge, echo_request_id=echo_request_id)
    app.add_exception_handler(EngineError, _on_engine_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)

    @app.post("/v1/chat/completions", responses=_STREAMED, openapi_extra=_takes(ChatRequest))
    async def chat_completions() -> Response:  # pyright: ignore[reportUnusedFunction]
        raise _BEHIND_THE_DOOR

    @app.post("/v1/completions", responses=_STREAMED, openapi_extra=_takes(CompletionRequest))
    async def completions() -> Response:  # pyright: ignore[reportUnusedFunction]
        raise _BEHIND_THE_DOOR

    @app.get("/v1/models", responses=_ERRORS)
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        identity = identity_of(request, state)
        visible = visible_models(state.backend, identity)
        body = {"object": "list", "data": [model_body(info) for info in visible]}
        return _json(body, await _standing(identity, state))

    @app.get("/v1/models/{model_id:path}", responses=_ERRORS)
    async def model(request: Request, model_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        identity = identity_of(request, state)
        info = await find_model(state.backend, state.config, identity, model_id)
        return _json(model_body(info), await _standing(identity, state))

    @app.post("/tokenize", responses=_ERRORS, openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        identity = await _counted(request, state)
        body = parse(TokenizeRequest, await _read(request, state, identity))
        info = await find_model(state.backend, state.config, identity, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await tokenise_chat(
                info, body.messages, body.tools, body.add_generation_prompt is not False
            )
        else:
            ids = await tokenise(
                info,
                body.prompt or "",
                param="prompt",
                add_special_tokens=body.add_special_tokens is not False,
            )
        tokenizer = info.text.tokenizer
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        answer = {
            "count": len(ids),
            "max_model_len": info.max_context_tokens,
            "tokens": ids,
            "token_strs": strings,
        }
        return _json(answer, await _standing(identity, state))

    @app.post("/detokenize", responses=_ERRORS, openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        identity = await _counted(request, state)
        body = parse(DetokenizeRequest, await _read(request, state, identity))
        info = await find_model(state.backend, state.config, identity, body.model)
        text = info.text.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _json({"prompt": text}, await _standing(identity, state))

    @app.get("/health", responses=_ERRORS)
    async def health(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        names = [info.name for info in state.backend.models()]
        if names:
            revision = state.config.revision
            return _json({"status": "ok", "models": names, "revision": revision})
        message = "no model is served yet; wait for one, or see `tailrace status`"
        return _response(refusal(503, message, "no_models", headers=retry_after(1.0)))

    @app.get("/metrics", responses=_ERRORS, response_class=PlainTextResponse)
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(get_state().metrics.render(), media_type=CONTENT_TYPE)

    add_explain(app, get_state, _ERRORS)

    async def may_look(request: Request) -> None:
        identity = identity_of(request, get_state())
        if not identity.operator:
            raise RequestError(
                "these figures are of all tenants, and the key is not an operator's; "
                "use one made with `tailrace keys new --operator`",
                code="not_an_operator",
                status=403,
            )

    add_page(app, get_state, _ERRORS, may_look)
    app.openapi = lambda: _openapi(app)
    return app


def identity_of(request: Request, state: GatewayState) -> Identity:
    """Who asks. Raises RequestError (401)."""
    identity = state.identify(call_of(request.scope).headers)
    request.scope[_WHO] = state, identity
    return identity


async def _standing(identity: Identity, state: GatewayState) -> Headers:
    """How the limits of whoever asks stand now."""
    return await state.quotas.standing(identity.claims(tokens=0, retry=False))


async def _counted(request: Request, state: GatewayState) -> Identity:
    """Who asks, for something that takes no tokens of a model but counts as a request.

    Raises RequestError (401), LimitExceeded.
    """
    identity = identity_of(request, state)
    claims = [c for c in identity.claims(tokens=0, retry=False) if c.kind == "requests"]
    if claims:
        (await state.quotas.take(draw_name(), claims)).close(0)
    return identity


async def _read(request: Request, state: GatewayState, identity: Identity) -> bytes:
    limits = limits_of(state.config, identity)
    return await read_body(call_of(request.scope), request.receive, limits.max_body_bytes)


def _json(value: Any, headers: Headers = ()) -> Response:
    response = Response(orjson.dumps(value), media_type="application/json")
    response.raw_headers.extend(headers)
    return response


def _response(failure: Failure) -> Response:
    response = Response(failure.body(), failure.status, media_type="application/json")
    response.raw_headers.extend(failure.headers)
    return response


async def _on_engine_error(request: Request, error: Exception) -> Response:
    failure = describe(error, call_of(request.scope).request_id)
    known: tuple[GatewayState, Identity] | None = request.scope.get(_WHO)
    if known is not None and not isinstance(error, LimitExceeded):
        state, identity = known
        told = await _standing(identity, state)
        failure = replace(failure, headers=(*failure.headers, *told))
    return _response(failure)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises: 404, 405."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:200]}"
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"{path}: no such route; see /openapi.json", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{path}: this route takes {allowed}", "method_not_allowed"
    headers = tuple(
        (name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()
    )
    return _response(refusal(error.status_code, message, code, headers=headers))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _response(refusal(400, str(error.errors()[0].get("msg")), "invalid_value"))


def _takes(schema: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version="1", description=app.description, routes=app.routes
        )
        _, bodies = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=_REF
        )
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(bodies["$defs"], Error=_ERROR_SCHEMA)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own shape, never sent
        app.openapi_schema = schema
    return app.openapi_schema
