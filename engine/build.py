"""Puts an engine together from its configuration. The only place that knows all the parts."""

from __future__ import annotations

import os
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
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.model import KVLayout, Model
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory


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
    model: ModelFacts
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
    model = load_model(config.model)
    return assemble(config, model, tokenizer)


def assemble(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> BuiltEngine:
    """`build_engine` for a model that is already loaded."""
    config = _resolve(config, model, model.layout.bytes_per_token)
    assert config.num_blocks is not None
    pool = KVPool(model.layout, config.num_blocks, config.block_tokens, model.device)
    return BuiltEngine(
        _join(config, model, pool, _executor(config, model, pool), tokenizer), pool, model
    )


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
            max_context_tokens=config.max_context_tokens,
        )
    return LocalExecutor(model, pool, Sampler(model.vocab_size, model.eos_token_ids))


def _build_on_ranks(
    config: EngineConfig, tokenizer: Tokenizer, launcher: RankLauncher
) -> BuiltEngine:
    grid = config.grid
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // grid.num_ranks)
    start = RankGroupStart(
        config.model,
        grid,
        launcher,
        block_tokens=config.block_tokens,
        num_threads=threads,
    )
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
        config = _resolve(config, model, token_bytes)
        assert config.num_blocks is not None
        pool = ShardedPool(start.ready, config.num_blocks, config.block_tokens, host=machine())
        pool.connect(start.allocate(config.num_blocks, pool.files))
    except BaseException:
        start.close()
        raise
    executor = start.executor()
    engine = _join(config, model, pool, executor, tokenizer)
    return BuiltEngine(engine, pool, model, executor)


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
        # Ranks copy nothing yet.
        reuse_tokens=config.resolved_reuse_tokens if config.grid.num_ranks == 1 else None,
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


def _resolve(config: EngineConfig, model: ModelFacts, token_bytes: int) -> EngineConfig:
    """Fill in what only the loaded model can tell."""
    context = config.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens={context}: {config.model.name} was trained for "
            f"{model.max_context_tokens}: lower the limit"
        )
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = token_bytes * config.block_tokens
        num_blocks = config.kv_memory_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_memory_bytes={config.kv_memory_bytes}: one block of {config.block_tokens} "
                f"tokens takes {block_bytes} bytes and two are needed: raise it"
            )
    return replace(config, num_blocks=num_blocks, max_context_tokens=context)
