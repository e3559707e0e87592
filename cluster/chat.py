"""`tailrace chat`: talk to a model in the terminal and see what each answer cost."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import httpx

from cluster.cli import emit, json_option, say
from cluster.errors import ClusterError, NotRunning
from cluster.state import StateDir
from engine.errors import EngineError, Overloaded, RequestError

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and what it cost."""

    text: str
    finish_reason: str | None
    """None: cancelled before it was finished."""

    ttft_s: float | None
    """From sending the request to the first text. None: there was no text."""

    tokens_per_s: float | None
    """Tokens after the first one, over the time between the first and the last. None below two."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that nobody computed for this request. None: the server did not say."""

    def summary(self) -> str:
        parts: list[str] = []
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens} tokens")
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens is not None else ""
            parts.append(f"prompt {self.prompt_tokens}{cached}")
        if self.finish_reason == "length":
            parts.append("cut at the limit")
        if self.finish_reason is None:
            parts.append("cancelled")
        return ", ".join(parts)


class ChatClient:
    """One conversation partner: an OpenAI-compatible server and a model on it.

    `clock` is for the figures only.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A local server needs no proxy from the environment, and reads take as long as a queue.
        self._http = httpx.Client(
            headers=headers,
            transport=transport,
            trust_env=False,
            timeout=httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0),
        )
        self._clock = clock

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Raises ClusterError if nobody answers, or somebody who is no such server."""
        try:
            answer = self._http.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRunning(
                f"{self.url}: nobody answers ({error}); start it with `tailrace up`, or give --url"
            ) from error
        if answer.status_code != 200:
            raise _failure(answer.status_code, _body(answer), answer.headers)
        try:
            return [model["id"] for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{self.url}/v1/models: not an OpenAI-compatible list of models; give --url"
            ) from error

    def ask(
        self,
        model: str,
        messages: list[Message],
        *,
        max_tokens: int | None,
        temperature: float | None = None,
        show: Callable[[str], None],
    ) -> Answer:
        """Stream one answer, `show` each piece as it comes. Ctrl-C cancels it on the server too
        and gives what was said so far.

        Raises:
            EngineError: the server refuses, or fails in the middle.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if max_tokens is not None:
            body["max_completion_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        pieces: list[str] = []
        finish: str | None = None
        usage: dict[str, Any] = {}
        sent = self._clock()
        first = last = None
        try:
            # Leaving the block closes the connection, which is how a stream is cancelled.
            with self._http.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise _failure(response.status_code, _body(response), response.headers)
                for chunk in _events(response):
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or ():
                        if text := (choice.get("delta") or {}).get("content"):
                            last = self._clock()
                            first = first or last
                            pieces.append(text)
                            show(text)
                        finish = choice.get("finish_reason") or finish
        except KeyboardInterrupt:
            finish = None
        except httpx.ConnectError as error:
            raise NotRunning(f"{self.url}: nobody answers ({error})") from error
        except httpx.HTTPError as error:
            raise ClusterError(
                f"{self.url}: the answer broke off ({type(error).__name__}: {error}); ask again"
            ) from error
        tokens = usage.get("completion_tokens")
        span = last - first if first is not None and last is not None else 0.0
        return Answer(
            text="".join(pieces),
            finish_reason=finish,
            ttft_s=first - sent if first is not None else None,
            tokens_per_s=(tokens - 1) / span if tokens and tokens > 1 and span > 0 else None,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=tokens,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, until `[DONE]`.

    Raises:
        EngineError: an event carries an error.
        ClusterError: the stream ends without `[DONE]`, or an event is not JSON.
    """
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ClusterError(f"not an event of a chat stream: {data[:80]!r}") from error
        if "error" in event:
            raise _failure(500, event, {})
        yield event
    raise ClusterError("the answer broke off before its end; ask again")


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return {"error": {"message": response.text[:200] or "no text"}}


def _failure(status: int, body: Any, headers: Any) -> EngineError:
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {"message": str(body)[:200]}
    message = str(error.get("message") or f"status {status}")
    code = str(error.get("code") or "")
    if status in (429, 503):
        return Overloaded(message, code=code, retry_after_s=float(headers.get("retry-after") or 1))
    if status < 500:
        return RequestError(message, code=code, param=error.get("param"), status=status)
    return ClusterError(f"the server failed ({status}): {message}")


@click.command()
@click.option("--url", help="Server to talk to. Default: the running session, else port 8000.")
@click.option("--model", help="Default: the first one the server lists.")
@click.option("--system", help="System message: how the model should behave.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 2.0),
    default=0.2,
    show_default=True,
    help="0 always takes the likeliest token. Small models wander at 1.",
)
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@json_option
def chat(
    url: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Talk to a model. Each line of standard input is one message; an empty line is skipped.

    Ctrl-C cancels the answer that is being written, and leaves at the prompt; so does Ctrl-D.
    """
    client = ChatClient(url or default_url(), api_key=api_key)
    available = client.models()
    if not available:
        raise ClusterError(f"{client.url} serves no model; add one to the gateway's `models`")
    chosen = model or available[0]
    if chosen not in available:
        raise RequestError(
            f"model {chosen!r} is not served here; there are: {', '.join(available)}",
            code="model_not_found",
            param="model",
            status=404,
        )
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty() and not as_json
    if interactive:
        say(f"{chosen} at {client.url}. Ctrl-C cancels an answer, Ctrl-D leaves.")
    turns: list[dict[str, Any]] = []
    failed: EngineError | None = None
    for question in _questions(interactive):
        messages.append({"role": "user", "content": question})
        try:
            answer = client.ask(
                chosen,
                messages,
                max_tokens=max_tokens,
                temperature=temperature,
                show=_show(to_stderr=as_json),
            )
        except EngineError as error:
            # In a conversation the next question may do better; a script must notice.
            if not interactive:
                failed = error
                break
            messages.pop()
            say(f"\nerror: {error}")
            continue
        messages.append({"role": "assistant", "content": answer.text})
        click.echo(err=as_json)
        say(f"[{answer.summary()}]")
        turns.append(
            {
                "question": question,
                "answer": answer.text,
                "finish_reason": answer.finish_reason,
                "ttft_s": answer.ttft_s,
                "tokens_per_s": answer.tokens_per_s,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "cached_tokens": answer.cached_tokens,
            }
        )
    client.close()
    if as_json:
        emit(
            {
                "url": client.url,
                "model": chosen,
                "turns": turns,
                "error": str(failed) if failed else None,
            }
        )
    if failed:
        raise failed


def _questions(interactive: bool) -> Iterator[str]:
    if interactive:
        import readline  # noqa: F401  # line editing and history, by being imported
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            return
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


def _show(*, to_stderr: bool) -> Callable[[str], None]:
    def write(text: str) -> None:
        click.echo(text, nl=False, err=to_stderr)
        (sys.stderr if to_stderr else sys.stdout).flush()

    return write


def default_url() -> str:
    """The running session's, else where one listens by default."""
    from cluster import session

    if os.environ.get("TAILRACE_URL"):
        return os.environ["TAILRACE_URL"]
    record = session.running(StateDir.from_environment())
    return record.url if record else "http://127.0.0.1:8000"
