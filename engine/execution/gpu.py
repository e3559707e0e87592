"""Makes a loaded decoder ready to serve on its GPU: attention, graphs, executor."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from engine.attention.capabilities import ATTENTION, AttentionNeeds
from engine.attention.select import AttentionChoice, cuda_device, make_attention
from engine.errors import ConfigError
from engine.execution.cuda import CudaRecorder
from engine.execution.device import DeviceExecutor
from engine.execution.graphs import DecodeGraphs, GraphBuckets, column_buckets, row_buckets
from engine.sampling.batched import BatchedSampler

if TYPE_CHECKING:
    from engine.execution.pool import KVPool
    from engine.models.decoder import Decoder

logger = logging.getLogger(__name__)


def choose_attention(
    model: Decoder, *, block_tokens: int, kv_dtype: str, wanted: AttentionChoice, graphs: bool
) -> None:
    """Give a decoder on a GPU the attention that fits it and its pool.

    Raises ConfigError with what each backend lacks.
    """
    architecture = model.architecture
    dtype = model.dtype
    device = cuda_device(model.device.index or 0)
    needs = AttentionNeeds(
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=architecture.head_dim,
        block_tokens=block_tokens,
        window=architecture.window is not None,
        graphs=graphs,
    )
    name, backend = make_attention(device, needs, window=architecture.window, wanted=wanted)
    model.use_attention(backend)
    better = [
        f"{other}: {device.missing[can.package]}"
        for other, can in ATTENTION.items()
        if can.package is not None and can.package in device.missing
    ]
    logger.info(
        "attention on %s: %s%s", device.name, name, f" ({'; '.join(better)})" if better else ""
    )


def gpu_executor(
    model: Decoder,
    pool: KVPool,
    *,
    wanted: AttentionChoice,
    graphs: bool,
    max_running_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
) -> DeviceExecutor:
    """The executor of a model on a GPU, its graphs recorded and its kernels warm.

    Raises ConfigError where no attention fits, or where graphs or a step of the largest size have
    no memory.
    """
    choose_attention(
        model,
        block_tokens=pool.block_tokens,
        kv_dtype=pool.layout.dtype,
        wanted=wanted,
        graphs=graphs,
    )
    recorded = None
    if graphs:
        longest = min(max_context_tokens, (pool.num_blocks - 1) * pool.block_tokens)
        buckets = GraphBuckets(
            row_buckets(max_running_requests),
            column_buckets(-(-longest // pool.block_tokens)),
        )
        began = time.monotonic()
        recorded = DecodeGraphs(model, pool, buckets, CudaRecorder())
        try:
            recorded.record()
            torch.cuda.synchronize(model.device)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            raise ConfigError(
                f"max_running_requests={max_running_requests}: the GPU has no memory for decode "
                "graphs of so many beside weights and KV pool: lower it, or kv_memory_fraction or "
                "kv_memory_bytes, or say cuda_graphs: false"
            ) from error
        logger.info(
            "%d decode graphs recorded in %.1f s", len(buckets.shapes), time.monotonic() - began
        )
    sampler = BatchedSampler(model.vocab_size, model.eos_token_ids)
    executor = DeviceExecutor(model, pool, sampler, recorded)
    try:
        executor.warm_up(
            max_step_tokens=max_step_tokens,
            max_context_tokens=max_context_tokens,
            max_running_requests=max_running_requests,
        )
        torch.cuda.synchronize(model.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_step_tokens={max_step_tokens}: the GPU has no memory for a step of so many, or "
            f"for tokens of max_running_requests={max_running_requests} at once, beside weights "
            "and KV pool: lower them, or kv_memory_fraction or kv_memory_bytes"
        ) from error
    return executor


def _out_of_memory(error: BaseException | None) -> bool:
    """A recording that ends early may raise for that, with the reason behind it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
