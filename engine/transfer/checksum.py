"""What tells a payload that was damaged on its way."""

from __future__ import annotations

import xxhash


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """XXH3-64 (Collet, https://xxhash.com), 64 bits.

    Both ends compute it while a first token waits, so its speed counts: over 50 GB/s here, where
    zlib's CRC-32 has 4. Neither keeps an attacker out; links are authenticated for that.
    """
    return xxhash.xxh3_64_intdigest(payload)
