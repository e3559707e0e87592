"""Who waits, for how long, and whether everybody gets a fair share."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import MODEL, REQUESTS, part, quantile, rate

_WAIT = "tailrace_queue_duration_seconds"
_GRANTED = f'{REQUESTS}, outcome="granted"'


def _level(name: str) -> str:
    # Every gateway shows the queue's figures; there is one queue a model.
    return f"max by (model) ({name}{{{MODEL}}})"


def _by_tier(name: str) -> str:
    return f"max by (model, tier) ({name}{{{REQUESTS}}})"


_QUEUE = Row(
    "Queue",
    (
        Panel(
            title="Waiting requests",
            unit="short",
            decimals=0,
            description="Requests that wait for a slot. Growing steadily: more is offered than the "
            "decode replicas finish; add replicas or shed load.",
            queries=(Query(_by_tier("tailrace_queue_size"), "{{model}} {{tier}}"),),
        ),
        Panel(
            title="Longest wait now",
            unit="s",
            description="Age of each tier's request that waits longest. Above its target: nobody "
            "behind it will meet theirs; see whether slots or memory are what it waits for.",
            queries=(
                Query(_by_tier("tailrace_queue_oldest_age_seconds"), "{{model}} {{tier}}"),
                Query(
                    "max by (tier) "
                    '(tailrace_slo_target_seconds{job=~"$job", tier=~"$tier", slo="queue"})',
                    "{{tier}} target",
                    limit=True,
                ),
            ),
        ),
        Panel(
            title="Waiting work",
            unit="short",
            description="Prompt tokens and output limits of all who wait, and prompts under way. "
            "Prefill flat at its limit while requests wait: add prefill replicas.",
            queries=(
                Query(_level("tailrace_queue_tokens"), "{{model}} waiting"),
                Query(_level("tailrace_queue_prefilling_tokens"), "{{model}} in prefill"),
            ),
        ),
        Panel(
            title="Queues that lead",
            unit="short",
            decimals=0,
            description="Of each model's two queues, those that grant: 1. 0 for more than a few "
            "seconds: decode replicas admit by their own limits, and nobody is ordered; see the "
            "queues' logs.",
            queries=(
                Query(
                    f"sum by (model) (max by (model, replica) (tailrace_queue_leads{{{MODEL}}}))",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            title="Slots",
            unit="short",
            decimals=0,
            description="Choices that run at once, and how many more could. None free and KV "
            "memory left: raise max_running_requests. None free and no memory: add replicas.",
            queries=(
                Query(_level("tailrace_queue_free_slots"), "{{model}} free"),
                Query(_level("tailrace_queue_slots"), "{{model}} all", limit=True),
            ),
        ),
        Panel(
            title="Saturation",
            unit="percentunit",
            maximum=1.0,
            red_above=0.9,
            description="Share of the slots that are taken or promised. Above 90 % waits grow "
            "faster than load: plan for more before it stays there.",
            queries=(
                Query(
                    f"1 - {_level('tailrace_queue_free_slots')} "
                    f"/ ({_level('tailrace_queue_slots')} > 0)",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            title="Link to the queue",
            unit="short",
            maximum=1.0,
            decimals=0,
            red_below=1.0,
            description="1 while every gateway reaches the queue. 0: gateways admit by the decode "
            "replicas' own limits and order is gone; look at the queue's actor in Ray.",
            queries=(Query(f"min by (model) (tailrace_queue_connected{{{MODEL}}})", "{{model}}"),),
        ),
    ),
)

_WAITS = Row(
    "Waits and refusals",
    (
        Panel(
            title="Wait for a slot, by tier",
            unit="s",
            description="How long granted requests had waited. A low tier waits longer by design; "
            "a high tier that waits means that even it does not fit.",
            queries=tuple(
                Query(
                    quantile(q, _WAIT, _GRANTED, "tier"),
                    f"{{{{tier}}}} {name}",
                )
                for q, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
            ),
        ),
        Panel(
            title="Answers of the queue",
            look="stacked",
            unit="reqps",
            description="What became of requests for a slot. queue_timeout: clients wait for "
            "nothing, refuse earlier. no_replicas: no decode replica takes work at all.",
            queries=(
                Query(rate("tailrace_queue_grants_total", MODEL, "model"), "{{model}} granted"),
                Query(
                    rate("tailrace_queue_refusals_total", MODEL, "model, reason"),
                    "{{model}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Degraded requests",
            look="stacked",
            unit="reqps",
            description="Requests that got less than they asked for, by step of the tier's ladder. "
            "More than a passing burst: the tier is too small for its load; add replicas, or give "
            "it a larger share.",
            queries=(
                Query(
                    rate("tailrace_degradations_total", REQUESTS, "tier, action"),
                    "{{tier}} {{action}}",
                ),
            ),
        ),
        Panel(
            title="Refused by limits",
            look="stacked",
            unit="reqps",
            description="Requests beyond what their tenant or key may take. One kind that never "
            "rests: a client that ignores retry-after, or a limit that is too low for honest use.",
            queries=(
                Query(
                    rate("tailrace_limit_denials_total", 'job=~"$job"', "scope, kind"),
                    "{{scope}} {{kind}}",
                ),
            ),
        ),
        Panel(
            title="Refused by decode replicas",
            look="stacked",
            unit="reqps",
            description="Submits that a replica turned away, mostly `full`: the queue promised a "
            "slot that was gone. A few are normal after a restart; many mean two queues or stale "
            "reports.",
            queries=(
                Query(rate("tailrace_admission_rejections_total", MODEL, "reason"), "{{reason}}"),
            ),
        ),
    ),
)

_FAIRNESS = Row(
    "Fairness",
    (
        Panel(
            title="Share of slots granted, by tier",
            look="stacked",
            unit="percentunit",
            width=12,
            maximum=1.0,
            description="How grants are shared out. Compare with the share of requests beside it: "
            "a tier that gets less than it offers is being held back.",
            queries=(Query(part(f"{_WAIT}_count", _GRANTED, "tier"), "{{tier}}"),),
        ),
        Panel(
            title="Share of requests offered, by tier",
            look="stacked",
            unit="percentunit",
            width=12,
            maximum=1.0,
            description="How demand is shared out. One tier taking over: see who sends it before "
            "you add replicas.",
            queries=(Query(part("tailrace_requests_offered_total", REQUESTS, "tier"), "{{tier}}"),),
        ),
        Panel(
            title="How requests for a slot end, p99 of the wait",
            unit="s",
            width=24,
            description="granted: the wait that was worth it. cancelled: how long clients wait "
            "before they leave; a queue target above it helps nobody.",
            queries=(Query(quantile(0.99, _WAIT, REQUESTS, "outcome"), "{{outcome}}"),),
        ),
    ),
)

QUEUE = Board(
    uid="tailrace-queue",
    title="Tailrace: queue and fairness",
    description="Who waits, for how long, and whether everybody gets a fair share.",
    variables=("job", "model", "tier", "window", "gateway"),
    rows=(_QUEUE, _WAITS, _FAIRNESS),
)
