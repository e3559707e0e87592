"""Tests about short times, on machines that may stand still for seconds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any


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


def paced(first_s: float, *late: type[Exception]) -> Callable[[Any], Any]:
    """A test that takes `seconds` beside its fixtures, `at_some_pace`."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        async def run(**fixtures: Any) -> None:
            await at_some_pace(lambda pace: test(**fixtures, seconds=pace), first_s, *late)

        signature = inspect.signature(test)
        asked = [p for name, p in signature.parameters.items() if name != "seconds"]
        run.__signature__ = signature.replace(parameters=asked)
        return run

    return decorate


def again(times: int) -> Callable[[Any], Any]:
    """A test of promises in seconds, so many times at most: a machine that stands still for as long
    breaks them once, what is wrong every time. Its fixtures are made once."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        async def run(**fixtures: Any) -> None:
            for _ in range(times - 1):
                try:
                    return await test(**fixtures)
                except AssertionError:
                    pass
            await test(**fixtures)

        return run

    return decorate
