"""What wakes somebody, and what waits for the morning. Each alert has its entry in the runbook."""

from __future__ import annotations

from dashboards.rules import Alert, Condition, Group
from dashboards.service_level import burn

TAIL, PD, QUEUE, ENGINE, GPU = (
    *("tailrace-tail", "tailrace-pd", "tailrace-queue"),
    *("tailrace-engine", "tailrace-gpu"),
)
_NO_DEVICE = "there are figures of devices only where a replica owns one"
_TIER = "{{ $labels.tier }}"
_MODEL = "{{ $labels.model }}"


def _burns(
    name: str, severity: str, hold: str, long: str, short: str, factor: float, spent: str
) -> Alert:
    return Alert(
        name=name,
        severity=severity,
        hold=hold,
        conditions=(
            Condition(expr=burn(long), op=">", threshold=factor),
            Condition(expr=burn(short), op=">", threshold=factor),
        ),
        summary=f"{_MODEL}, tier {_TIER}: {{{{ $labels.slo }}}} spends its error budget {factor:g} "
        "times too fast",
        description=f"{spent} Open the tail dashboard, see in which phase the time goes, then "
        "explain one of the slowest requests.",
        dashboard=TAIL,
    )


_SERVICE_LEVEL = (
    _burns(
        *("TailraceBurnFast", "page", "2m", "1h", "5m", 14.4),
        "Two percent of the budget of 30 days went in one hour.",
    ),
    _burns(
        *("TailraceBurnSlow", "page", "15m", "6h", "30m", 6),
        "Five percent of the budget of 30 days went in six hours.",
    ),
    _burns(
        *("TailraceBurnDay", "ticket", "1h", "1d", "2h", 3),
        "Ten percent of the budget of 30 days went in one day.",
    ),
    _burns(
        *("TailraceBurnThreeDays", "ticket", "3h", "3d", "6h", 1),
        "The budget of 30 days will not last: three days went over their share.",
    ),
)

_CLUSTER = (
    Alert(
        name="TailraceNoFigures",
        severity="page",
        hold="2m",
        conditions=(
            Condition(expr='absent(tailrace_build_info{role="gateway"})', op=">", threshold=0),
        ),
        summary="No gateway is scraped",
        description="Either every gateway is gone or Prometheus cannot reach them; no other alert "
        "can fire. Ask a gateway for /health, then look at Prometheus' targets.",
        dashboard=TAIL,
        empty="absent() has a value only while the series is gone",
    ),
    Alert(
        name="TailraceReplicaDown",
        severity="ticket",
        hold="2m",
        conditions=(
            Condition(
                expr="max by (job, model, role) (max_over_time(tailrace_replicas_up[30m]))\n"
                "- max by (job, model, role) (tailrace_replicas_up)",
                op=">",
                threshold=0,
            ),
        ),
        summary=f"{_MODEL}: {{{{ $value }}}} fewer {{{{ $labels.role }}}} replicas than half an "
        "hour ago",
        description="A replica went and none took its place. `tailrace status` says what Serve "
        "makes of it. Scaled down on purpose: it ends by itself after half an hour.",
        dashboard=PD,
    ),
    Alert(
        name="TailraceStaleEndpoints",
        severity="page",
        hold="1m",
        conditions=(
            Condition(
                expr="max by (job, model, role) (tailrace_stale_endpoints)", op=">", threshold=0
            ),
        ),
        summary=f"{_MODEL}: {{{{ $value }}}} {{{{ $labels.role }}}} replicas count as running and "
        "say nothing",
        description="Requests may be sent to a process that hangs or cannot be reached. Look at "
        "its log; end it if it hangs, Serve starts another one.",
        dashboard=PD,
    ),
    Alert(
        name="TailracePhaseSumOff",
        severity="ticket",
        hold="10m",
        conditions=(
            Condition(
                expr="abs(\n"
                "sum by (job, model) (rate(tailrace_request_phase_seconds_sum[10m]))\n"
                "/ (sum by (job, model) (rate(tailrace_request_duration_seconds_sum[10m])) > 0)\n"
                "- 1)",
                op=">",
                threshold=0.05,
            ),
        ),
        summary=f"{_MODEL}: phases do not add up to the requests' duration",
        description="The breakdown by phase cannot be trusted: a phase is missing or counted "
        "twice. This is a defect; attach one request's explanation to the report.",
        dashboard=TAIL,
    ),
)

_QUEUE = (
    Alert(
        name="TailraceQueueOld",
        severity="page",
        hold="1m",
        conditions=(
            Condition(
                expr="max by (job, model, tier) (tailrace_queue_oldest_age_seconds)\n"
                "/ on (job, tier) group_left ()\n"
                'max by (job, tier) (tailrace_slo_target_seconds{slo="queue"})',
                op=">",
                threshold=1,
            ),
        ),
        summary=f"{_MODEL}, tier {_TIER}: a request has waited {{{{ $value | humanize }}}} times "
        "its target for the queue",
        description="Every slot is taken for longer than the target allows. Add decode replicas, "
        "raise max_running_requests if KV memory is left, or shed load by limits.",
        dashboard=QUEUE,
    ),
    Alert(
        name="TailraceQueueAway",
        severity="page",
        hold="30s",
        conditions=(
            Condition(
                expr="1 - min by (job, model) (tailrace_queue_connected)", op=">", threshold=0
            ),
        ),
        summary=f"{_MODEL}: a gateway has no link to the admission queue",
        description="Requests go on, admitted against the decode replicas' own limits: order and "
        "fairness are gone until the queue is back. Look at its actor in Ray.",
        dashboard=QUEUE,
    ),
)

