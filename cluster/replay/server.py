"""What a replay asks the server beforehand: models, context, tokens. Blocking, a few calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from cluster.errors import ClusterError, NotRunning

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the server lists it."""

    name: str
    max_context_tokens: int | None
    """None where the server does not tell."""


def base_url(url: str) -> str:
    """`url` without a trailing `/v1`. Raises ClusterError for what is no http(s) address."""
    base = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(f"--url {url!r}: must be like http://HOST:PORT")
    return base


class Server:
    """An OpenAI-compatible server: ours, vLLM's, llama.cpp's or another."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.url = base_url(url)
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
            timeout=timeout_s,
            trust_env=False,  # a proxy of the environment is no part of what is measured
        )
        self.software = ""
        """The `server` header of its answers."""

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[ServedModel]:
        """What it serves. Raises NotRunning if nobody answers, ClusterError if it is no such
        server, or serves nothing."""
        try:
            answer = self._http.get(f"{self.url}/v1/models")
        except httpx.HTTPError as error:
            raise NotRunning(
                f"{self.url}: nobody answers ({error}); start it with `tailrace up`, or give --url"
            ) from error
        self.software = answer.headers.get("server", "")
        if answer.status_code != 200:
            raise ClusterError(f"{self.url}/v1/models: {_failure(answer)}")
        try:
            models = [
                ServedModel(name=str(model["id"]), max_context_tokens=_context(model))
                for model in answer.json()["data"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{self.url}/v1/models: not an OpenAI-compatible list of models; correct --url"
            ) from error
        if not models:
            raise ClusterError(f"{self.url} serves no model: add one to the gateway's `models`")
        return models

    def pieces(self, model: str, text: str) -> list[tuple[int, str]] | None:
        """Token ids of `text` and what each spells, None where the server has no such route.

        The routes of vLLM (and ours) and of llama.cpp are tried.
        """
        answer = self._post(
            "/tokenize",
            {
                "model": model,
                "prompt": text,
                "add_special_tokens": False,
                "return_token_strs": True,
                # llama.cpp's names for the same
                "content": text,
                "add_special": False,
                "with_pieces": True,
            },
        )
        if answer is None or not isinstance(answer.get("tokens"), list):
            return None
        tokens, strings = cast("list[Any]", answer["tokens"]), answer.get("token_strs")
        if tokens and isinstance(tokens[0], dict):
            return [
                (int(token["id"]), token["piece"] if isinstance(token["piece"], str) else "")
                for token in tokens
            ]
        if not isinstance(strings, list) or len(cast("list[Any]", strings)) != len(tokens):
            return None
        return [
            (int(token), _spelled(str(string)))
            for token, string in zip(tokens, cast("list[Any]", strings), strict=True)
        ]

    def chat_ids(self, model: str, messages: Sequence[Message]) -> list[int] | None:
        """Token ids of templated messages, None where the server has no route for it."""
        answer = self._post("/tokenize", {"model": model, "messages": list(messages)})
        if answer is not None and isinstance(answer.get("tokens"), list) and answer["tokens"]:
            return [int(token) for token in answer["tokens"]]
        # llama.cpp templates and tokenises in two steps.
        answer = self._post("/apply-template", {"messages": list(messages)})
        if answer is None or not isinstance(answer.get("prompt"), str):
            return None
        pieces = self.pieces(model, answer["prompt"])
        return None if pieces is None else [token for token, _ in pieces]

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The JSON of a 200, None for every other answer. Raises ClusterError without one."""
        try:
            answer = self._http.post(f"{self.url}{path}", json=body)
        except httpx.HTTPError as error:
            raise ClusterError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            return None
        try:
            value = answer.json()
        except ValueError:
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _context(model: Mapping[str, Any]) -> int | None:
    meta = model.get("meta") or {}
    for value in (model.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and value > 0:
            return value
    return None


def _spelled(token: str) -> str:
    """vLLM gives tokens as the vocabulary writes them: with a sign for the space."""
    return token.replace("Ġ", " ").replace("▁", " ")


def _failure(answer: httpx.Response) -> str:
    return f"status {answer.status_code}: {answer.text[:200]}"
