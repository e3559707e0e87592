"""The order in which KV travels: what a payload holds, as views into its bytes.

A payload is some layers of some tokens and heads: layer, K then V, and of those

    numbers   token, head, dim
    codes     (token, head, dim), then their float32 scales (head, token)

which is how a whole block lies in a pool. Neither side's page size or tensor parallelism shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.models.model import SCALE_BYTES

if TYPE_CHECKING:
    from engine.models.model import KVLayout


def wire_views(
    payload: memoryview | bytes | bytearray | NDArray[np.uint8],
    layout: KVLayout,
    num_layers: int,
    num_heads: int,
) -> tuple[NDArray[np.uint8], ...]:
    """Views `[layers, 2, tokens, heads, bytes]` that share the payload's memory.

    One of the numbers; or two, of the codes and of their scales. Who cuts or joins payloads by
    layer, token or head does it to each of them alike. Writable where the payload is. Raises
    ValueError for a payload that is not a whole number of tokens.
    """
    runs, num_tokens = _runs(payload, layout, num_layers, num_heads)
    width = layout.head_dim * layout.itemsize
    split = num_tokens * num_heads * width
    numbers = np.reshape(runs[:, :, :split], (num_layers, 2, num_tokens, num_heads, width))
    if not layout.coded:
        return (numbers,)
    behind = np.reshape(runs[:, :, split:], (num_layers, 2, num_heads, num_tokens, SCALE_BYTES))
    return numbers, np.swapaxes(behind, 2, 3)


def sound_scales(
    payload: memoryview | bytes | bytearray, layout: KVLayout, num_layers: int, num_heads: int
) -> bool:
    """Whether every scale in a payload of a coded layout is one that codes can have.

    Reads the scales alone, in the order in which they lie: an event loop asks.
    """
    _, num_tokens = _runs(payload, layout, num_layers, num_heads)
    # Codes are a whole number of scales long: see `KVPool`.
    flat: NDArray[np.float32] = np.frombuffer(payload, dtype=np.float32)
    found: NDArray[np.float32] = np.reshape(flat, (num_layers, 2, -1))[
        :, :, -num_tokens * num_heads :
    ]
    # NaN and infinity fail one or the other.
    return bool(((found >= 0) & (found < np.inf)).all())


def _runs(
    payload: memoryview | bytes | bytearray | NDArray[np.uint8],
    layout: KVLayout,
    num_layers: int,
    num_heads: int,
) -> tuple[NDArray[np.uint8], int]:
    """The payload as `[layers, 2, bytes]`, and how many tokens it holds."""
    flat: NDArray[np.uint8] = np.frombuffer(payload, dtype=np.uint8)
    runs = np.reshape(flat, (num_layers, 2, -1))
    num_tokens, rest = divmod(runs.shape[2], num_heads * layout.row_bytes)
    if rest:
        raise ValueError(f"{rest} bytes behind {num_tokens} tokens of {num_heads} heads")
    return runs, num_tokens
