"""The paged KV pool: one allocation, block-major, so that a block is one run of bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from mmap import mmap

import torch
from torch import Tensor

from engine.execution.wire_order import sound_scales, wire_views
from engine.models.model import SCALE_BYTES, KVLayout, KVPart


class KVPool:
    """KV memory of one rank.

    `data` is `[num_blocks, layers, 2, block_tokens, kv_heads, head_dim]`. Blocks come first so that
    everything one block holds, for any range of layers, is contiguous: a transport receives
    straight into it. What attention reads of a layer is the strided view `[num_blocks,
    block_tokens, kv_heads, head_dim]` whose rows are contiguous, as flash-attn's paged calls want.

    Where the layout is `coded`, `data` is `[num_blocks, layers, 2, bytes]` of uint8. The keys, or
    the values, of one layer in one block are

        codes [block_tokens, kv_heads, head_dim], float32 scales [kv_heads, block_tokens]

    so that a block has its scales with it wherever it goes, the codes of a head of 64 are one cache
    line, and the scales that attention over one head reads lie together.

    Zeroed at allocation: never-written slots must not hold NaN.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_tokens: int,
        device: torch.device | str = "cpu",
        *,
        memory: mmap | None = None,
    ) -> None:
        """memory: where to lie instead of memory of its own, all zero, of exactly its size."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        rows = block_tokens * layout.num_kv_heads
        shape = (block_tokens, layout.num_kv_heads, layout.head_dim)
        kept = shape if not layout.coded else (rows * layout.row_bytes,)
        whole = (num_blocks, layout.num_layers, 2, *kept)
        dtype = torch.uint8 if layout.coded else getattr(torch, layout.dtype)
        if memory is None:
            self.data = torch.empty(whole, dtype=dtype, device=device)
        else:
            self.data = torch.frombuffer(memory, dtype=dtype).view(whole)
        # Written at once: memory that is not there must be missed at start-up (see
        # `engine.memory`), and no step should wait for pages.
        self.data.zero_()
        self._numbers = self.data
        if layout.coded:
            assert layout.head_dim % SCALE_BYTES == 0, f"scales behind heads of {layout.head_dim}"
            split = rows * layout.head_dim
            each = whole[:3]
            self._numbers = self.data[..., :split].view(self.code_dtype).view((*each, *shape))
            scales = self.data[..., split:].view(torch.float32)
            scales = scales.view((*each, layout.num_kv_heads, block_tokens))
            self._scales = scales.transpose(-1, -2)
        self._stream: torch.cuda.Stream | None = None
        """What transfers copy on, of a CUDA device: on the stream of the steps they would wait for
        the step that runs, and an event loop with them. Nothing else orders them, or needs to: a
        block is read after its step has ended and written before its step begins."""

        if self.data.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.data.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.data.device))  # the zeros

    @property
    def code_dtype(self) -> torch.dtype:
        """Of the codes of a coded layout."""
        return getattr(torch, self.layout.dtype)

    def keys(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads, head_dim]`, a view: numbers, or codes."""
        return self._numbers[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads, head_dim]`, a view: numbers, or codes."""
        return self._numbers[:, layer, 1]

    def key_scales(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads]` float32, a view, of a coded layout."""
        return self._scales[:, layer, 0]

    def value_scales(self, layer: int) -> Tensor:
        """`[num_blocks, block_tokens, kv_heads]` float32, a view, of a coded layout."""
        return self._scales[:, layer, 1]

    def block_bytes(self, block: int, first_layer: int, last_layer: int) -> memoryview:
        """Bytes of layers `[first_layer, last_layer)` of one block: writable, where they lie, in
        host memory; a copy of a device's.

        Order: layer, K then V, token, head, dim, and behind them the scales by head and token where
        there are any: the canonical wire order of a whole block.
        """
        with self._aside():
            part = self.data[block, first_layer:last_layer].reshape(-1).view(torch.uint8)
            return part.cpu().numpy().data.cast("B")

    @property
    def parts(self) -> tuple[KVPart, ...]:
        """See `KVMemory.parts`: one, of everything."""
        return (KVPart((0, self.layout.num_layers), (0, self.layout.num_kv_heads)),)

    def piece(
        self, block: int, layers: tuple[int, int], heads: tuple[int, int], *, write: bool = False
    ) -> memoryview | None:
        """See `KVMemory.piece`."""
        if heads != (0, self.layout.num_kv_heads) or self.data.device.type != "cpu":
            return None
        return self.block_bytes(block, *layers)

    def gather(
        self,
        block: int,
        offset: int,
        num_tokens: int,
        first_layer: int,
        last_layer: int,
        heads: tuple[int, int] | None = None,
    ) -> memoryview:
        """A copy, in wire order, of `num_tokens` tokens of one block from `offset` on.

        `heads`: first and last KV head, the last exclusive. None: all.
        """
        h0, h1 = heads or (0, self.layout.num_kv_heads)
        at = (
            block,
            slice(first_layer, last_layer),
            slice(None),
            slice(offset, offset + num_tokens),
            slice(h0, h1),
        )
        with self._aside():
            part = self._numbers[at].flatten(2)  # [layers, 2, everything]
            if self.layout.coded:
                codes = part.contiguous().view(torch.uint8)
                scales = self._scales[at].transpose(-1, -2).flatten(2).contiguous()
                part = torch.cat((codes, scales.view(torch.uint8)), -1)
            return part.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data.cast("B")

    def scatter(
        self,
        blocks: tuple[int, ...],
        first_token: int,
        first_layer: int,
        last_layer: int,
        payload: bytearray,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Write a payload in wire order to position `first_token` on, across block borders.

        Returns once it is there.
        """
        h0, h1 = heads or (0, self.layout.num_kv_heads)
        views = wire_views(payload, self.layout, last_layer - first_layer, h1 - h0)
        sources = [torch.as_tensor(view) for view in views]
        numbers = sources[0].view(self._numbers.dtype)
        scales = sources[1].view(torch.float32).squeeze(-1) if self.layout.coded else None
        num_tokens, done, page = numbers.shape[2], 0, self.block_tokens
        with self._aside():
            while done < num_tokens:
                offset = (first_token + done) % page
                run = min(page - offset, num_tokens - done)
                at = (
                    blocks[(first_token + done) // page],
                    slice(first_layer, last_layer),
                    slice(None),
                    slice(offset, offset + run),
                    slice(h0, h1),
                )
                self._numbers[at] = numbers[:, :, done : done + run]
                if scales is not None:
                    self._scales[at] = scales[:, :, done : done + run]
                done += run
        if self._stream is not None:
            self._stream.synchronize()

    def has_sound_scales(self, payload: memoryview, num_layers: int, num_heads: int) -> bool:
        """Whether every scale in a payload of a coded layout is one that codes can have."""
        return sound_scales(payload, self.layout, num_layers, num_heads)

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
