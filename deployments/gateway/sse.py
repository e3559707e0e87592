"""A stream's events as bytes: constant parts are encoded once, text by orjson, nothing validated.

```
data: {..,"choices":[{"index":0,  "delta":{"content":  "text"  },"logprobs":null,..}  ]}
|<--------- _heads[0] --------->|<----- _open ----->|<- json ->|<------- rest ------>|<- end
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from deployments.gateway.openai import (
    CompletionLogprobs,
    Tally,
    answer_head,
    chat_logprobs,
    usage_body,
)
from deployments.gateway.prepare import Plan, UsageMode
from deployments.link.messages import StreamEvent, TokenLogprob

DONE = b"data: [DONE]\n\n"


class EventWriter:
    """Encodes the events of one request.

    A chat choice's role chunk goes out together with its first token, never before: clients take
    the first chunk for the first token. The chunk with the finish reason has an empty delta.
    """

    def __init__(self, plan: Plan, tally: Tally) -> None:
        kind = "chat.completion.chunk" if plan.chat else "text_completion"
        self._head = b"data: " + orjson.dumps(answer_head(plan, kind))[:-1] + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % i for i in range(plan.num_choices)]
        self._chat = plan.chat
        self._open, self._shut = (b'"delta":{"content":', b"}") if plan.chat else (b'"text":', b"")
        self._end = b"]}\n\n" if plan.usage is UsageMode.NONE else b'],"usage":null}\n\n'
        self._usage = plan.usage
        self._tally = tally
        self._n = plan.n
        self._started = [False] * plan.num_choices
        self._echo = plan.echo
        self._pending: list[list[TokenLogprob]] | None = None
        self._offsets: list[CompletionLogprobs] = []
        if plan.logprobs:
            self._pending = [[] for _ in range(plan.num_choices)]
            self._offsets = [CompletionLogprobs() for _ in range(plan.num_choices)]

    def write(self, prompt: int, events: Sequence[StreamEvent]) -> bytes:
        """All chunks of `events`, which the tally has counted. May be empty: text is held back."""
        base = prompt * self._n
        end = self._end
        if self._usage is UsageMode.CONTINUOUS:
            end = b'],"usage":' + orjson.dumps(usage_body(self._tally.usage)) + b"}\n\n"
        rest = self._shut + b',"logprobs":null,"finish_reason":null}' + end
        out: list[bytes] = []
        for event in events:
            choice = base + event.choice
            if event.finish is None and self._started[choice] and self._pending is None:
                if event.text:
                    out += (self._heads[choice], self._open, orjson.dumps(event.text), rest)
            else:
                out += self._rare(prompt, choice, event, end)
        return b"".join(out)

    def _rare(self, prompt: int, choice: int, event: StreamEvent, end: bytes) -> list[bytes]:
        """Chunks of a first or last event, or of one with log-probabilities."""
        text, out = event.text, list[bytes]()
        if self._pending is not None and event.logprobs:
            self._pending[choice].extend(event.logprobs)
        if not text and event.finish is None:
            return out
        if not self._started[choice]:
            self._started[choice] = True
            if self._chat:
                role = b'"delta":{"role":"assistant","content":""}'
                out.append(self._chunk(choice, role, b"null", b"null", end))
            elif self._echo is not None:
                text = self._echo[prompt] + text
        logprobs = self._take_logprobs(choice)
        content = self._open + orjson.dumps(text) + self._shut
        if event.finish is None:
            out.append(self._chunk(choice, content, logprobs, b"null", end))
            return out
        reason = orjson.dumps(event.finish.value)
        if not self._chat:
            out.append(self._chunk(choice, content, logprobs, reason, end))
            return out
        if text or logprobs != b"null":
            out.append(self._chunk(choice, content, logprobs, b"null", end))
        out.append(self._chunk(choice, b'"delta":{}', b"null", reason, end))
        return out

    def _chunk(
        self, choice: int, content: bytes, logprobs: bytes, reason: bytes, end: bytes
    ) -> bytes:
        tail = b',"logprobs":' + logprobs + b',"finish_reason":' + reason + b"}" + end
        return self._heads[choice] + content + tail

    def _take_logprobs(self, choice: int) -> bytes:
        """Log-probabilities of the tokens whose text is written now."""
        entries = self._pending[choice] if self._pending is not None else []
        if self._pending is None or not entries:
            return b"null"
        self._pending[choice] = []
        if self._chat:
            return orjson.dumps(chat_logprobs(entries))
        return orjson.dumps(self._offsets[choice].extend(entries))

    def explained(self, explanation: dict[str, Any]) -> bytes:
        """A chunk without choices that carries the explanation. The last one before `close`."""
        return self._head + b'],"explain":' + orjson.dumps(explanation) + b"}\n\n"

    def close(self) -> bytes:
        """The usage chunk, if it was asked for, and `[DONE]`. The tally is closed."""
        if self._usage is UsageMode.NONE:
            return DONE
        return (
            self._head
            + b'],"usage":'
            + orjson.dumps(usage_body(self._tally.usage))
            + b"}\n\n"
            + DONE
        )
