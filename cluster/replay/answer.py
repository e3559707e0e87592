"""An answer as it comes in: server-sent events of OpenAI's endpoints, or one JSON object.

Tolerant of what servers do: role-only chunks, chunks without choices, comments, CRLF, usage on any
chunk, reasoning and tool calls in place of content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson


class Answer:
    """What came of one attempt. Times are those that `feed` was given."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.chunk_times: list[float] = []
        """Of each chunk with content."""

        self.chunk_tokens: list[int] = []
        """Of each of these, where the server counts as it goes; else empty."""

        self.text = ""
        self.finish_reason: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: tuple[str | None, str] | None = None
        """Code and message of the server's error."""

        self.done = False
        """`[DONE]` came, or the whole object."""

        self._keep_text = keep_text
        self._rest = b""
        self._pieces: list[str] = []
        self._counted = 0

    def feed(self, body: bytes, now_s: float) -> None:
        """A piece of an event stream."""
        *lines, self._rest = (self._rest + body if self._rest else body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def whole(self, body: bytes, status: int) -> None:
        """A body in one piece: an answer without streaming, or an error."""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            self.error = (None, body[:300].decode("utf-8", "replace") or f"status {status}")
            return
        answer = cast("dict[str, Any]", value)
        if status != 200 or "error" in answer:
            self.error = _error(answer)
            return
        self._usage(answer.get("usage"))
        for choice in answer.get("choices") or ():
            self._pieces.append(_content(choice.get("message") or {}) or choice.get("text") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.done = True

    def close(self) -> None:
        """Nothing more comes."""
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip(), self.chunk_times[-1] if self.chunk_times else 0.0)
        self._rest = b""
        self.text = "".join(self._pieces)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = ("invalid_event", f"not JSON: {data[:200]!r}")
            return
        if not isinstance(event, dict):
            return
        chunk = cast("dict[str, Any]", event)
        if "error" in chunk:
            self.error = _error(chunk)
            return
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else _content(delta)
            if text:
                self.chunk_times.append(now_s)
                if self._keep_text:
                    self._pieces.append(text)
            reason = choice.get("finish_reason")
            if reason:
                self.finish_reason = reason
        usage = chunk.get("usage")
        if usage:
            self._usage(usage)
            if chunk.get("choices") and self.output_tokens is not None:
                self._count(self.output_tokens)

    def _count(self, tokens: int) -> None:
        """Tokens so far belong to the newest chunk with content; to the first all before it."""
        if not self.chunk_times:
            return
        new, self._counted = tokens - self._counted, tokens
        while len(self.chunk_tokens) < len(self.chunk_times):
            self.chunk_tokens.append(0)
        self.chunk_tokens[-1] += new

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        counts = cast("dict[str, Any]", usage)
        self.input_tokens = _number(counts.get("prompt_tokens"), self.input_tokens)
        self.output_tokens = _number(counts.get("completion_tokens"), self.output_tokens)
        details = counts.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = cast("dict[str, Any]", details).get("cached_tokens")
            self.cached_tokens = _number(cached, self.cached_tokens)


def _content(message: Mapping[str, Any]) -> str:
    """What a reader sees first, whatever field it is in. Empty where there is nothing to see."""
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        value = message.get(name)
        if value:
            return value if isinstance(value, str) else " "
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name") or function.get("arguments"):
            return str(function.get("arguments") or function.get("name"))
    return ""


def _number(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise


def _error(body: Mapping[str, Any]) -> tuple[str | None, str]:
    error = body.get("error", body)
    if not isinstance(error, dict):
        return None, str(error)[:300]
    value = cast("dict[str, Any]", error)
    code = value.get("code") or value.get("type")
    message = value.get("message") or value.get("detail") or error
    return None if code is None else str(code), str(message)[:300]
