"""Which bytes an agent reads of another's blocks, where two replicas cut a model differently.

```
 prefill   heads 0-1     2-3          decode    heads 0-3
 layers 0-5  ┌───────┬───────┐        layers 0-2  ┌───────┐   rank 0 reads two pieces, one of each
             │  p0   │  p1   │   ──►              │  d0   │   rank of prefill, and so does rank 1
             │       │       │        layers 3-5  ├───────┤
             └───────┴───────┘                    │  d1   │
                                                  └───────┘
```

A block is token-major: `[layers, K and V, token, head, dim]`. A piece of all heads that both sides
hold there is one run of bytes. Of some of the heads it is a run for each token, K and V, and layer,
and one for their scales. In 16384 runs of 512 bytes a byte takes ten (TCP) to forty times (kernel
copies) as long as in one run of host memory: equal head ranges are the way out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine.errors import TransferError
from engine.models.model import SCALE_BYTES, KVPart
from engine.transfer.checksum import checksum

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.models.model import KVLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """What one reader reads of one owner."""

    reader: int
    owner: int
    part: KVPart
    """In the model's own numbering."""


def meeting(one: KVPart, other: KVPart) -> KVPart | None:
    """What both hold; None where that is nothing."""
    l0, l1 = max(one.layers[0], other.layers[0]), min(one.layers[1], other.layers[1])
    h0, h1 = max(one.heads[0], other.heads[0]), min(one.heads[1], other.heads[1])
    return KVPart((l0, l1), (h0, h1)) if l0 < l1 and h0 < h1 else None


def pieces(readers: Sequence[KVPart], owners: Sequence[KVPart]) -> list[Piece]:
    """Every piece, by reader and then by owner: both sides number them so.

    `owners` hold each layer and head once, copies left out. Readers may hold copies, and each reads
    its own.
    """
    return [
        Piece(r, o, part)
        for r, reader in enumerate(readers)
        for o, owner in enumerate(owners)
        if (part := meeting(reader, owner)) is not None
    ]


def require_whole(readers: Sequence[KVPart], owners: Sequence[KVPart]) -> list[Piece]:
    """`pieces`. Raises TransferError unless they are all that each reader holds, each once."""
    found = pieces(readers, owners)
    for number, reader in enumerate(readers):
        parts = [piece.part for piece in found if piece.reader == number]
        twice = any(
            meeting(part, other) is not None
            for i, part in enumerate(parts)
            for other in parts[i + 1 :]
        )
        if twice or sum(map(_cells, parts)) != _cells(reader):
            raise TransferError(
                f"layers {reader.layers} and KV heads {reader.heads} are read here, and the other "
                f"side offers {[(p.layers, p.heads) for p in owners]}: not all of them, or some "
                "twice",
                stage="offer",
            )
    return found


def block_runs(
    held: KVPart, piece: KVPart, layout: KVLayout, block_tokens: int, *, whole: bool
) -> NDArray[np.int64]:
    """`[runs, 2]`: offset in a block and length of each run of bytes that make up `piece`, in wire
    order, in a pool that holds `held`.

    layout: its dtype and head size count. whole: as one run, of all heads that are held.
    """
    import numpy as np

    heads = held.heads[1] - held.heads[0]
    half = block_tokens * heads * layout.row_bytes  # keys or values of one layer
    first = 2 * (piece.layers[0] - held.layers[0])
    count = 2 * (piece.layers[1] - piece.layers[0])
    if whole:
        assert piece.heads == held.heads, "some heads are no single run"
        return np.array([[first * half, count * half]], dtype=np.int64)
    width = layout.head_dim * layout.itemsize
    skipped, taken = piece.heads[0] - held.heads[0], piece.heads[1] - piece.heads[0]
    offsets = np.arange(block_tokens, dtype=np.int64) * heads * width + skipped * width
    lengths = np.full(block_tokens, taken * width, dtype=np.int64)
    if layout.coded:
        behind = block_tokens * heads * width + skipped * block_tokens * SCALE_BYTES
        offsets = np.append(offsets, behind)
        lengths = np.append(lengths, taken * block_tokens * SCALE_BYTES)
    runs = np.empty((count, len(offsets), 2), dtype=np.int64)
    halves = np.arange(first, first + count, dtype=np.int64) * half
    runs[:, :, 0] = halves[:, None] + offsets
    runs[:, :, 1] = lengths
    return np.reshape(runs, (-1, 2))


def piece_bytes(piece: KVPart, layout: KVLayout, block_tokens: int) -> int:
    """Of one block."""
    return 2 * _cells(piece) * block_tokens * layout.row_bytes


def combined(sums: Sequence[int | None]) -> int | None:
    """One checksum of a block from those of its pieces, in the order of `pieces`. None where one is
    not known."""
    if len(sums) == 1:
        return sums[0]
    known = [found for found in sums if found is not None]
    return checksum(struct.pack(f"<{len(sums)}Q", *known)) if len(known) == len(sums) else None


def parts_to_wire(parts: Sequence[KVPart]) -> list[list[int]]:
    return [[*part.layers, *part.heads] for part in parts]


def parts_from_wire(wire: Any) -> tuple[KVPart, ...]:
    """Inverse of `parts_to_wire`. Raises TransferError for anything that it does not write."""
    parts: list[KVPart] = []
    for item in cast("list[Any]", wire) if isinstance(wire, list) else [wire]:
        match item:
            case [int(l0), int(l1), int(h0), int(h1)] if 0 <= l0 < l1 and 0 <= h0 < h1:
                parts.append(KVPart((l0, l1), (h0, h1)))
            case _:
                raise TransferError(f"malformed part of a pool: {item!r}"[:200], stage="offer")
    return tuple(parts)


def _cells(part: KVPart) -> int:
    return (part.layers[1] - part.layers[0]) * (part.heads[1] - part.heads[0])
