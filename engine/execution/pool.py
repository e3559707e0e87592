"""The paged KV pool: one allocation, block-major, so that a block is one run of bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.model import KVLayout


class KVPool:
    """KV memory of one rank.

    `data` is `[num_blocks, layers, 2, block_tokens, kv_heads, head_dim]`. Blocks come first so that
    everything one block holds, for any range of layers, is contiguous: a transport receives
    straight into it. What attention reads of a layer is the strided view `[num_blocks,
    block_tokens, kv_heads, head_dim]` whose rows are contiguous, as flash-attn's paged calls want.

    Zeroed at allocation: never-written slots must not hold NaN.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.data = torch.zeros(
            num_blocks,
            layout.num_layers,
            2,
            block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
            dtype=getattr(torch, layout.dtype),
            device=device,
        )

    def keys(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads, head_dim]`, a view."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads, head_dim]`, a view."""
        return self.data[:, layer, 1]

    def block_bytes(self, block: int, first_layer: int, last_layer: int) -> memoryview:
        """Writable bytes of layers `[first_layer, last_layer)` of one block (host memory only).

        Order: layer, K then V, token, head, dim: the canonical wire order of a whole block.
        """
        part = self.data[block, first_layer:last_layer].reshape(-1).view(torch.uint8)
        return part.numpy().data.cast("B")

    def gather(
        self, block: int, offset: int, num_tokens: int, first_layer: int, last_layer: int
    ) -> memoryview:
        """A copy, in wire order, of `num_tokens` tokens of one block from `offset` on."""
        part = self.data[block, first_layer:last_layer, :, offset : offset + num_tokens]
        return part.contiguous().reshape(-1).view(torch.uint8).numpy().data.cast("B")

    def scatter(
        self,
        blocks: tuple[int, ...],
        first_token: int,
        first_layer: int,
        last_layer: int,
        payload: bytearray,
    ) -> None:
        """Write a payload in wire order to position `first_token` on, across block borders."""
        layout, page = self.layout, self.block_tokens
        source = torch.frombuffer(payload, dtype=self.data.dtype).view(
            last_layer - first_layer, 2, -1, layout.num_kv_heads, layout.head_dim
        )
        num_tokens, done = source.shape[2], 0
        while done < num_tokens:
            offset = (first_token + done) % page
            run = min(page - offset, num_tokens - done)
            block = blocks[(first_token + done) // page]
            self.data[block, first_layer:last_layer, :, offset : offset + run] = source[
                :, :, done : done + run
            ]
            done += run
