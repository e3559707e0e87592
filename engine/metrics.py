"""The catalogue of metrics: what exists, under which name, with which labels, buckets and meaning.

Values only. `deployments.metrics` holds the numbers, dashboards read the declarations, and neither
invents a name. Engine series keep vLLM's names, which gateways and dashboards elsewhere know;
all else is `tailrace_`, in base units, with `_total` on counters.

Labels are closed sets (model, tier, role, phase, outcome, reason), never ids of requests or keys.
`replica` is added where series leave their process, and names that process; nothing here uses it.

What the clocks mean:

- The client's time to first token is `tailrace_request_ttft_seconds`, from the request's arrival at
  the gateway. `vllm:time_to_first_token_seconds` starts when the engine got the request, and where
  prefill runs elsewhere it includes the wait for KV.
- An inter-token latency is one gap between two tokens; time per output token is a request's mean.
- The phases of `tailrace_request_phase_seconds` follow each other without gap or overlap: they add
  up to the request's duration.

What a service level is judged on, one verdict a request and kind of target:

- `ttft` is the time to first token above, `queue` the wait for admission, `e2e` arrival to last
  byte, `itl` the request's mean gap between tokens (its time per output token).
- A request that the service failed (5xx, 429, a deadline) missed each target it had not met by
  then.
- A client that leaves takes its verdict on what was not measured along, unless the target had
  passed already. Requests refused for a fault of their own (other 4xx) are not judged at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "",
    "seconds",
    "bytes",
    "tokens",
    "ratio",
    "blocks",
    "bytes_per_second",
    "watts",
    "joules",
    "celsius",
    "hertz",
]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = frozenset({"le", "quantile", "replica"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family of series."""

    name: str
    kind: Kind
    unit: Unit
    """Base units only; empty for plain counts."""

    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, inclusive, ascending, without +Inf. Histograms only."""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name}: not a metric name"
        assert all(_LABEL.fullmatch(label) for label in self.labels), f"{self.name}: {self.labels}"
        assert not _RESERVED_LABELS & set(self.labels), f"{self.name}: reserved label"
        assert len(set(self.labels)) == len(self.labels), f"{self.name}: a label twice"
        assert bool(self.buckets) == (self.kind == "histogram"), f"{self.name}: buckets"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: buckets unsorted"
        assert self.kind != "counter" or self.name.endswith("_total"), f"{self.name}: no _total"


# vLLM's boundaries, so that quantiles compare, with finer ones where its coarsest step hides a CPU
# or a fast decoder: its inter-token histogram starts at 10 ms, its queue histogram at 300 ms.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TRANSFER_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)
STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
POST_BUCKETS = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
)
TOKEN_BUCKETS = tuple(float(d * 10**e) for e in range(6) for d in (1, 2, 5))
ITERATION_BUCKETS = (1.0, 8.0, *(float(2**e) for e in range(4, 15)))

PHASES = (
    *("tokenize", "queue", "route", "prefill_queue", "prefill"),
    *("kv_transfer", "decode_queue", "decode", "stream"),
)
"""Values of the label `phase`, in the order a request passes them."""

SLO_KINDS = ("queue", "ttft", "itl", "e2e")
"""Values of the label `slo`."""

ROLES = ("gateway", "queue", "decode", "prefill")
"""Values of the label `role`: what a process is."""


def _counter(name: str, labels: tuple[str, ...], help: str, unit: Unit = "") -> Metric:
    return Metric(name=name, kind="counter", unit=unit, labels=labels, help=help)


def _gauge(name: str, labels: tuple[str, ...], help: str, unit: Unit = "") -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, labels=labels, help=help)


def _seconds(
    name: str, labels: tuple[str, ...], help: str, buckets: tuple[float, ...] = DURATION_BUCKETS
) -> Metric:
    return Metric(
        name=name, kind="histogram", unit="seconds", labels=labels, help=help, buckets=buckets
    )


def _tokens(
    name: str, labels: tuple[str, ...], help: str, buckets: tuple[float, ...] = TOKEN_BUCKETS
) -> Metric:
    return Metric(
        name=name, kind="histogram", unit="tokens", labels=labels, help=help, buckets=buckets
    )


_ENGINE = ("model_name",)
_MODEL = ("model",)
_TIER = ("model", "tier")
_ROLE = ("role",)
_GPU = ("model", "role", "gpu", "uuid")
"""One device and the replica that owns it. `gpu` is the driver's index; a MIG instance is `0:1`."""

