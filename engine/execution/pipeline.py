"""Passes one after another on a thread of their own, the next one ready before the last has ended.

```
planner's thread    plan 1 ──┐          text 0, plan 2 ──┐     text 1, plan 3 ──┐
this thread           pass 0 └► pass 1 ──────────────────┴► pass 2 ─────────────┴► pass 3
```

Between two passes lies only what needs the tokens of the first: sampling them, and writing them
where the inputs of the second have left room.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.execution.executor import OverlappingExecutor
from engine.scheduling.plan import StepPlan, StepResult

_CLOSE_S = 10.0
"""For the pass under way to end. A thread that is stuck for longer dies with the process."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Landed:
    """A pass that has ended: with a result, or with the error that it raised."""

    plan: StepPlan
    result: StepResult | None
    error: Exception | None
    took_s: float
    """From its begin to its end, on this thread."""


class Pipeline(Generic[P]):
    """Drives one executor. Called from one thread, the planner's; `close` from any.

    landed: called on the pipeline's thread whenever a pass has ended. A pass that raises stops
    those behind it until `resume`.
    """

    def __init__(self, executor: OverlappingExecutor[P], landed: Callable[[], None]) -> None:
        self._executor = executor
        self._told = landed
        self._changed = threading.Condition()
        self._begun: tuple[StepPlan, P] | None = None
        self._next: tuple[StepPlan, P] | None = None
        self._runs = False
        self._failed = False
        self._closing = False
        self._landed: deque[Landed] = deque()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or has ended without being taken."""
        with self._changed:
            return not self._runs and self._next is None and not self._landed

    def put(self, plan: StepPlan) -> None:
        """Begin a pass once those before it have ended. At most one may wait."""
        prepared = self._executor.prepare(plan)
        with self._changed:
            assert self._next is None, "a pass waits already"
            assert not self._closing, "the pipeline is closed"
            self._next = plan, prepared
            if not self._runs and not self._failed:
                self._begin()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="passes", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take_back(self) -> StepPlan | None:
        """The plan that waits, which does not run then. None: there is none any more."""
        with self._changed:
            waiting, self._next = self._next, None
        return None if waiting is None else waiting[0]

    def take_landed(self) -> Landed | None:
        """The oldest pass that has ended and was not taken yet."""
        with self._changed:
            return self._landed.popleft() if self._landed else None

    def resume(self) -> None:
        """Go on after a pass that raised."""
        with self._changed:
            self._failed = False

    def close(self) -> None:
        """Let the pass under way end, and begin no other."""
        with self._changed:
            self._closing = True
            self._next = None
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _begin(self) -> None:
        """From here on the pass that waits cannot be taken back."""
        self._begun, self._next = self._next, None
        self._runs = self._begun is not None

    def _run(self) -> None:
        last = StepResult({})
        while (job := self._take()) is not None:
            plan, prepared = job
            began = time.monotonic()
            result, error = None, None
            try:
                result = last = self._executor.run(prepared, last)
            except Exception as raised:  # the planner's to judge
                error = raised
            del job, prepared
            ended = Landed(plan, result, error, time.monotonic() - began)
            with self._changed:
                self._landed.append(ended)
                self._runs = False
                self._failed = error is not None
                if not self._failed:
                    self._begin()
            self._told()

    def _take(self) -> tuple[StepPlan, P] | None:
        """Wait for a pass to run. None: the end."""
        with self._changed:
            while self._begun is None and not self._closing:
                self._changed.wait()
            job, self._begun = self._begun, None
            return None if self._closing else job
