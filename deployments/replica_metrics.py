"""What prefill and decode replicas report: to Ray's agent, and to gateways over the links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from deployments.gpu.watch import GpuWatch
from deployments.lifecycle.streams import Counters
from deployments.link.link import Link
from deployments.link.messages import Kind
from deployments.metrics import Counter, RayExporter, Registry
from deployments.process_figures import ProcessFigures
from engine.memory import MemoryPlan
from engine.outputs import EngineStats, StepOutput
from engine.request import FinishReason
from engine.transfer.manifest import Prefilled

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY_S = 1.0
EXPORT_EVERY_S = 5.0


class ReplicaMetrics:
    """One replica's registry. Requests are observed as they end, steps and totals once a second.

    Implements `streams.StreamObserver`.
    """

    def __init__(self, model: str, role: str, replica_id: str, *, connector: str = "link") -> None:
        """`connector`: what carries KV here, if all goes well."""
        self.registry = registry = Registry()
        self.recording = True
        """False: series stand still, and nobody is told of them."""

        self._model = model
        self._role = role
        self._replica_id = replica_id
        self._connector = connector
        self._gpus = GpuWatch(registry, model, role)
        engine = {"model_name": model}
        self._step_tokens = registry.histogram("vllm:iteration_tokens_total", **engine)
        self._step_seconds = registry.histogram(
            "tailrace_engine_step_seconds", model=model, role=role
        )
        self._ttft = registry.histogram("vllm:time_to_first_token_seconds", **engine)
        self._itl = registry.histogram("vllm:inter_token_latency_seconds", **engine)
        self._tpot = registry.histogram("vllm:request_time_per_output_token_seconds", **engine)
        self._e2e = registry.histogram("vllm:e2e_request_latency_seconds", **engine)
        self._decode = registry.histogram("vllm:request_decode_time_seconds", **engine)
        self._steps: list[tuple[int, float]] = []
        self._gaps: list[tuple[float, int]] = []
        self._ended: dict[FinishReason, Counter] = {}
        self._process = ProcessFigures(registry, role)
        self._idle_held = 0
        """Blocks held at the last sample, if nothing was under way."""

        if role == "decode":
            self._begin_decode_at_zero()

    def _begin_decode_at_zero(self) -> None:
        """A counter that first appears at 1 hides its first event from `rate`."""
        registry, model = self.registry, self._model
        for action in ("other_replica", "local", "refused"):
            registry.counter("tailrace_prefill_fallbacks_total", model=model, action=action)
        for stage in ("connect", "offer", "chunk", "checksum", "final", "link", "stall"):
            registry.counter(
                "tailrace_kv_transfer_failures_total",
                model=model,
                connector=self._connector,
                stage=stage,
                reason=stage,
            )
        registry.histogram("tailrace_kv_post_seconds", model=model)
        registry.counter("tailrace_admission_rejections_total", model=model, reason="full")
        registry.counter("tailrace_kv_transfer_bytes_total", model=model, connector=self._connector)

    def step(self, step: StepOutput) -> None:
        # What a step costs is mostly code that the processor has forgotten since the last one: so
        # as little of it as can be. `settle` does the rest for all steps of a second.
        if step.num_tokens and self.recording:
            self._steps.append((step.num_tokens, step.duration_s))

    def first_token(self, seconds: float) -> None:
        if self.recording:
            self._ttft.observe(seconds)

    def gaps(self, counted: Sequence[tuple[float, int]]) -> None:
        if self.recording:
            self._gaps += counted

    def settle(self) -> None:
        """Bring the histograms of steps up to date."""
        steps, self._steps = self._steps, []
        for tokens, seconds in steps:
            self._step_tokens.observe(tokens)
            self._step_seconds.observe(seconds)
        gaps, self._gaps = self._gaps, []
        for seconds, times in gaps:
            self._itl.observe(seconds, times)

    def ended(
        self, finish: FinishReason, total_s: float, decode_s: float | None, num_tokens: int
    ) -> None:
        if not self.recording:
            return
        self._e2e.observe(total_s)
        if decode_s is not None:
            self._decode.observe(decode_s)
            if num_tokens > 1:
                self._tpot.observe(decode_s / (num_tokens - 1))
        counter = self._ended.get(finish)
        if counter is None:
            counter = self._ended[finish] = self.registry.counter(
                "vllm:request_success_total", model_name=self._model, finished_reason=finish.value
            )
        counter.inc()

    def pulled(self, prefilled: Prefilled, seconds: float) -> None:
        if not self.recording:
            return
        labels = {"model": self._model, "connector": prefilled.connector}
        registry = self.registry
        registry.histogram("tailrace_kv_transfer_seconds", **labels).observe(seconds)
        registry.histogram("tailrace_kv_transfer_exposed_seconds", **labels).observe(
            prefilled.exposed_s
        )
        registry.counter("tailrace_kv_transfer_bytes_total", **labels).inc(prefilled.num_bytes)

    def posted(self, seconds: Sequence[float]) -> None:
        """READs were posted, and the library took so long to take each."""
        if self.recording and seconds:
            histogram = self.registry.histogram("tailrace_kv_post_seconds", model=self._model)
            for each in seconds:
                histogram.observe(each)

    def memory(self, plan: MemoryPlan) -> None:
        """What the replica's memory is used for; said once, it does not change."""
        labels = {"model": self._model, "role": self._role}
        for name, value in (
            ("tailrace_weight_bytes", plan.weight_bytes),
            ("tailrace_kv_pool_bytes", plan.kv_bytes),
            ("tailrace_kv_pool_tokens", plan.kv_tokens),
            ("tailrace_context_tokens", plan.context_tokens),
        ):
            self.registry.gauge(name, **labels).set(value)

    def sample_engine(self, stats: EngineStats, block_tokens: int) -> None:
        """Bring gauges and totals of the engine up to date."""
        if not self.recording:
            return
        registry, engine = self.registry, {"model_name": self._model}
        waiting = stats.num_waiting + stats.num_waiting_remote
        registry.gauge("vllm:num_requests_running", **engine).set(stats.num_running)
        registry.gauge("vllm:num_requests_waiting", **engine).set(waiting)
        registry.gauge("vllm:kv_cache_usage_perc", **engine).set(
            stats.num_held_blocks / max(1, stats.num_blocks)
        )
        registry.gauge(
            "vllm:cache_config_info",
            block_size=str(block_tokens),
            num_gpu_blocks=str(stats.num_blocks),
            **engine,
        ).set(1)
        for name, total in (
            ("vllm:prefix_cache_queries_total", stats.prefix_query_tokens),
            ("vllm:prefix_cache_hits_total", stats.prefix_hit_tokens),
            ("vllm:num_preemptions_total", stats.num_preemptions),
        ):
            raise_to(registry.counter(name, **engine), total)
        pool = {"model": self._model, "role": self._role}
        for name, total in (
            ("tailrace_engine_steps_ahead_total", stats.num_steps_ahead),
            ("tailrace_engine_discarded_tokens_total", stats.num_discarded_rows),
        ):
            raise_to(registry.counter(name, **pool), total)
        registry.gauge("tailrace_kv_leases_active", model=self._model).set(stats.num_leases)
        raise_to(
            registry.counter("tailrace_kv_leases_expired_total", model=self._model),
            stats.num_leases_expired,
        )
        idle = not (stats.num_running or waiting or stats.num_leases)
        # What ended during a step keeps its blocks until the step's commit: look twice.
        held = stats.num_held_blocks if idle else 0
        registry.gauge("tailrace_kv_leaked_blocks", model=self._model).set(
            min(held, self._idle_held)
        )
        self._idle_held = held

    def sample_streams(self, counters: Counters, checksum_mismatches: int) -> None:
        """Bring totals of a decode replica up to date."""
        if not self.recording:
            return
        registry, model = self.registry, self._model
        engine = {"model_name": model}
        raise_to(registry.counter("vllm:generation_tokens_total", **engine), counters.tokens_out)
        raise_to(
            registry.counter("vllm:prompt_tokens_total", **engine),
            sum(counters.prompt_tokens.values()),
        )
        for source, total in counters.prompt_tokens.items():
            raise_to(
                registry.counter("vllm:prompt_tokens_by_source_total", source=source, **engine),
                total,
            )
        for (decision, reason), total in counters.decisions.items():
            raise_to(
                registry.counter(
                    "tailrace_pd_decisions_total",
                    model=model,
                    decision=decision or "none",
                    reason=reason or "none",
                ),
                total,
            )
        for stage, total in counters.pull_failures.items():
            raise_to(
                registry.counter(
                    "tailrace_kv_transfer_failures_total",
                    model=model,
                    connector=self._connector,
                    stage=stage,
                    reason=stage,
                ),
                total,
            )
        for action, total in counters.fallbacks.items():
            raise_to(
                registry.counter("tailrace_prefill_fallbacks_total", model=model, action=action),
                total,
            )
        for code, total in counters.refused.items():
            raise_to(
                registry.counter("tailrace_admission_rejections_total", model=model, reason=code),
                total,
            )
        raise_to(
            registry.counter("tailrace_kv_checksum_mismatches_total", model=model),
            checksum_mismatches,
        )

    def sample_exports(self, sessions: int, sent_bytes: int, unacked_bytes: int) -> None:
        """Bring totals of a prefill replica up to date."""
        if not self.recording:
            return
        registry, model = self.registry, self._model
        registry.gauge("tailrace_prefill_sessions", model=model).set(sessions)
        registry.gauge("tailrace_kv_unacked_bytes", model=model).set(unacked_bytes)
        raise_to(registry.counter("tailrace_kv_sent_bytes_total", model=model), sent_bytes)

    async def run(self, sample: Callable[[], None], links: Callable[[], Iterable[Link]]) -> None:
        """For ever: sample, send a snapshot to every link, now and then tell Ray's agent."""
        self._gpus.start()
        try:
            await self._report(sample, links)
        finally:
            self._gpus.stop()

    async def _report(
        self, sample: Callable[[], None], links: Callable[[], Iterable[Link]]
    ) -> None:
        to_ray = exporter(self.registry, self._replica_id, self._role)
        rounds = 0
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            rounds += 1
            try:
                sample()  # also with metrics off: a failure of the engine is seen there
                if not self.recording:
                    continue
                self.settle()
                self._gpus.report()
                self._process.sample()
                message = [Kind.SNAPSHOT, self._replica_id, self._role, self.registry.snapshot()]
                for link in list(links()):
                    link.send(message)
                if to_ray is not None and rounds % int(EXPORT_EVERY_S / SNAPSHOT_EVERY_S) == 0:
                    to_ray.export()
            except Exception:
                # Metrics must never take a replica down, and must not go silent for ever either.
                logger.exception("metrics of %s could not be reported", self._replica_id)


def exporter(registry: Registry, replica: str, role: str) -> RayExporter | None:
    """Towards Ray's agent; None in the services of the tests, which run without Ray."""
    import ray

    if not ray.is_initialized():
        return None
    return RayExporter(registry, {"replica": replica, "role": role})


def raise_to(counter: Counter, total: float) -> None:
    """Let a counter follow a total that is kept elsewhere."""
    if total > counter.value:
        counter.inc(total - counter.value)
