"""Is a refusal one that a client can act on?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STATUSES = (429, 503)


def fault(status: int | None, headers: Mapping[str, str], body: str) -> str | None:
    """What is wrong with it, None where nothing is. `headers` in small letters.

    It must be 429 or 503 with an error as OpenAI writes it, and either say when to come back,
    in seconds and in milliseconds that agree, or that this is no use.
    """
    if status not in STATUSES:
        return f"status {status}"
    try:
        error: Any = json.loads(body)["error"]
        missing = [name for name in ("message", "type", "code") if not error[name]]
    except (ValueError, KeyError, TypeError):
        return "the body is not an error of the API"
    if missing:
        return f"the error has no {missing[0]}"
    if "x-request-id" not in headers:
        return "no x-request-id"
    if headers.get("x-should-retry") == "false":
        return None
    try:
        seconds, millis = int(headers["retry-after"]), int(headers["retry-after-ms"])
    except KeyError as absent:
        return f"no {absent.args[0]}"
    except ValueError:
        return "retry-after is not a number"
    if seconds < 1 or not 1000 * (seconds - 1) <= millis <= 1000 * seconds:
        return f"retry-after {seconds} s and {millis} ms do not agree"
    return None
