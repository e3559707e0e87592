"""Answers in OpenAI's shapes, built as plain dictionaries: no validation on the way out."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson

from deployments.gateway.backend import ModelInfo
from deployments.gateway.prepare import Plan
from deployments.link.messages import StreamEvent, TokenLogprob, Usage
from engine.errors import EngineError
from engine.request import FinishReason

LOWEST_LOGPROB = -9999.0
"""What OpenAI reports for a token too unlikely for a number."""


@lru_cache(maxsize=256)
def fingerprint(name: str, root: str, max_context_tokens: int) -> str:
    """`system_fingerprint`: equal fingerprints and seeds mean comparable answers."""
    text = f"{name}\0{root}\0{max_context_tokens}"
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


def answer_head(plan: Plan, kind: str) -> dict[str, Any]:
    """What every answer, and every chunk of one, begins with."""
    info = plan.info
    return {
        "id": plan.answer_id,
        "object": kind,
        "created": plan.created,
        "model": info.name,
        "system_fingerprint": fingerprint(info.name, info.root, info.max_context_tokens),
        "service_tier": plan.tier,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Tally:
    """Counts of one request's events: tokens, ends, usage."""

    def __init__(self, plan: Plan) -> None:
        self._n = plan.n
        self._prompt_tokens = plan.prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasons: list[FinishReason | None] = [None] * plan.num_choices
        self._reported: list[int] = []
        self._unfinished = plan.num_choices

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return not self._unfinished

    def count(self, prompt: int, events: Sequence[StreamEvent]) -> None:
        """Raises EngineError where the engine gave up on a choice."""
        for event in events:
            self.completion_tokens += len(event.token_ids)
            if event.finish is not None:
                self._finish(prompt, event)

    def _finish(self, prompt: int, event: StreamEvent) -> None:
        if event.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise EngineError(
                f"choice {event.choice} ended as {event.finish.value if event.finish else None!r} "
                "before its answer was whole; send the request again"
            )
        choice = prompt * self._n + event.choice
        if self.reasons[choice] is None:
            self._unfinished -= 1
        self.reasons[choice] = event.finish
        if event.usage is not None:
            self._reported.append(event.usage.completion_tokens)
            self.cached_tokens += event.usage.cached_tokens

    def close(self) -> None:
        """All streams have ended. Raises EngineError if a choice has not."""
        if self._unfinished:
            raise EngineError(
                f"the stream ended before choice {self.reasons.index(None)} was whole; send the "
                "request again"
            )
        # Decode's own count wins: it knows what a stop string or an end token swallowed.
        if self._reported:
            self.completion_tokens = sum(self._reported)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


class Collector:
    """Gathers a whole answer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._texts: list[list[str]] = [[] for _ in range(plan.num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(plan.num_choices)]

    def add(self, prompt: int, events: Sequence[StreamEvent]) -> None:
        base = prompt * self._plan.n
        for event in events:
            if event.text:
                self._texts[base + event.choice].append(event.text)
            if event.logprobs:
                self._logprobs[base + event.choice].extend(event.logprobs)

    def body(self, tally: Tally) -> bytes:
        """The JSON of a tally that was closed."""
        plan = self._plan
        build = self._chat_choice if plan.chat else self._completion_choice
        answer = answer_head(plan, "chat.completion" if plan.chat else "text_completion")
        answer["choices"] = [
            build(i, reason.value) for i, reason in enumerate(tally.reasons) if reason is not None
        ]
        answer["usage"] = usage_body(tally.usage)
        return orjson.dumps(answer)

    def _chat_choice(self, i: int, reason: str) -> dict[str, Any]:
        logprobs = chat_logprobs(self._logprobs[i]) if self._plan.logprobs else None
        message = {"role": "assistant", "content": "".join(self._texts[i]), "refusal": None}
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _completion_choice(self, i: int, reason: str) -> dict[str, Any]:
        echo = self._plan.echo[i // self._plan.n] if self._plan.echo else ""
        logprobs = None
        if self._plan.logprobs:
            logprobs = CompletionLogprobs().extend(self._logprobs[i])
        text = echo + "".join(self._texts[i])
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer, or of one chunk."""
    content: list[dict[str, Any]] = []
    for entry in entries:
        token = _chat_entry(entry.text, entry.logprob)
        token["top_logprobs"] = [_chat_entry(text, logprob) for _, text, logprob in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def _chat_entry(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _spell(text), "logprob": _bounded(logprob), "bytes": list(text)}


class CompletionLogprobs:
    """`choices[].logprobs` of `/v1/completions`; keeps the text offset from chunk to chunk.

    Offsets count characters of the generated text. A token that is a fragment of a character has
    the offset of that character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def extend(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for entry in entries:
            token = _spell(entry.text, prefix="bytes:")
            top = {_spell(text, prefix="bytes:"): _bounded(p) for _, text, p in entry.top}
            # The sampled token is always told, so that there may be one more than was asked for.
            top.setdefault(token, _bounded(entry.logprob))
            tokens.append(token)
            logprobs.append(_bounded(entry.logprob))
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.text))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _spell(text: bytes, prefix: str = "") -> str:
    r"""A token as text; one that is no whole character as OpenAI spells it: `\xe2\x80`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in text)


def _bounded(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN and -inf too


def model_body(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "tailrace",
        "root": info.root,
        "parent": None,
        "max_model_len": info.max_context_tokens,
    }
