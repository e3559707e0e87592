"""Where a step's keys and values go, and where a gathering backend finds all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.backend import StepContext
from engine.execution.pool import KVPool
from engine.quantisation.kv_codes import to_codes

Index = tuple[Tensor, Tensor]
"""Block and offset of each token, both `[tokens]` int64: an index into a layer of the pool."""


def written(step: StepContext, block_tokens: int) -> Index:
    """Places of the step's own tokens. Computed on the device: a captured graph repeats it."""
    return step.slots // block_tokens, step.slots % block_tokens


def store(k: Tensor, v: Tensor, layer: int, pool: KVPool, at: Index) -> None:
    """Write k and v, `[tokens, kv_heads, dim]`, to their places."""
    if not pool.layout.coded:
        pool.keys(layer).index_put_(at, k)
        pool.values(layer).index_put_(at, v)
        return
    places = (
        (k, pool.keys(layer), pool.key_scales(layer)),
        (v, pool.values(layer), pool.value_scales(layer)),
    )
    for x, kept, scales in places:
        codes, made = to_codes(x, pool.code_dtype)
        # As bytes: not every operation knows fp8.
        kept.view(torch.uint8).index_put_(at, codes.view(torch.uint8))
        scales.index_put_(at, made)


def cumulative(lens: Tensor) -> Tensor:
    """`[n]` int32 to `[n + 1]` int32 with a leading 0, without a look at the host."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def read(step: StepContext, cu_k: Tensor, block_tokens: int) -> Index:
    """Places of every key that the step's requests have, request by request.

    cu_k: `cumulative(step.kv_lens)`. The number of keys comes from the host's copy of the lengths,
    so nothing waits for the device; it also changes with every step, so no graph can hold this.
    """
    total = sum(step.k_lens)
    device = cu_k.device
    rows = torch.repeat_interleave(
        torch.arange(len(step.k_lens), device=device), step.kv_lens, output_size=total
    )
    position = torch.arange(total, device=device) - cu_k[rows]
    blocks = step.block_table[rows, position // block_tokens].to(torch.int64)
    return blocks, position % block_tokens
