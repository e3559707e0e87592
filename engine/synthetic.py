"""An engine without a model: every running request gets one token a tick.

As in the real one the most urgent run, and the others wait: with `max_running_requests` under way,
an urgent one takes the place of the least urgent at the next tick, which goes on later.

It prices everything around the engine (`tailrace bench overhead`): gateway, admission, link,
frames, text. It has no KV and cannot prefill for others.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig, SchedulerConfig
from engine.errors import Overloaded
from engine.outputs import EngineStats, Output, StepOutput
from engine.request import FinishReason, Request, RequestId, SampledToken
from engine.scheduling.scheduler import Reservation
from engine.text.output import TextStream
from engine.text.tokenizer import Tokenizer

_TOKENS = tuple(SampledToken(byte) for byte in b"the quick brown fox jumps over the lazy dog ")


@dataclass(slots=True, eq=False)
class _Running:
    request_id: RequestId
    order: tuple[int, int]
    """Priority, and running number for those of the same."""

    preemptible: bool
    text: TextStream
    max_tokens: int
    done: int = 0
    paused: bool = False
    active: bool = False
    """It has a slot."""


@dataclass(slots=True)
class SyntheticEngine:
    """`EngineLike` with a free-running tick of `tick_s` seconds."""

    config: EngineConfig
    tokenizer: Tokenizer
    max_context_tokens: int = 8192
    tick_s: float = 0.010
    _running: dict[RequestId, _Running] = field(default_factory=dict[RequestId, _Running])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _work: threading.Event = field(default_factory=threading.Event)
    _next_tick: float = 0.0
    _batch: list[_Running] = field(default_factory=list[_Running])
    """Those with a slot, as of the last tick."""

    _changed: bool = False
    """Somebody came or went since."""

    _arrivals: int = 0
    _preemptions: int = 0

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Apply new limits from the next tick on; who has a slot keeps it."""
        with self._lock:
            self.config = replace(self.config, scheduler=config)
            self._changed = True
        self._work.set()

    def submit(
        self, request: Request, *, remote: bool = False, hold_s: float | None = None
    ) -> Reservation | None:
        """Raises Overloaded when `max_waiting_requests` wait."""
        limits = self.config.scheduler
        with self._lock:
            if len(self._running) >= limits.max_running_requests + limits.max_waiting_requests:
                raise Overloaded(
                    f"{limits.max_running_requests} requests are running and "
                    f"{limits.max_waiting_requests} wait: try again",
                    code="full",
                )
            self._arrivals += 1
            self._changed = True
            self._running[request.request_id] = _Running(
                request.request_id,
                (request.priority, self._arrivals),
                request.preemptible,
                TextStream(self.tokenizer, request.params),
                request.params.max_tokens - len(request.output_ids),
            )
        self._work.set()
        return None

    def cached_tokens(self, request: Request) -> int:
        return 0

    def cancel(self, request_id: RequestId) -> bool:
        with self._lock:
            self._changed = True
            return self._running.pop(request_id, None) is not None

    def pause(self, request_id: RequestId) -> None:
        self._set_paused(request_id, True)

    def resume(self, request_id: RequestId) -> None:
        self._set_paused(request_id, False)
        self._work.set()

    def _set_paused(self, request_id: RequestId, paused: bool) -> None:
        with self._lock:
            running = self._running.get(request_id)
            if running is not None:
                running.paused = paused

    def step(self) -> StepOutput | None:
        """Sleep until the tick, then give everyone a token. None when nobody runs."""
        with self._lock:
            if self._is_idle():
                self._work.clear()
                return None
        now = time.monotonic()
        if self._next_tick <= now - self.tick_s:
            self._next_tick = now  # idle before: ticks missed then are not caught up
        self._next_tick += self.tick_s
        time.sleep(max(0.0, self._next_tick - now))
        outputs: list[Output] = []
        preempted: tuple[RequestId, ...] = ()
        with self._lock:
            if self._changed:
                preempted = self._form_batch()
            for running in self._batch:
                if running.paused:
                    continue
                token = _TOKENS[running.done % len(_TOKENS)]
                running.done += 1
                finish = FinishReason.LENGTH if running.done >= running.max_tokens else None
                text = None if finish else running.text.quick(token.token_id)
                if text is None:
                    text, stopped = running.text.push((token.token_id,), finish is not None)
                    finish = FinishReason.STOP if stopped else finish
                    if finish is not None:
                        del self._running[running.request_id]
                        self._changed = True
                outputs.append(Output(running.request_id, token, text, finish, 0))
        step = StepOutput(outputs, [], [], len(outputs), self.tick_s)
        step.preempted = preempted
        return step

    def _is_idle(self) -> bool:
        if self._changed and self._running:
            return False
        return not self._running or all(running.paused for running in self._batch)

    def _form_batch(self) -> tuple[RequestId, ...]:
        """Who gets a token from now on, until somebody comes or goes. Returns who lost a slot."""
        self._changed = False
        preempted: tuple[RequestId, ...] = ()
        if len(self._running) > self.config.scheduler.max_running_requests:
            preempted = self._share_out()
        else:
            for running in self._running.values():
                running.active = True
        self._batch = [running for running in self._running.values() if running.active]
        return preempted

    def _share_out(self) -> tuple[RequestId, ...]:
        """Give free slots to the most urgent that wait, then the slots of less urgent ones, which
        are returned."""
        everybody = sorted(self._running.items(), key=lambda item: item[1].order)
        waiting = [running for _, running in everybody if not running.active]
        active = [item for item in everybody if item[1].active]
        free = self.config.scheduler.max_running_requests - len(active)
        for running in waiting[: max(0, free)]:
            running.active = True
        victims = [item for item in reversed(active) if item[1].preemptible]
        preempted: list[RequestId] = []
        for running, (request_id, victim) in zip(waiting[max(0, free) :], victims, strict=False):
            if running.order[0] >= victim.order[0]:
                break
            running.active, victim.active = True, False
            preempted.append(request_id)
        self._preemptions += len(preempted)
        return tuple(preempted)

    def wait(self, timeout_s: float) -> bool:
        return self._work.wait(timeout_s)

    def wake(self) -> None:
        self._work.set()

    def stats(self) -> EngineStats:
        with self._lock:
            running = sum(each.active for each in self._running.values())
            waiting = len(self._running) - running
        return EngineStats(
            num_running=running,
            num_waiting=waiting,
            num_waiting_remote=0,
            num_free_blocks=0,
            num_held_blocks=0,
            num_blocks=0,
            num_leases=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            num_preemptions=self._preemptions,
            num_leases_expired=0,
        )

    def close(self) -> None:
        pass
