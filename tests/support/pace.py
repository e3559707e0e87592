"""Tests about short times, on machines that may stand still for seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def at_some_pace(
    check: Callable[[float], Awaitable[None]], first_s: float, *late: type[Exception]
) -> None:
    """`check(seconds)`, again with five times the time where it fails or raises one of `late`.

    What is wrong fails at every pace; a machine that stands still fails one that is too fast for
    it. Every call must begin afresh.
    """
    for seconds in (first_s, 5 * first_s):
        try:
            return await check(seconds)
        except (AssertionError, *late):
            pass
    await check(25 * first_s)
