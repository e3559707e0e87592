"""Tasks that run beside a process's work for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start `work`, which should never end. If it raises, the log says so at once.

    Keep the task and cancel it in the end.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error(
            "%s ended: what it looked after is left alone",
            task.get_name(),
            exc_info=task.exception(),
        )
