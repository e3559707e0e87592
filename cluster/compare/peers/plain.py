"""What one writes in an afternoon: transformers' `generate` behind a Ray Serve deployment.

Here to be compared with. A request is a thread that generates on its own; nothing is batched, no
prompt is cached, nothing is queued by rank. It speaks as much of OpenAI's API as a load client
needs: models, chat and completions, streamed or whole, `ignore_eos`, usage.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

api = FastAPI()


class PlainArgs(BaseModel):
    """`args` of the application."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    directory: str
    """As `from_pretrained` wants it."""

    dtype: str = "bfloat16"
    threads: int = Field(default=1, ge=1)


@serve.deployment
@serve.ingress(api)
class Plain:
    def __init__(self, args: PlainArgs) -> None:
        import torch
        import transformers

        torch.set_num_threads(args.threads)
        self._name = args.name
        self._torch = torch
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(args.directory)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            args.directory, dtype=getattr(torch, args.dtype)
        )
        self._model = model.eval()
        self._limit = self._model.config.max_position_embeddings

    @api.get("/v1/models")
    def models(self) -> dict[str, Any]:
        model = {"id": self._name, "object": "model", "max_model_len": self._limit}
        return {"object": "list", "data": [model]}

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        return await self._answer(body, ids, chat=False)

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        body = await request.json()
        text = self._tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return await self._answer(body, ids, chat=True)

    async def _answer(self, body: dict[str, Any], ids: list[int], *, chat: bool) -> Response:
        room = self._limit - len(ids)
        if room < 1:
            raise HTTPException(400, f"{len(ids)} tokens do not fit into {self._limit}")
        max_tokens = min(room, body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        shape = _Shape(self._name, chat=chat)
        tokens = self._generate(body, ids, max_tokens)
        if body.get("stream"):
            return StreamingResponse(
                self._stream(body, shape, tokens, len(ids)), media_type="text/event-stream"
            )
        said = [token async for token in tokens]
        return JSONResponse(
            shape.whole(self._text(said), _finish(said, max_tokens), _usage(len(ids), len(said)))
        )

    async def _stream(
        self, body: dict[str, Any], shape: _Shape, tokens: AsyncIterator[int], num_prompt: int
    ) -> AsyncIterator[bytes]:
        said: list[int] = []
        sent = ""
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        async for token in tokens:
            said.append(token)
            text = self._text(said)
            # Half of a character that takes several tokens is no text yet.
            if text.endswith("�"):
                continue
            yield shape.chunk(text[len(sent) :], None)
            sent = text
        yield shape.chunk("", _finish(said, max_tokens))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield shape.usage(_usage(num_prompt, len(said)))
        yield b"data: [DONE]\n\n"

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    async def _generate(
        self, body: dict[str, Any], ids: list[int], max_tokens: int
    ) -> AsyncIterator[int]:
        """Tokens as they come. A client that leaves stops the thread at its next token."""
        import transformers

        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int | BaseException | None] = asyncio.Queue()
        left = threading.Event()

        class Streamer(transformers.generation.streamers.BaseStreamer):
            def __init__(self) -> None:
                self.prompt = True

            def put(self, value: Any) -> None:
                if self.prompt:  # generate hands the prompt over first
                    self.prompt = False
                    return
                for token in value.flatten().tolist():
                    loop.call_soon_threadsafe(queue.put_nowait, token)

            def end(self) -> None: ...

        class Left(transformers.StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
                return torch.full((input_ids.shape[0],), left.is_set(), dtype=torch.bool)

        torch = self._torch
        temperature = float(body.get("temperature", 1.0))
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_p": float(body.get("top_p", 1.0))}
        if body.get("ignore_eos"):
            sampling["min_new_tokens"] = max_tokens

        def work() -> None:
            outcome: BaseException | None = None
            try:
                prompt = torch.tensor([ids])
                with torch.inference_mode():
                    self._model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=max_tokens,
                        pad_token_id=0,
                        streamer=Streamer(),
                        stopping_criteria=transformers.StoppingCriteriaList([Left()]),
                        **sampling,
                    )
            except BaseException as error:
                outcome = error
            loop.call_soon_threadsafe(queue.put_nowait, outcome)

        threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                item = await queue.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            left.set()


class _Shape:
    """OpenAI's objects of one answer."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._whole = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._part = {**self._whole, "object": f"{kind}.chunk" if chat else kind}

    def chunk(self, text: str, finish: str | None) -> bytes:
        said = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._event({**self._part, "choices": [choice]})

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._event({**self._part, "choices": [], "usage": usage})

    def whole(self, text: str, finish: str, usage: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {**self._whole, "choices": [choice], "usage": usage}

    @staticmethod
    def _event(value: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(value) + b"\n\n"


def _finish(said: list[int], max_tokens: int) -> str:
    return "length" if len(said) >= max_tokens else "stop"


def _usage(num_prompt: int, num_said: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "total_tokens": num_prompt + num_said,
    }


def build(args: PlainArgs) -> serve.Application:
    """For `import_path`."""
    deployment: Any = Plain  # the decorators' types hide what they make
    return deployment.bind(args)