_KV = (
    Alert(
        name="TailraceLeasesExpired",
        severity="ticket",
        hold="5m",
        conditions=(
            Condition(
                expr="sum by (job, model) (increase(tailrace_kv_leases_expired_total[10m]))",
                op=">",
                threshold=0,
            ),
        ),
        summary=f"{_MODEL}: KV leases end by their deadline",
        description="Decode replicas ask for KV and neither take nor release it, and its blocks "
        "are held for 30 s each time. Look for decode replicas that die or stall.",
        dashboard=PD,
    ),
    Alert(
        name="TailraceBlocksLeaked",
        severity="page",
        hold="2m",
        conditions=(
            Condition(
                expr="max by (job, model, replica) (tailrace_kv_leaked_blocks)",
                op=">",
                threshold=0,
            ),
        ),
        summary=f"{_MODEL}: {{{{ $value }}}} KV blocks of {{{{ $labels.replica }}}} belong to "
        "nobody",
        description="The replica will run out of memory for KV. Restart it, and report the defect "
        "with its log.",
        dashboard=PD,
    ),
    Alert(
        name="TailraceKVFallbacks",
        severity="ticket",
        hold="5m",
        conditions=(
            Condition(
                expr="sum by (job, model) (rate(tailrace_prefill_fallbacks_total[10m]))\n"
                "/ (sum by (job, model) (rate(tailrace_pd_decisions_total"
                '{decision=~"disaggregated|fallback"}[10m])) > 0)',
                op=">",
                threshold=0.05,
            ),
        ),
        summary=f"{_MODEL}: prefill elsewhere fails for {{{{ $value | humanizePercentage }}}} of "
        "the prompts sent there",
        description="Decode replicas compute these prompts themselves, which slows their running "
        "streams. The panel of failures by stage says what breaks.",
        dashboard=PD,
        empty="there is no share while no prompt was long enough for the prefill pool",
    ),
    Alert(
        name="TailraceKVCorrupt",
        severity="page",
        hold="0s",
        conditions=(
            Condition(
                expr="sum by (job, model) (increase(tailrace_kv_checksum_mismatches_total[10m]))",
                op=">",
                threshold=0,
            ),
        ),
        summary=f"{_MODEL}: KV arrived damaged",
        description="It was thrown away and computed again: no answer came from it. Memory, a "
        "network card or a driver damages data; find the host by the replicas' logs.",
        dashboard=PD,
    ),
)

_GPU = (
    Alert(
        name="TailraceGpuLost",
        severity="page",
        hold="30s",
        conditions=(
            Condition(
                expr="1 - min by (job, model, role, gpu, uuid, replica) (tailrace_gpu_up)",
                op=">",
                threshold=0,
            ),
        ),
        summary=f"GPU {{{{ $labels.gpu }}}} of {{{{ $labels.replica }}}} ({_MODEL}) is lost",
        description="The driver no longer answers for it. Drain the node and reset or replace the "
        "device.",
        dashboard=GPU,
        empty=_NO_DEVICE,
    ),
    Alert(
        name="TailraceGpuMemoryErrors",
        severity="page",
        hold="0s",
        conditions=(
            Condition(
                expr="sum by (job, model, gpu, uuid) (increase(tailrace_gpu_ecc_errors_total"
                '{kind="uncorrected"}[15m]))',
                op=">",
                threshold=0,
            ),
        ),
        summary=f"GPU {{{{ $labels.gpu }}}} ({_MODEL}) has memory errors it could not correct",
        description="Results of this device cannot be trusted. Drain the node and reset the "
        "device; replace it if they come back.",
        dashboard=GPU,
        empty=_NO_DEVICE,
    ),
    Alert(
        name="TailraceGpuThrottled",
        severity="ticket",
        hold="10m",
        conditions=(
            Condition(
                expr="max by (job, model, gpu, uuid, reason) (tailrace_gpu_throttled"
                '{reason!~"idle|application_clocks"})',
                op=">",
                threshold=0,
            ),
        ),
        summary=f"GPU {{{{ $labels.gpu }}}} ({_MODEL}) is slowed down: {{{{ $labels.reason }}}}",
        description="Steps take longer than they should. Heat: look at cooling and neighbours. "
        "Power: look at the limit in force.",
        dashboard=GPU,
        empty=_NO_DEVICE,
    ),
)


def alerts() -> tuple[Group, ...]:
    """Every alert, by what it is about."""
    return (
        Group(name="tailrace-service-level-alerts", interval="30s", alerts=_SERVICE_LEVEL),
        Group(name="tailrace-cluster-alerts", interval="10s", alerts=_CLUSTER),
        Group(name="tailrace-queue-alerts", interval="10s", alerts=_QUEUE),
        Group(name="tailrace-kv-alerts", interval="10s", alerts=_KV),
        Group(name="tailrace-gpu-alerts", interval="10s", alerts=_GPU),
    )
