"""Answers of transformers' `generate` in OpenAI's form. Each request generates on its own thread;
nothing is batched."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
import torch
import transformers
from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers.generation.streamers import BaseStreamer


class Answers:
    """One model."""

    def __init__(self, name: str, directory: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._name = name
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype)
        )
        self._model = model.eval()
        self.max_context_tokens: int = self._model.config.max_position_embeddings

    async def completion(self, body: dict[str, Any]) -> Response:
        prompt = body["prompt"]
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        return await self._answer(body, ids, chat=False)

    async def chat(self, body: dict[str, Any]) -> Response:
        text = self._tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return await self._answer(body, ids, chat=True)

    async def _answer(self, body: dict[str, Any], ids: list[int], *, chat: bool) -> Response:
        room = self.max_context_tokens - len(ids)
        if room < 1:
            raise HTTPException(400, f"{len(ids)} tokens do not fit into {self.max_context_tokens}")
        max_tokens = min(room, body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        shape = _Shape(self._name, chat=chat)
        tokens = self._generate(body, ids, max_tokens)
        if body.get("stream"):
            return StreamingResponse(
                self._stream(body, shape, tokens, len(ids), max_tokens),
                media_type="text/event-stream",
            )
        said = [token async for token in tokens]
        return JSONResponse(
            shape.whole(self._text(said), _finish(said, max_tokens), _usage(len(ids), len(said)))
        )

    async def _stream(
        self,
        body: dict[str, Any],
        shape: _Shape,
        tokens: AsyncIterator[int],
        num_prompt: int,
        max_tokens: int,
    ) -> AsyncIterator[bytes]:
        said: list[int] = []
        sent = ""
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
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        left = threading.Event()

        class Streamer(BaseStreamer):
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

        temperature = float(body.get("temperature", 1.0))
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_p": float(body.get("top_p", 1.0))}
        if body.get("ignore_eos"):
            sampling["min_new_tokens"] = max_tokens

        def work() -> None:
            outcome: Exception | None = None
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
            except Exception as error:
                outcome = error
            loop.call_soon_threadsafe(queue.put_nowait, outcome)

        threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                item = await queue.get()
                if item is None:
                    return
                if isinstance(item, Exception):
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
