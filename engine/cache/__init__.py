"""Accounting for KV blocks: tables, prefix hashes, eviction, leases."""

from engine.cache.blocks import BlockCopy, BlockManager, Cleared, Removed, Stored
from engine.cache.hashing import block_hash, hash_chain, root_hash

__all__ = [
    "BlockCopy",
    "BlockManager",
    "Cleared",
    "Removed",
    "Stored",
    "block_hash",
    "hash_chain",
    "root_hash",
]