_DECLARED = (
    # Every process of ours.
    _gauge("tailrace_build_info", ("role", "version"), "Always 1. The version that runs."),
    _gauge(
        "tailrace_process_start_time_seconds",
        _ROLE,
        "When the process started, in seconds since 1970: a change is a restart.",
        "seconds",
    ),
    _counter(
        "tailrace_process_cpu_seconds_total", _ROLE, "Processor time, user and system.", "seconds"
    ),
    _gauge("tailrace_process_resident_memory_bytes", _ROLE, "Memory the process holds.", "bytes"),
    # The engine, under vLLM's names and label.
    _gauge("vllm:num_requests_running", _ENGINE, "Requests in the running batch."),
    _gauge("vllm:num_requests_waiting", _ENGINE, "Requests the engine holds that do not run yet."),
    _gauge(
        "vllm:kv_cache_usage_perc",
        _ENGINE,
        "Share of KV blocks held by requests and leases; 1 is full.",
        "ratio",
    ),
    _gauge(
        "vllm:cache_config_info",
        ("model_name", "block_size", "num_gpu_blocks"),
        "Always 1. Tokens per KV block and number of blocks, on whatever device they are.",
    ),
    _counter("vllm:prompt_tokens_total", _ENGINE, "Prompt tokens of requests taken in.", "tokens"),
    _counter("vllm:generation_tokens_total", _ENGINE, "Tokens generated.", "tokens"),
    _counter(
        "vllm:prompt_tokens_by_source_total",
        ("model_name", "source"),
        "Prompt tokens by where their KV came from: local_compute, local_cache_hit or "
        "external_kv_transfer.",
        "tokens",
    ),
    _counter(
        "vllm:prefix_cache_queries_total",
        _ENGINE,
        "Prompt tokens looked up in the prefix cache.",
        "tokens",
    ),
    _counter(
        "vllm:prefix_cache_hits_total",
        _ENGINE,
        "Prompt tokens found in the prefix cache.",
        "tokens",
    ),
    _counter(
        "vllm:num_preemptions_total", _ENGINE, "Times a running request made way for another."
    ),
    _counter(
        "vllm:request_success_total",
        ("model_name", "finished_reason"),
        "Requests that ended, by reason: stop, length, cancelled or error.",
    ),
    _tokens(
        "vllm:iteration_tokens_total",
        _ENGINE,
        "Tokens computed by one step, prompt and output together.",
        ITERATION_BUCKETS,
    ),
    _seconds(
        "vllm:time_to_first_token_seconds",
        _ENGINE,
        "From the engine's receipt of a request to its first token.",
        TTFT_BUCKETS,
    ),
    _seconds(
        "vllm:inter_token_latency_seconds",
        _ENGINE,
        "Gap between two tokens of one request, in the engine.",
        ITL_BUCKETS,
    ),
    _seconds(
        "vllm:request_time_per_output_token_seconds",
        _ENGINE,
        "Mean gap between a request's tokens, in the engine.",
        ITL_BUCKETS,
    ),
    _seconds(
        "vllm:e2e_request_latency_seconds",
        _ENGINE,
        "From the engine's receipt of a request to its last token.",
    ),
    _seconds(
        "vllm:request_decode_time_seconds", _ENGINE, "From a request's first token to its last."
    ),
    _seconds(
        "tailrace_engine_step_seconds",
        ("model", "role"),
        "One engine step: plan, forward pass, sampling, commit. With overlap: pass and sampling. "
        "With stages, which have a step each under way: from the end of the step before.",
        STEP_BUCKETS,
    ),
    _counter(
        "tailrace_engine_steps_ahead_total",
        ("model", "role"),
        "Engine steps that were planned while the one before was computed (overlap).",
    ),
    _counter(
        "tailrace_engine_discarded_tokens_total",
        ("model", "role"),
        "Tokens sampled for requests that had ended: what overlap, or a cancel, made for nothing.",
        "tokens",
    ),
    # Requests as the client sees them, measured at the gateway.
    _counter(
        "tailrace_requests_offered_total",
        _TIER,
        "Requests that arrived, whatever became of them. Model `unknown`: not read or not served.",
    ),
    _counter(
        "tailrace_requests_total",
        ("model", "tier", "code"),
        "Requests answered, by HTTP status. 499: the client went away first.",
    ),
    _seconds("tailrace_request_duration_seconds", _TIER, "From arrival to the last byte."),
    _seconds(
        "tailrace_request_ttft_seconds",
        ("model", "tier", "streaming"),
        "From arrival to the first token sent (streaming) or known (not streaming).",
        TTFT_BUCKETS,
    ),
    _seconds(
        "tailrace_request_itl_seconds",
        _TIER,
        "Gap between two tokens of one stream.",
        ITL_BUCKETS,
    ),
    _seconds(
        "tailrace_request_tpot_seconds",
        _TIER,
        "Mean gap between a request's tokens, the first excepted.",
        ITL_BUCKETS,
    ),
    _tokens("tailrace_request_input_tokens", _TIER, "Prompt tokens of a request."),
    _tokens("tailrace_request_output_tokens", _TIER, "Tokens generated for a request."),
    _tokens(
        "tailrace_request_cached_tokens",
        _TIER,
        "Prompt tokens of a request that nobody computed for it.",
    ),
    _gauge("tailrace_requests_inflight", _MODEL, "Requests between arrival and last byte."),
    _counter(
        "tailrace_input_tokens_total",
        _TIER,
        "Prompt tokens of requests taken on, however they ended.",
        "tokens",
    ),
    _counter(
        "tailrace_output_tokens_total",
        _TIER,
        "Tokens given to clients, also of answers that were cut short.",
        "tokens",
    ),
    _counter(
        "tailrace_request_finishes_total",
        ("model", "tier", "reason"),
        "Choices whose answer is whole, by finish reason: stop or length.",
    ),
    _counter(
        "tailrace_slo_requests_total",
        ("model", "tier", "slo", "met"),
        "Verdicts on requests, by target (queue, ttft, itl, e2e) and whether it was met.",
    ),
    _gauge(
        "tailrace_slo_target_seconds",
        ("tier", "slo"),
        "The target in force, by tier and kind.",
        "seconds",
    ),
    _gauge(
        "tailrace_slo_objective_ratio",
        ("tier",),
        "Share of requests that must meet a target; what is left is the error budget.",
        "ratio",
    ),
    _counter(
        "tailrace_goodput_requests_total",
        _TIER,
        "Requests answered whole and inside every target of their tier.",
    ),
    _counter(
        "tailrace_goodput_tokens_total",
        _TIER,
        "Output tokens of requests answered whole and inside every target of their tier.",
        "tokens",
    ),
    _counter(
        "tailrace_client_disconnects_total",
        ("model", "phase"),
        "Clients that went away before their answer was complete, by the phase they left in.",
    ),
    _seconds(
        "tailrace_request_phase_seconds",
        ("model", "tier", "phase"),
        "Time a request spent in one phase: " + ", ".join(PHASES) + ".",
    ),
    _seconds(
        "tailrace_external_span_seconds",
        ("model", "tier", "kind"),
        "Time outside the model that clients told of: tool, retrieval or other.",
    ),
    # The gateway's view of the cluster.
    _gauge(
        "tailrace_config_revision",
        (),
        "`revision` of the gateway's configuration in force.",
    ),
    _gauge(
        "tailrace_replicas_up",
        ("model", "role"),
        "Replicas whose figures reached this gateway within the last three seconds.",
    ),
    _gauge(
        "tailrace_stale_endpoints",
        ("model", "role"),
        "Replicas that count as running and whose figures are older than three seconds.",
    ),
    _gauge(
        "tailrace_snapshot_age_seconds",
        ("model", "role"),
        "Age of the oldest figures shown.",
        "seconds",
    ),
    _gauge(
        "tailrace_queue_connected",
        _MODEL,
        "1 while this gateway has its link to the admission queue.",
    ),
    _counter(
        "tailrace_route_decisions_total",
        ("model", "policy"),
        "Decode replicas chosen, by who chose: queue, or own while the queue is away.",
    ),
    _counter(
        "tailrace_resubmissions_total",
        ("model", "reason"),
        "Choices placed again: their replica was full or lost.",
    ),
    _counter(
        "tailrace_migrations_total",
        ("model", "reason"),
        "Choices that went on in mid-answer at another replica: theirs died, hung or closed.",
    ),
    # Admission.
    _gauge(
        "tailrace_queue_leads",
        _MODEL,
        "1 for the queue that grants, 0 for the one that stands by.",
    ),
    _gauge("tailrace_queue_size", _TIER, "Requests that wait for a slot."),
    _gauge(
        "tailrace_queue_tokens",
        _MODEL,
        "Prompt tokens and output limits of the requests that wait.",
        "tokens",
    ),
    _gauge(
        "tailrace_queue_oldest_age_seconds",
        _TIER,
        "How long the request that waits longest has waited; 0 when none does.",
        "seconds",
    ),
    _gauge(
        "tailrace_queue_prefilling_tokens",
        _MODEL,
        "Prompt tokens granted or submitted whose first token is not there yet.",
        "tokens",
    ),
    _gauge("tailrace_queue_slots", _MODEL, "Choices that the decode replicas run at once."),
    _gauge("tailrace_queue_free_slots", _MODEL, "Slots neither taken nor promised."),
    _counter("tailrace_queue_grants_total", _MODEL, "Requests that got a slot."),
    _counter(
        "tailrace_queue_refusals_total",
        ("model", "reason"),
        "Requests that the queue refused, by error code.",
    ),
    _counter(
        "tailrace_degradations_total",
        ("model", "tier", "action"),
        "Requests that got less than they asked for while their tier waited too long: shorten, "
        "drop_extras, model, defer or shed.",
    ),
    _counter(
        "tailrace_limit_denials_total",
        ("scope", "kind"),
        "Requests refused by a limit of their tenant or key (scope): requests, tokens, retries or "
        "concurrency.",
    ),
    _seconds(
        "tailrace_queue_duration_seconds",
        ("model", "tier", "outcome"),
        "From asking for a slot to the answer: granted, cancelled or the error code.",
    ),
    _counter(
        "tailrace_admission_rejections_total",
        ("model", "reason"),
        "Submits that a decode replica refused before any work was done for them.",
    ),
    # Prefill and decode on separate replicas.
    _counter(
        "tailrace_pd_decisions_total",
        ("model", "decision", "reason"),
        "Where a prompt was computed: disaggregated, local or combined, and why.",
    ),
    _seconds(
        "tailrace_kv_transfer_seconds",
        ("model", "connector"),
        "From the first KV chunk asked for to the commit of the last one.",
        TRANSFER_BUCKETS,
    ),
    _seconds(
        "tailrace_kv_transfer_exposed_seconds",
        ("model", "connector"),
        "Part of a transfer that came after the prompt was computed: what the client waits for.",
        TRANSFER_BUCKETS,
    ),
    _counter(
        "tailrace_kv_transfer_bytes_total",
        ("model", "connector"),
        "KV bytes received from other replicas.",
        "bytes",
    ),
    _seconds(
        "tailrace_kv_post_seconds",
        _MODEL,
        "What posting one READ took: grows with its descriptors.",
        POST_BUCKETS,
    ),
    _counter("tailrace_kv_sent_bytes_total", _MODEL, "KV bytes sent by prefill replicas.", "bytes"),
    _gauge(
        "tailrace_kv_unacked_bytes",
        _MODEL,
        "KV bytes on their way whose arrival nobody confirmed yet.",
        "bytes",
    ),
    _gauge("tailrace_prefill_sessions", _MODEL, "Prompts under way for other replicas."),
    _counter(
        "tailrace_kv_transfer_failures_total",
        ("model", "connector", "stage", "reason"),
        "KV that never arrived or arrived wrong, by stage: offer, chunk, checksum, final or lease.",
    ),
    _counter(
        "tailrace_kv_checksum_mismatches_total",
        _MODEL,
        "KV chunks whose bytes were not those sent.",
    ),
    _gauge(
        "tailrace_kv_leases_active",
        _MODEL,
        "Exports whose blocks are held for another replica; on decode, imports whose blocks are "
        "set aside until a READ into them has ended.",
    ),
    _counter(
        "tailrace_kv_leases_expired_total",
        _MODEL,
        "Leases that ended by their deadline because nobody renewed or released them.",
    ),
    _gauge(
        "tailrace_weight_bytes",
        ("model", "role"),
        "Memory that a replica's weights take.",
        "bytes",
    ),
    _gauge("tailrace_kv_pool_bytes", ("model", "role"), "Memory of a replica's KV pool.", "bytes"),
    _gauge(
        "tailrace_kv_pool_tokens",
        ("model", "role"),
        "Tokens of context that a replica's KV pool holds at once.",
        "tokens",
    ),
    _gauge(
        "tailrace_context_tokens",
        ("model", "role"),
        "The longest request, prompt and output together, that a replica takes.",
        "tokens",
    ),
    _gauge(
        "tailrace_kv_leaked_blocks",
        _MODEL,
        "Blocks held by no request, lease or prefix. Anything but 0 is a defect.",
        "blocks",
    ),
    _counter(
        "tailrace_prefill_fallbacks_total",
        ("model", "action"),
        "Prompts whose remote prefill failed, by what was done: other_replica, local or refused.",
    ),
    # Devices of a replica, as their driver tells. What a device does not tell has no series; where
    # MIG is on, only memory is an instance's own, and the rest is under the whole device's UUID.
    _gauge("tailrace_gpu_up", _GPU, "1 while the device answers, 0 once it is lost."),
    _gauge("tailrace_gpu_info", (*_GPU, "product"), "Always 1. What the device is called."),
    _gauge(
        "tailrace_gpu_memory_used_bytes",
        _GPU,
        "Device memory in use by anyone, without what the driver keeps for itself.",
        "bytes",
    ),
    _gauge("tailrace_gpu_memory_total_bytes", _GPU, "Device memory there is.", "bytes"),
    _gauge(
        "tailrace_gpu_utilization_ratio",
        (*_GPU, "part"),
        "Share of the driver's last sample period in which a kernel ran (compute), or in which "
        "device memory was read or written (memory).",
        "ratio",
    ),
    _gauge("tailrace_gpu_power_watts", _GPU, "Power drawn by the board.", "watts"),
    _gauge("tailrace_gpu_power_limit_watts", _GPU, "Power limit in force.", "watts"),
    _counter("tailrace_gpu_energy_joules_total", _GPU, "Energy used by the board.", "joules"),
    _gauge("tailrace_gpu_temperature_celsius", _GPU, "Temperature of the chip.", "celsius"),
    _gauge("tailrace_gpu_clock_hertz", (*_GPU, "clock"), "Clock now, of sm or of memory.", "hertz"),
    _gauge(
        "tailrace_gpu_throttled",
        (*_GPU, "reason"),
        "1 while this reason holds the clocks down. idle and application_clocks are no trouble.",
    ),
    _counter(
        "tailrace_gpu_ecc_errors_total",
        (*_GPU, "kind"),
        "Memory errors since the driver was loaded: corrected or uncorrected.",
    ),
    _counter(
        "tailrace_gpu_xid_errors_total",
        (*_GPU, "xid"),
        "Critical errors that the driver reported while the replica ran, by NVIDIA's XID number.",
    ),
    _gauge(
        "tailrace_gpu_pcie_bytes_per_second",
        (*_GPU, "direction"),
        "PCIe traffic over the 20 ms in which it was sampled: sent or received by the device.",
        "bytes_per_second",
    ),
    _counter(
        "tailrace_gpu_nvlink_bytes_total",
        (*_GPU, "direction"),
        "Payload on all NVLinks of the device: sent or received.",
        "bytes",
    ),
)

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
"""Every metric there is, by name."""

assert len(CATALOGUE) == len(_DECLARED), "a metric is declared twice"
