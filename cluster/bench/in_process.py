"""The engine without the stack: the same thread and event loop as in a replica, and nothing else.

Imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from cluster.bench.client import StreamResult
from cluster.bench.loads import Ask
from deployments.settings import ModelArgs, PoolSettings
from engine.build import build_engine
from engine.errors import EngineError
from engine.outputs import StepOutput
from engine.request import Request, SamplingParams
from engine.runner import EngineRunner
from engine.text.text_model import load_text


class InProcess:
    """`loads.Target` over an engine of this process. Construct on its event loop."""

    def __init__(self, args: dict[str, Any], settings: dict[str, Any] | None) -> None:
        """`args` and `settings` as the model's application has them, so that both engines are
        the same. Raises ConfigError."""
        config = ModelArgs.model_validate(args).engine_config(
            PoolSettings.parse(settings).scheduler()
        )
        self.built = build_engine(config, load_text(config.model.source).tokenizer)
        self._engine = self.built.engine
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, tuple[StreamResult, asyncio.Future[None]]] = {}
        self._ids = itertools.count(1)
        self._runner = EngineRunner(self._engine, self._deliver, self._failed)
        self._runner.start()

    async def warm(self, count: int) -> None:
        """There is nothing to connect to."""

    async def ask(self, ask: Ask) -> StreamResult:
        """Greedy, `max_tokens` whatever the model says."""
        request = Request(
            request_id=f"bench-{next(self._ids)}",
            prompt_ids=ask.prompt_ids,
            params=SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True),
        )
        result = StreamResult(time.monotonic(), prompt_tokens=len(ask.prompt_ids))
        done = self._loop.create_future()
        self._streams[request.request_id] = (result, done)
        try:
            self._engine.submit(request)
            await done
        except EngineError as error:
            result.error = str(error)
        finally:
            del self._streams[request.request_id]
        return result

    def close(self) -> None:
        self._runner.stop()
        self._engine.close()

    def _deliver(self, step: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._on_step, step)

    def _failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail_all, f"the engine failed: {error!r}")

    def _fail_all(self, message: str) -> None:
        for result, done in self._streams.values():
            result.error = message
            if not done.done():
                done.set_result(None)

    def _on_step(self, step: StepOutput) -> None:
        now_s = time.monotonic()
        for output in step.outputs:
            result, done = self._streams[output.request_id]
            if output.token is None:
                result.error = "the engine could not sample a token"
                done.set_result(None)
                continue
            result.completion_tokens = (result.completion_tokens or 0) + 1
            if output.text:
                result.content(output.text, now_s)
            if output.finish is not None:
                result.cached_tokens = output.num_cached_tokens
                result.finish = output.finish.value
                result.end_s = now_s
                done.set_result(None)
