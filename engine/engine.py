"""One model's engine: requests in, text out, a step at a time.

```
              submit / cancel / kv_arrived ...              (any thread, under the lock)
                         │
   step():   plan ──► execute ──► commit ──► text           (the engine's own thread)
            (lock)   (no lock)    (lock)
```

Decisions live in the scheduler; this class joins it to an executor and turns tokens into text. The
lock is free while the forward pass runs, so that a request can be added, reserved or cancelled in
microseconds on a busy replica.

With overlap passes run on a thread of their own (`engine.execution.pipeline`). A step then plans
the next one, waits for the pass under way, and commits that while the next runs. A plan that waits
for its pass is made again when something comes up, so that nobody waits a step longer for it.

Where stages compute one after the other, a step keeps a plan a stage under way, over requests of
their own, and commits the oldest.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from engine.cache.blocks import BlockManager
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError, RequestError
from engine.execution.executor import Executor, OverlappingExecutor, StagedExecutor
from engine.execution.pipeline import Landed, Pipeline
from engine.models.model import KVLayout
from engine.outputs import Computed, EngineStats, Output, StepOutput
from engine.request import FinishReason, Request, RequestId, SampledToken
from engine.sampling.sampler import UnusableLogits, validate_params
from engine.scheduling.plan import StepPlan
from engine.scheduling.scheduler import Committed, Reservation, Scheduler
from engine.text.output import TextStream
from engine.text.tokenizer import Tokenizer
from engine.transfer.memory import KVMemory

logger = logging.getLogger(__name__)

_PLANNING_SHARE = 0.2
"""Of this thread's time, at most, goes into making a plan that waits again."""


