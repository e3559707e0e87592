"""The engine's own thread: step while there is work, sleep when there is none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine.outputs import StepOutput
from engine.protocol import EngineLike

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0


class EngineRunner:
    """Drives one engine.

    `deliver` gets each step's output on the engine's thread; an asyncio caller passes something
    that makes one `call_soon_threadsafe` of it. A step that raises ends the thread: `on_failure` is
    called once and `failure` is set, since the state of a half-run step cannot be trusted.
    """

    def __init__(
        self,
        engine: EngineLike,
        deliver: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._deliver = deliver
        self._on_failure = on_failure
        self._stopping = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def step_s(self) -> float:
        """How long the running step has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the running step. Idempotent."""
        self._stopping = True
        self.engine.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step_began = time.monotonic()
                output = self.engine.step()
                self._step_began = None
                if output is None:
                    self.engine.wait(_IDLE_WAIT_S)
                else:
                    self._deliver(output)
        except Exception as error:
            logger.exception("the engine's step failed: this replica stops serving")
            self.failure = error
            self._on_failure(error)
