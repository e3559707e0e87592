"""Puts an engine together from its configuration. The only place that knows all the parts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from engine.cache.blocks import BlockManager
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.executor import LocalExecutor
from engine.execution.pool import KVPool
from engine.models.load import load_model
from engine.models.model import Model
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with the memory that transfers read and write."""

    engine: Engine
    pool: KVPool
    model: Model


def build_engine(config: EngineConfig, tokenizer: Tokenizer) -> BuiltEngine:
    """Load the weights, allocate the KV pool, join the parts.

    Raises ConfigError for weights that cannot be loaded and for limits the model or the memory
    cannot meet.
    """
    threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = load_model(config.model)
    return assemble(config, model, tokenizer)


def assemble(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> BuiltEngine:
    """`build_engine` for a model that is already loaded."""
    config = _resolve(config, model)
    assert config.num_blocks is not None
    assert config.max_context_tokens is not None
    cache = CacheConfig(
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        prefix_caching=config.prefix_caching,
        reuse_tokens=config.resolved_reuse_tokens,
    )
    pool = KVPool(model.layout, cache.num_blocks, cache.block_tokens, model.device)
    blocks = BlockManager(cache, model.layout.fingerprint)
    scheduler = Scheduler(
        config.scheduler,
        blocks,
        eos_token_ids=model.eos_token_ids,
        max_context_tokens=config.max_context_tokens,
    )
    executor = LocalExecutor(model, pool, Sampler(model.vocab_size, model.eos_token_ids))
    engine = Engine(
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
    return BuiltEngine(engine, pool, model)


def _resolve(config: EngineConfig, model: Model) -> EngineConfig:
    """Fill in what only the loaded model can tell."""
    context = config.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens={context}: {config.model.name} was trained for "
            f"{model.max_context_tokens}: lower the limit"
        )
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = model.layout.bytes_per_token * config.block_tokens
        num_blocks = config.kv_memory_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_memory_bytes={config.kv_memory_bytes}: one block of {config.block_tokens} "
                f"tokens takes {block_bytes} bytes and two are needed: raise it"
            )
    return replace(config, num_blocks=num_blocks, max_context_tokens=context)
