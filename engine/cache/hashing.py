"""Hash chain over full blocks of tokens. Equal hashes mean equal KV, on any node.

    root = H("root", fingerprint, salt)
    h_0  = H("block", root, tokens of block 0)
    h_i  = H("block", h_{i-1}, tokens of block i)

Cryptographic on purpose: a predictable hash lets one tenant forge another's prefix. Each field of
the root carries its name and length, so a value of one domain can never pass for another's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 32

_ROOT_TAG = b"tailrace/root/1\0"
_BLOCK_TAG = b"tailrace/block/1\0"


def root_hash(fingerprint: str, salt: str) -> bytes:
    """Start of every chain over KV of one model inside one isolation domain."""
    digest = hashlib.sha256(_ROOT_TAG)
    for name, value in ((b"fingerprint", fingerprint.encode()), (b"salt", salt.encode())):
        digest.update(struct.pack("<B", len(name)) + name)
        digest.update(struct.pack("<Q", len(value)) + value)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block that follows `parent` (another block's hash, or the root)."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(_BLOCK_TAG + parent + tokens).digest()


def hash_chain(root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, first block first."""
    hashes: list[bytes] = []
    parent = root
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        parent = block_hash(parent, token_ids[end - block_tokens : end])
        hashes.append(parent)
    return hashes
