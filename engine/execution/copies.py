"""Copies within a KV pool that a step asks for before it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cache.blocks import BlockCopy
    from engine.execution.pool import KVPool


def make_copies(pool: KVPool, copies: Sequence[BlockCopy]) -> None:
    """Give each target what its source holds.

    Whole blocks, as they lie in one run of bytes whatever they are coded in: what is behind the
    wanted tokens is not read before the target's own are written there.
    """
    for copy in copies:
        pool.data[copy.target].copy_(pool.data[copy.source])