class Engine:
    """See the module. Construct with `engine.build.build_engine`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        executor: Executor,
        pool: KVMemory,
        tokenizer: Tokenizer,
        layout: KVLayout,
        vocab_size: int,
        max_context_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for an overlap that the executor cannot do."""
        self.config = config
        self.tokenizer = tokenizer
        self.layout = layout
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.blocks = blocks
        self.pool = pool
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._texts: dict[RequestId, TextStream] = {}
        self._held: set[RequestId] = set()
        self._reservations: list[Reservation] = []
        self._leases_expired = 0
        self._pipeline: Pipeline[Any] | None = None
        if isinstance(executor, OverlappingExecutor):
            passes = cast("OverlappingExecutor[Any]", executor)
            self._pipeline = Pipeline(passes, self._work.set)
            weakref.finalize(self, self._pipeline.close)
        self._staged: StagedExecutor | None = None
        if isinstance(executor, StagedExecutor) and executor.depth > 1:
            self._staged = executor
        self._sent: deque[tuple[StepPlan, float]] = deque()
        """Under way in stages, oldest first, each with when it was planned."""

        self._landed_at = float("-inf")  # the last of those that ended in stages
        self._draining = False
        self._overlaps = self._overlapping(config.scheduler)
        self._scheduler.num_stages = self._num_stages
        self._changed = False  # something that a plan depends on, since the last one

    def submit(
        self, request: Request, *, remote: bool = False, hold_s: float | None = None
    ) -> Reservation | None:
        """Accept a request. Its outputs come from later steps under its id.

        `remote`: its prompt's KV will be imported. Returns the reserved blocks if there was room at
        once; else the reservation comes with a later step. Then call `kv_arrived` or `kv_failed`.
        `hold_s`: prefill role. It ends after its first token, its prompt's blocks stay leased under
        its id for `hold_s` seconds (see `renew`, `release`).

        Raises `RequestError` if it can never run, `Overloaded` if there is no room to wait.
        """
        self.validate(request)
        now = self._clock()
        with self._lock:
            self._scheduler.add(
                request,
                now,
                remote=remote,
                hold_until=None if hold_s is None else now + hold_s,
            )
            if hold_s is None:
                text = TextStream(self.tokenizer, request.params)
                for token_id in request.output_ids:
                    # Said elsewhere already: only its effect on what is held back counts here.
                    text.push((token_id,), finished=False)
                self._texts[request.request_id] = text
            else:
                self._held.add(request.request_id)
            reservation = self._reserved(request.request_id) if remote else None
        self.wake()
        return reservation

    @property
    def overlaps(self) -> bool:
        """Steps are planned while others are computed."""
        return self._overlaps

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Apply new limits from the next plan on; what runs already keeps its place.

        Raises ConfigError, and changes nothing, for an overlap that this engine cannot do.
        """
        overlaps = self._overlapping(config)
        with self._lock:
            self._scheduler.config = config
            self._overlaps = overlaps
            self._scheduler.num_stages = self._num_stages
        self.wake()

    def validate(self, request: Request) -> None:
        """Raise `RequestError` for token ids that the model does not have."""
        vocab = self.vocab_size
        worst = max(request.token_ids)
        if worst >= vocab or min(request.token_ids) < 0:
            raise RequestError(
                f"token id {worst if worst >= vocab else min(request.token_ids)} is not in the "
                f"vocabulary of {vocab}",
                param="prompt",
            )
        validate_params(request.params, vocab)
        limit, asked = self.config.max_output_tokens, request.params.max_tokens
        if limit is not None and asked > limit:
            raise RequestError(
                f"max_tokens={asked}: this model gives at most {limit}", param="max_tokens"
            )

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request whose KV is in the prefix cache now."""
        with self._lock:
            return self.blocks.match(request.token_ids, request.salt)

    def kv_arrived(self, request_id: RequestId, first: SampledToken) -> Output | None:
        """Every known token's KV is in the reserved blocks; `first` was sampled from them.

        Returns what to emit, or None if the request ended meanwhile.
        """
        with self._lock:
            committed = self._scheduler.kv_arrived(request_id, first, self._clock())
            output = None if committed is None else self._say(committed)
        self.wake()
        return output

    def kv_failed(self, request_id: RequestId) -> None:
        """Nothing usable arrived: compute the prompt here, from the local cached prefix on."""
        with self._lock:
            self._scheduler.kv_failed(request_id)
        self.wake()

    def import_blocks(self, request_id: RequestId) -> tuple[int, ...]:
        """Blocks that a remote request waits for to be filled; empty when it waits for none."""
        with self._lock:
            return self._scheduler.import_blocks(request_id)

    def set_aside(self, request_id: RequestId, lease_id: str) -> tuple[int, ...]:
        """The import of this request failed, and what it began may still write into its blocks:
        they are kept until `release(lease_id)`, and the request gets others.

        Returns its blocks as they are now; empty when it has none to import into any more: it ended
        meanwhile, or waits for blocks and is computed here.
        """
        with self._lock:
            blocks = self._scheduler.set_aside(request_id, lease_id, self._clock())
        self.wake()
        return blocks

    def cancel(self, request_id: RequestId) -> bool:
        """End a request wherever it is. Its blocks are free after the last pass that computes it:
        with overlap or stages more than one may be under way."""
        with self._lock:
            self._texts.pop(request_id, None)
            self._held.discard(request_id)
            known = self._scheduler.cancel(request_id)
        self.wake()
        return known

    def pause(self, request_id: RequestId) -> None:
        """Stop computing a request whose reader is slow; it keeps its place and its blocks."""
        with self._lock:
            self._scheduler.pause(request_id)

    def resume(self, request_id: RequestId) -> None:
        with self._lock:
            self._scheduler.resume(request_id)
        self.wake()

    def renew(self, request_id: RequestId, hold_s: float) -> None:
        """Extend the lease on a held request's blocks."""
        with self._lock:
            self._scheduler.renew(request_id, self._clock() + hold_s)

    def release(self, request_id: RequestId) -> None:
        """Give back the lease of a held request. Unknown ids are ignored: leases expire."""
        with self._lock:
            self.blocks.release(request_id)
        self.wake()  # somebody may be waiting for these blocks

    def unfinished(self, request_ids: Iterable[RequestId]) -> set[RequestId]:
        """Those that wait, run or are imported here."""
        with self._lock:
            return {request_id for request_id in request_ids if request_id in self._scheduler}

    def expire_leases(self) -> list[RequestId]:
        """Free what was leased past its deadline. The ids are those whose holder went silent."""
        with self._lock:
            expired = self.blocks.expire(self._clock())
            self._leases_expired += len(expired)
        if expired:
            self.wake()
        return expired

    def step(self) -> StepOutput | None:
        """Plan, execute and commit one forward pass. None when there is nothing to compute.

        With overlap the pass that ends in this call may have begun in the last one, and another may
        be under way when it returns.
        """
        if self._pipeline is not None and (self._overlaps or not self._pipeline.idle):
            return self._overlapped_step(self._pipeline)
        if self._staged is not None:
            return self._staged_step(self._staged)
        started = self._clock()
        plan = self._plan(started)
        if plan is None:
            return self._reserved_only()
        try:
            result = self._executor.execute(plan)
        except UnusableLogits as error:
            with self._lock:
                self._scheduler.abandon(plan)
                return self._drop_faulty(error)
        with self._lock:
            out = self._commit(plan, self._scheduler.commit(plan, result, self._clock()))
        out.num_tokens = plan.num_tokens
        out.duration_s = self._clock() - started
        return out

    def _staged_step(self, executor: StagedExecutor) -> StepOutput | None:
        while len(self._sent) < self._num_stages and not self._draining:
            now = self._clock()
            plan = self._plan(now)
            if plan is None:
                break
            executor.submit(plan)
            self._sent.append((plan, now))
        if not self._sent:
            return self._reserved_only()
        plan, started = self._sent.popleft()
        started = max(started, self._landed_at)
        try:
            result = executor.collect()
        except UnusableLogits as error:
            self._landed_at = self._clock()
            self._draining = bool(self._sent)
            with self._lock:
                self._scheduler.abandon(plan, sampling=True)
                return self._drop_faulty(error)
        self._draining = self._draining and bool(self._sent)
        with self._lock:
            out = self._commit(plan, self._scheduler.commit(plan, result, self._clock()))
        out.num_tokens = plan.num_tokens
        self._landed_at = self._clock()
        out.duration_s = self._landed_at - started
        return out

    @property
    def _num_stages(self) -> int:
        """Plans to keep under way."""
        return self._staged.depth if self._staged is not None and self._overlaps else 1

    def _overlapped_step(self, pipeline: Pipeline[Any]) -> StepOutput | None:
        if pipeline.idle:
            plan = self._plan(self._clock())
            if plan is None:
                return self._reserved_only()
            pipeline.put(plan)
        landed = self._wait_landed(pipeline)
        plan = landed.plan
        if landed.error is not None:
            if not isinstance(landed.error, UnusableLogits):
                raise landed.error
            waiting = pipeline.take_back()
            with self._lock:
                if waiting is not None:
                    self._scheduler.recall(waiting)
                self._scheduler.abandon(plan)
                out = self._drop_faulty(landed.error)
            pipeline.resume()
            return out
        assert landed.result is not None
        with self._lock:
            committed = self._scheduler.commit(
                plan, landed.result, self._clock(), took_s=landed.took_s
            )
            out = self._commit(plan, committed)
        out.num_tokens = plan.num_tokens
        out.duration_s = landed.took_s
        return out

    def _wait_landed(self, pipeline: Pipeline[Any]) -> Landed:
        """Keep a plan ready behind the pass under way until that has ended."""
        planned_s, not_before = 0.0, 0.0
        self._changed = True  # the last commit, at least
        while True:
            self._work.clear()
            landed = pipeline.take_landed()
            if landed is not None:
                return landed
            now = self._clock()
            if self._changed and self._overlaps and now >= not_before:
                self._changed = False
                self._plan_ahead(pipeline)
                planned_s = self._clock() - now
                not_before = now + planned_s / _PLANNING_SHARE
            elif self._changed and self._overlaps:
                self._work.wait(not_before - now)
            else:
                self._work.wait()

    def _plan_ahead(self, pipeline: Pipeline[Any]) -> None:
        """Put a plan behind the pass under way, in the place of one that waits there."""
        waiting = pipeline.take_back()
        with self._lock:
            if waiting is not None:
                self._scheduler.recall(waiting)
            elif self._scheduler.num_in_flight > 1:
                return  # it has begun; the pass before it has landed
            plan = self._scheduler.plan(self._clock())
            self._collect_reservations()
        if plan is not None:
            pipeline.put(plan)

    def wait(self, timeout_s: float) -> bool:
        """Block until there may be work. False on timeout."""
        return self._work.wait(timeout_s)

    def wake(self) -> None:
        self._changed = True
        self._work.set()

    def stats(self) -> EngineStats:
        with self._lock:
            scheduler, blocks = self._scheduler, self.blocks
            return EngineStats(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_remote=scheduler.num_waiting_remote,
                num_free_blocks=blocks.num_free_blocks,
                num_held_blocks=blocks.num_held_blocks,
                num_blocks=blocks.config.num_blocks - 1,
                num_leases=blocks.num_leases,
                prefix_query_tokens=blocks.num_query_tokens,
                prefix_hit_tokens=blocks.num_hit_tokens,
                num_preemptions=scheduler.num_preemptions,
                num_leases_expired=self._leases_expired,
                num_steps=scheduler.num_steps,
                num_steps_ahead=scheduler.num_steps_ahead,
                num_discarded_rows=scheduler.num_discarded_rows,
            )

    def check(self) -> None:
        """Assert the invariants of scheduler and cache."""
        with self._lock:
            self._scheduler.check()
            self.blocks.check()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._executor.close()

    def _overlapping(self, config: SchedulerConfig) -> bool:
        if self._staged is not None:
            return True  # else stages would wait for each other
        if config.overlap and self._pipeline is None:
            raise ConfigError(
                "overlap=True: ranks of one stage plan each step after the last one: leave it out, "
                "or let the replica be one rank"
            )
        return config.overlap

    def _plan(self, now: float) -> StepPlan | None:
        """A plan behind nothing. None: there is nothing to compute until somebody sets `_work`."""
        with self._lock:
            plan = self._scheduler.plan(now)
            self._collect_reservations()
            if plan is None:
                self._work.clear()
        return plan

    def _reserved_only(self) -> StepOutput | None:
        """What there is to say without a pass."""
        with self._lock:
            return self._new_output() if self._reservations else None

    def _new_output(self) -> StepOutput:
        """With what became known since the last one."""
        out = StepOutput(reservations=self._reservations, aged=self._scheduler.take_aged())
        self._reservations = []
        return out

    def _commit(self, plan: StepPlan, committed: list[Committed]) -> StepOutput:
        out = self._new_output()
        if self._held:
            out.computed = [
                Computed(chunk.request_id, chunk.first_token, chunk.end, chunk.blocks)
                for chunk in plan.chunks
                if chunk.request_id in self._held
            ]
        if plan.num_tokens > len(plan.chunks):  # more than a row each
            out.prompts = [
                (chunk.request_id, len(chunk.token_ids))
                for chunk in plan.chunks
                if len(chunk.token_ids) > 1 or not chunk.sample
            ]
        out.preempted = plan.preempted
        for entry in committed:
            output = self._say(entry)
            if output is not None:
                out.outputs.append(output)
        return out

    def _say(self, entry: Committed) -> Output | None:
        request_id, finish = entry.request_id, entry.finish
        if request_id in self._held:
            if finish is not None:
                self._held.discard(request_id)
            return Output(request_id, entry.token, "", finish, entry.num_cached_tokens)
        stream = self._texts.get(request_id)
        if stream is None:
            return None
        token_id = entry.token.token_id
        text = stream.quick(token_id) if finish is None else None
        if text is None:
            text, stopped = stream.push((token_id,), finished=finish is not None)
            if stopped and finish is None:
                self._scheduler.finish(request_id, FinishReason.STOP)
            if stopped:
                finish = FinishReason.STOP
            if finish is not None:
                del self._texts[request_id]
        return Output(request_id, entry.token, text, finish, entry.num_cached_tokens)

    def _drop_faulty(self, error: UnusableLogits) -> StepOutput:
        """End the one request whose logits hold no token; the others are planned again."""
        logger.error("request %s ends: %s", error.request_id, error)
        known = self._scheduler.finish(error.request_id, FinishReason.ERROR)
        self._texts.pop(error.request_id, None)
        self._held.discard(error.request_id)
        out = self._new_output()
        if known:  # else it ended, and was computed for nothing
            out.outputs.append(Output(error.request_id, None, "", FinishReason.ERROR, 0))
        return out

    def kv_bytes(self, token_ids: tuple[int, ...], salt: str) -> list[bytes]:
        """A copy of the KV of each whole block of these tokens that is cached here, in order.

        For `tailrace verify`: what was sent must equal what was computed, byte for byte.
        """
        with self._lock:
            blocks = self.blocks.cached_blocks(token_ids, salt)
            layers = self.layout.num_layers
            return [bytes(self.pool.block_bytes(block, 0, layers)) for block in blocks]

    def _reserved(self, request_id: RequestId) -> Reservation | None:
        self._collect_reservations()
        for i, reservation in enumerate(self._reservations):
            if reservation.request_id == request_id:
                return self._reservations.pop(i)
        return None

    def _collect_reservations(self) -> None:
        self._reservations.extend(self._scheduler.take_reservations())
