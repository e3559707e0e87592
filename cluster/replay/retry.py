"""When to try again, and after how long: what OpenAI's Python client does, decided apart."""

from __future__ import annotations

import email.utils
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0
LONGEST_ASKED_S = 120.0
"""A server that asks for more is not tried again at all."""

_RETRIED = (408, 409, 429)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Of openai-python (`_base_client.py`, version 3): 408, 409, 429 and 5xx, broken connections
    and timeouts; the server's own wait where it names one, else a backoff that doubles."""

    max_retries: int = 0

    def delay_s(
        self,
        taken: int,
        status: int | None,
        headers: Mapping[str, str],
        *,
        now_unix_s: float,
        rng: random.Random,
    ) -> float | None:
        """Seconds until the next attempt, None where there is none.

        `taken` counts the retries so far; `status` is None for a connection that broke before an
        answer began; names of `headers` are lower case.
        """
        if taken >= self.max_retries:
            return None
        asked_s = _asked(headers, now_unix_s)
        if status is not None and not _retried(status, headers, asked_s):
            return None
        if asked_s is not None and 0 < asked_s <= LONGEST_ASKED_S:
            return asked_s
        backoff_s = min(FIRST_DELAY_S * 2.0 ** min(taken, 1000), LONGEST_DELAY_S)
        return backoff_s * (1 - 0.25 * rng.random())


def _retried(status: int, headers: Mapping[str, str], asked_s: float | None) -> bool:
    if asked_s is not None and asked_s > LONGEST_ASKED_S:
        return False
    told = headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    return status in _RETRIED or status >= 500


def _asked(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """The wait in `retry-after-ms` or `retry-after` (seconds or a date), None without one."""
    for name, divisor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / divisor
        except (KeyError, ValueError):
            continue
        if math.isinf(seconds) and "inf" not in headers[name].lower():
            return LONGEST_ASKED_S + 1  # a number too large for a float is a wait all the same
        return seconds if math.isfinite(seconds) else None
    try:
        parsed = email.utils.parsedate_tz(headers.get("retry-after"))
        return None if parsed is None else email.utils.mktime_tz(parsed) - now_unix_s
    except (TypeError, ValueError, OverflowError):
        return None
