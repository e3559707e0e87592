"""Puts an engine together from its configuration. The only place that knows all the parts."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from engine.cache.blocks import BlockManager
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.executor import Executor, LocalExecutor
from engine.execution.pool import KVPool
from engine.execution.ranks.executor import RankExecutor, RankGroupStart
from engine.execution.ranks.launch import LocalProcesses, RankLauncher
from engine.execution.ranks.pool import ShardedPool, whole_layout
from engine.execution.ranks.wire import machine
from engine.memory import (
    Claims,
    FreeMemory,
    MemoryPlan,
    PoolSize,
    expected_bytes,
    free_host_memory,
    free_memory,
    free_on_devices,
)
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.model import KVLayout, Model
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory

logger = logging.getLogger(__name__)

_TAKE_LIMIT_S = 60.0
"""For ranks to take host memory for their pools."""


class ModelFacts(Protocol):
    """What the parts need to know of a model, wherever it is."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def dtype(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedModel:
    """A model that ranks hold."""

    layout: KVLayout
    dtype: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with the memory that transfers read and write."""

    engine: Engine
    pool: KVMemory
    model: Model | RankedModel
    memory: MemoryPlan
    ranks: RankExecutor | None = None


def build_engine(
    config: EngineConfig, tokenizer: Tokenizer, launcher: RankLauncher | None = None
) -> BuiltEngine:
    """Load the weights, allocate the KV pool, join the parts.

    launcher: where ranks run, if the configuration has any; None: as children of this process.
    Raises ConfigError for weights that cannot be loaded and for limits the model or the memory
    cannot meet.
    """
    if config.grid.num_ranks > 1:
        return _build_on_ranks(config, tokenizer, launcher or LocalProcesses())
    threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with _announced(config) as loaded:
        model = load_model(config.model)
        loaded()
        return assemble(config, model, tokenizer)


def assemble(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> BuiltEngine:
    """`build_engine` for a model that is already loaded."""
    claims = Claims()
    with claims.locked() as announced:
        free = free_memory(
            model.device.type,
            model.device.index,
            announced_bytes=announced,
            limit_bytes=config.memory_limit_bytes,
        )
        config = _resolve(config, model, model.layout.bytes_per_token, free)
        assert config.num_blocks is not None
        pool = KVPool(model.layout, config.num_blocks, config.block_tokens, model.device)
        claims.clear()  # before others measure
    memory = _told(config, model.layout.bytes_per_token, model.weight_bytes, free)
    executor = _executor(config, model, pool)
    return BuiltEngine(_join(config, model, pool, executor, tokenizer), pool, model, memory)


def _executor(config: EngineConfig, model: Model, pool: KVPool) -> Executor:
    """Raises ConfigError where a GPU has no attention for this model and pool."""
    if isinstance(model, Decoder) and model.device.type == "cuda":
        from engine.execution.gpu import gpu_executor

        assert config.max_context_tokens is not None
        return gpu_executor(
            model,
            pool,
            wanted=config.model.attention,
            graphs=config.cuda_graphs,
            max_running_requests=config.scheduler.max_running_requests,
            max_step_tokens=config.scheduler.max_step_tokens,
            max_context_tokens=config.max_context_tokens,
        )
    return LocalExecutor(model, pool, Sampler(model.vocab_size, model.eos_token_ids))


def _build_on_ranks(
    config: EngineConfig, tokenizer: Tokenizer, launcher: RankLauncher
) -> BuiltEngine:
    grid = config.grid
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // grid.num_ranks)
    with _announced(config) as loaded:
        start = RankGroupStart(
            config.model,
            grid,
            launcher,
            block_tokens=config.block_tokens,
            num_threads=threads,
            devices=_rank_devices(config, launcher),
            kv_reads=config.kv_reads,
        )
        loaded()
        return _on_ranks(config, tokenizer, start)


def _on_ranks(config: EngineConfig, tokenizer: Tokenizer, start: RankGroupStart) -> BuiltEngine:
    """Ends the ranks when it raises."""
    pool: ShardedPool | None = None
    executor: RankExecutor | None = None
    try:
        first = start.ready[0]
        model = RankedModel(
            layout=whole_layout(start.ready),
            dtype=first.dtype,
            vocab_size=first.vocab_size,
            max_context_tokens=first.max_context_tokens,
            eos_token_ids=first.eos_token_ids,
        )
        # What all ranks keep of a token together, copies of heads included.
        token_bytes = sum(rank.layout.bytes_per_token for rank in start.ready)
        here = all(rank.host == machine() and rank.on_host for rank in start.ready)
        claims = Claims()
        # Others need not wait where no memory of this host is measured.
        with claims.locked() if here else contextlib.nullcontext(0) as announced:
            # Ranks with devices measure them; host memory of other machines is not measured.
            each = [(rank.free_bytes, rank.layout.bytes_per_token) for rank in start.ready]
            free = free_memory("cpu", announced_bytes=announced) if here else free_on_devices(each)
            config = _resolve(config, model, token_bytes, free)
            assert config.num_blocks is not None
            pool = ShardedPool(start.ready, config.num_blocks, config.block_tokens, host=machine())
            # Other engines wait for the lock. Pages come at a GB a second and more.
            pool_bytes = config.num_blocks * config.block_tokens * token_bytes
            limit_s = max(_TAKE_LIMIT_S, pool_bytes / 1e9) if here else None
            remote = start.allocate(config.num_blocks, pool.files, limit_s=limit_s)
            pool.connect(remote, start.read_channels)
            claims.clear()
        weight_bytes = sum(rank.weight_bytes for rank in start.ready)
        memory = _told(config, token_bytes, weight_bytes, free)
        executor = start.executor()
        pool.on_lost = executor.kill
        for channel in remote:
            if channel is not None:
                channel.on_lost = executor.kill
        engine = _join(config, model, pool, executor, tokenizer)
    except BaseException:
        if executor is not None:
            executor.close()
        if pool is not None:
            pool.close()
        start.close()
        raise
    return BuiltEngine(engine, pool, model, memory, executor)


def _rank_devices(config: EngineConfig, launcher: RankLauncher) -> list[str] | None:
    if config.model.accelerator == "cpu":
        return None
    ranks = range(config.grid.num_ranks)
    return [f"cuda:{0 if launcher.own_gpu else rank}" for rank in ranks]


def _join(
    config: EngineConfig,
    model: ModelFacts,
    pool: KVMemory,
    executor: Executor,
    tokenizer: Tokenizer,
) -> Engine:
    assert config.num_blocks is not None
    assert config.max_context_tokens is not None
    cache = CacheConfig(
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        prefix_caching=config.prefix_caching,
        reuse_tokens=config.resolved_reuse_tokens,
    )
    blocks = BlockManager(cache, model.layout.fingerprint)
    scheduler = Scheduler(
        config.scheduler,
        blocks,
        eos_token_ids=model.eos_token_ids,
        max_context_tokens=config.max_context_tokens,
    )
    return Engine(
        config,
        scheduler=scheduler,
        blocks=blocks,
        executor=executor,
        pool=pool,
        tokenizer=tokenizer,
        layout=model.layout,
        vocab_size=model.vocab_size,
        max_context_tokens=config.max_context_tokens,
    )


@contextlib.contextmanager
def _announced(config: EngineConfig) -> Generator[Callable[[], None]]:
    """While weights are loaded, other engines of this host leave the memory that they will take.

    Yields what is to be called once they are loaded: then they lack in free memory already.
    """
    claims = Claims()
    kv_bytes = config.kv_memory_bytes or 0
    if config.model.accelerator != "cpu" or kv_bytes > free_host_memory().num_bytes:
        kv_bytes = 0  # It is another memory's, or will be refused: nobody need make room.
    claims.announce(expected_bytes(config.model.source) + kv_bytes)
    try:
        yield lambda: claims.announce(kv_bytes)
    finally:
        claims.clear()


def _told(
    config: EngineConfig, token_bytes: int, weight_bytes: int, free: FreeMemory | None
) -> MemoryPlan:
    """What memory is used for, in the log too."""
    assert config.num_blocks is not None
    assert config.max_context_tokens is not None
    kv_bytes = config.num_blocks * config.block_tokens * token_bytes
    plan = MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=(config.num_blocks - 1) * config.block_tokens,
        free_bytes=None if free is None else free.num_bytes,
        context_tokens=config.max_context_tokens,
    )
    logger.info("model %s: %s", config.model.name, plan)
    return plan


def _resolve(
    config: EngineConfig, model: ModelFacts, token_bytes: int, free: FreeMemory | None
) -> EngineConfig:
    """Fill in what only the loaded model and the machine can tell."""
    context = config.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens={context}: {config.model.name} was trained for "
            f"{model.max_context_tokens}: lower the limit"
        )
    size = PoolSize(
        num_blocks=config.num_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        kv_memory_fraction=config.kv_memory_fraction,
        block_tokens=config.block_tokens,
        useful_tokens=config.scheduler.max_running_requests * context,
    )
    num_blocks = size.blocks(token_bytes, free)
    return replace(config, num_blocks=num_blocks, max_context_tokens=context)
