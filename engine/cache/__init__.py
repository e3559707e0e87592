"""Accounting for KV blocks: tables, prefix hashes, eviction, leases."""

from engine.cache.blocks import BlockManager, Cleared, Removed, Stored
from engine.cache.hashing import block_hash, hash_chain, root_hash

__all__ = [
    "BlockManager",
    "Cleared",
    "Removed",
    "Stored",
    "block_hash",
    "hash_chain",
    "root_hash",
]
