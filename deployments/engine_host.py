"""An engine inside a replica: built off the loop, stepping on its thread, heard on the loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from deployments.background import background
from deployments.settings import ModelArgs, PoolSettings
from engine.errors import EngineError
from engine.outputs import StepOutput
from engine.protocol import EngineLike
from engine.text.text_model import load_text

if TYPE_CHECKING:
    from engine.build import BuiltEngine
    from engine.execution.ranks.launch import RankLauncher
    from engine.runner import EngineRunner

_LEASE_CHECK_S = 1.0
_RANKS_CHECK_S = 0.2
_LAST_WORDS_S = 1.0
"""For frames that say that streams end here to reach their gateways."""


def declared_memory() -> int | None:
    """What `ray_actor_options: {memory: N}` says that this replica takes. None: nothing, or no
    replica."""
    import ray

    if not ray.is_initialized():
        return None
    resources = ray.get_runtime_context().get_assigned_resources()
    return int(resources["memory"]) if resources.get("memory") else None


class EngineHost:
    """Owns one engine and its thread. `on_step` and `on_failure` are called on the event loop."""

    def __init__(
        self, engine: EngineLike, built: BuiltEngine | None, *, step_limit_s: float
    ) -> None:
        self.step_limit_s = step_limit_s
        """A step that runs this long never ends: the replica is given up and Serve replaces it."""

        self.engine = engine
        self.built = built
        """None for an engine without KV (synthetic)."""

        self._runner: EngineRunner | None = None

    @classmethod
    async def build(
        cls, args: ModelArgs, settings: PoolSettings, launcher: RankLauncher | None = None
    ) -> EngineHost:
        """Load the model in a thread. `launcher`: where ranks run, if `args` ask for any.

        Raises ConfigError for what cannot be loaded.
        """
        return await asyncio.to_thread(cls._build, args, settings, launcher)

    @classmethod
    def _build(
        cls, args: ModelArgs, settings: PoolSettings, launcher: RankLauncher | None
    ) -> EngineHost:
        config = args.engine_config(settings.scheduler(), memory_limit_bytes=declared_memory())
        tokenizer = load_text(args.source).tokenizer
        if args.source == "synthetic":
            from engine.synthetic import SyntheticEngine

            return cls(SyntheticEngine(config, tokenizer), None, step_limit_s=settings.step_limit_s)
        from engine.build import build_engine  # torch: only where a model runs

        built = build_engine(config, tokenizer, launcher)
        return cls(built.engine, built, step_limit_s=settings.step_limit_s)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV that this engine can hold."""
        if self.built is None:
            return (
                self.engine.max_context_tokens * self.engine.config.scheduler.max_running_requests
            )
        return self.built.engine.blocks.config.capacity_tokens

    @property
    def held_tokens(self) -> int:
        """Tokens of KV in blocks that requests or leases hold."""
        if self.built is None:
            return 0
        blocks = self.built.engine.blocks
        return blocks.num_held_blocks * blocks.config.block_tokens

    def reconfigure(self, settings: PoolSettings) -> None:
        """Raises ConfigError, and changes nothing, for what this engine cannot do."""
        self.engine.reconfigure(settings.scheduler())
        if self.built is not None and self.built.ranks is not None:
            self.built.ranks.silence_s = settings.rank_silence_s
        self.step_limit_s = settings.step_limit_s

    @property
    def failure(self) -> BaseException | None:
        """Why this engine will not go on: a step that raised, or one that does not end."""
        if self.built is not None and self.built.ranks is not None:
            lost = self.built.ranks.failure
            if lost is not None:
                return lost
        runner = self._runner
        if runner is None:
            return None
        if runner.failure is None and runner.step_s > self.step_limit_s:
            return EngineError(
                f"one step has been running for {runner.step_s:.0f} s, step_limit_s="
                f"{self.step_limit_s:g}; raise it in user_config if steps may take as long"
            )
        return runner.failure

    def start(
        self,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        """Begin stepping. Call on the event loop that the callbacks should run on."""
        from engine.runner import EngineRunner

        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:
            said = EngineError(f"the engine failed: {type(error).__name__}: this replica restarts")
            loop.call_soon_threadsafe(on_failure, said)

        def deliver(step: StepOutput) -> None:
            loop.call_soon_threadsafe(on_step, step)

        self._runner = EngineRunner(self.engine, deliver, failed)
        self._runner.start()

    @property
    def has_ranks(self) -> bool:
        """Other processes compute."""
        return self.built is not None and self.built.ranks is not None

    @property
    def rank_pids(self) -> list[int]:
        if self.built is None or self.built.ranks is None:
            return []
        return list(self.built.ranks.pids)

    def watching(self, on_failure: Callable[[EngineError], None]) -> list[asyncio.Task[None]]:
        """The task that ends this process with its ranks, where it has any."""
        if not self.has_ranks:
            return []
        return [background(self._end_with_ranks(on_failure), "ranks")]

    async def _end_with_ranks(self, on_failure: Callable[[EngineError], None]) -> None:
        """Run until a rank is lost or a step never ends, then end this process.

        Each rank holds a part of every request's KV: there is nothing left to save. Serve replaces
        a process that is gone at once, one that says it is ill only after several checks.
        """
        assert self.built is not None
        assert self.built.ranks is not None
        while (failure := self.failure) is None:
            await asyncio.sleep(_RANKS_CHECK_S)
        self.built.ranks.kill(str(failure))
        on_failure(EngineError(f"the engine failed: {failure}: this replica restarts"))
        await asyncio.sleep(_LAST_WORDS_S)
        os._exit(1)

    async def expire_leases(self, expired: Callable[[list[str]], None]) -> None:
        """Run for ever: free leases past their deadline and say which."""
        assert self.built is not None
        while True:
            await asyncio.sleep(_LEASE_CHECK_S)
            ids = self.built.engine.expire_leases()
            if ids:
                expired(ids)

    async def kv_digests(self, token_ids: tuple[int, ...], salt: str) -> list[str]:
        """Hex SHA-256 of the KV of each whole cached block of these tokens, in order."""
        built = self.built
        if built is None:
            return []

        def digest() -> list[str]:
            return [hashlib.sha256(b).hexdigest() for b in built.engine.kv_bytes(token_ids, salt)]

        return await asyncio.to_thread(digest)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.stop()
        self.engine.close()
