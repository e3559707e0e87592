"""Names and seeds for requests. They have to differ, not to be secret, so they come from a
generator that the system seeded once: asking the system each time is a call into the kernel."""

from __future__ import annotations

import os
import random
import secrets

_random = random.Random(secrets.randbits(256))
os.register_at_fork(after_in_child=lambda: _random.seed(secrets.randbits(256)))


def draw_name() -> str:
    """32 hexadecimal digits."""
    return f"{_random.getrandbits(128):032x}"


def draw_seed() -> int:
    """Unsigned 64 bit."""
    return _random.getrandbits(64)
