"""Which tier misses its target, how badly, and in which phase."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import MODEL, REQUESTS, mean, quantile, rate, share, total
from dashboards.service_level import WINDOWS, burn
from engine.metrics import PHASES

_QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"), (0.999, "p99.9"))
_TARGET = 'max by (tier) (tailrace_slo_target_seconds{{job=~"$job", tier=~"$tier", slo="{kind}"}})'
_BURN_SELECT = f"{{{REQUESTS}}}"
_PHASE = "tailrace_request_phase_seconds"
_DURATION = "tailrace_request_duration_seconds"
_SPANS = "tailrace_external_span_seconds"
_JUDGED = "tailrace_slo_requests_total"


def _latency(title: str, metric: str, kind: str, description: str) -> Panel:
    return Panel(
        title=title,
        unit="s",
        width=12,
        height=9,
        description=description,
        queries=(
            *(
                Query(quantile(q, metric, REQUESTS, "tier"), f"{{{{tier}}}} {name}")
                for q, name in _QUANTILES
            ),
            Query(_TARGET.format(kind=kind), "{{tier}} target", limit=True),
        ),
    )


_NOW = Row(
    "Now",
    (
        Panel(
            title="Requests offered",
            look="stat",
            unit="reqps",
            width=4,
            height=4,
            description="Requests that arrive, whatever becomes of them. Compare with goodput: "
            "what lies between is work that came too late, or nothing at all.",
            queries=(Query(total("tailrace_requests_offered_total", REQUESTS)),),
        ),
        Panel(
            title="Goodput",
            look="stat",
            unit="percentunit",
            width=4,
            height=4,
            red_below=0.95,
            description="Share of the requests offered that were answered whole and inside every "
            "target. Below its objective: look at the burn rate for the kind of target.",
            queries=(
                Query(
                    share(
                        total("tailrace_goodput_requests_total", REQUESTS),
                        total("tailrace_requests_offered_total", REQUESTS),
                    )
                ),
            ),
        ),
        Panel(
            title="Targets met",
            look="stat",
            unit="percentunit",
            width=8,
            height=4,
            red_below=0.99,
            description="Share of requests that met each kind of target. The lowest one names the "
            "row to look at: queue, first token, gaps or the whole.",
            queries=(
                Query(
                    share(
                        rate(_JUDGED, f'{REQUESTS}, met="true"', "slo"),
                        rate(_JUDGED, REQUESTS, "slo"),
                    ),
                    "{{slo}}",
                ),
            ),
        ),
        Panel(
            title="In flight",
            look="stat",
            unit="short",
            width=4,
            height=4,
            decimals=0,
            description="Requests between arrival and last byte. Growing while the offered rate is "
            "flat: something got slower; the phases below say what.",
            queries=(Query(f"sum(tailrace_requests_inflight{{{MODEL}}})"),),
        ),
        Panel(
            title="Configuration",
            look="stat",
            unit="none",
            width=4,
            height=4,
            decimals=0,
            description="Revision in force. Two numbers: gateways disagree; apply the "
            "configuration again, or wait for the rollout to end.",
            queries=(
                Query(
                    'count by (revision) (count_values by (job) ("revision", '
                    'tailrace_config_revision{job=~"$job"}))',
                    "revision {{revision}}",
                ),
            ),
        ),
    ),
)

_TAIL = Row(
    "Tail latency by tier",
    (
        _latency(
            *("Time to first token", "tailrace_request_ttft_seconds", "ttft"),
            "From arrival to the first token written, the queue included. Above its target: see "
            "below whether the time goes into the queue or into prefill.",
        ),
        _latency(
            *("Gap between tokens", "tailrace_request_itl_seconds", "itl"),
            "Gap between two tokens of one stream. Rising with the batch is normal; jumps mean "
            "local prefill between steps: raise local_prefill_tokens with care, add prefill "
            "replicas.",
        ),
        _latency(
            *("End to end", _DURATION, "e2e"),
            "From arrival to the last byte. Follows output length: compare with the lengths in the "
            "row of traffic before blaming the cluster.",
        ),
        _latency(
            *("Time per output token", "tailrace_request_tpot_seconds", "itl"),
            "A request's mean gap, which is what the itl target judges. High p99 with a low p50: "
            "single requests were preempted or moved; explain one.",
        ),
    ),
)

_LEVEL = Row(
    "Service level",
    (
        Panel(
            title="Burn rate, one hour",
            unit="none",
            description="How many times faster than allowed the error budget is spent. Above 14.4 "
            "for an hour, two percent of a month's budget are gone: act now.",
            queries=(
                Query(f"max by (tier, slo) ({burn('1h')}{_BURN_SELECT})", "{{tier}} {{slo}}"),
                Query(f"max by (tier, slo) ({burn('5m')}{_BURN_SELECT})", "{{tier}} {{slo}} 5 min"),
                Query("vector(14.4)", "page", limit=True),
            ),
        ),
        Panel(
            title="Burn rate, six hours",
            unit="none",
            description="The slow leak. Above 6 for six hours five percent of a month's budget are "
            "gone: find what changed, before it becomes the normal.",
            queries=(
                Query(f"max by (tier, slo) ({burn('6h')}{_BURN_SELECT})", "{{tier}} {{slo}}"),
                Query(
                    f"max by (tier, slo) ({burn('30m')}{_BURN_SELECT})", "{{tier}} {{slo}} 30 min"
                ),
                Query("vector(6)", "page", limit=True),
            ),
        ),
        Panel(
            title="Burn rate by window",
            look="table",
            unit="none",
            minimum=None,
            description="All windows at once. High on the right only: it is over. High on the left "
            "only: it just began.",
            queries=tuple(
                Query(f"max by (tier, slo) ({burn(window)}{_BURN_SELECT})", window)
                for window in WINDOWS
            ),
        ),
        Panel(
            title="Offered and good requests",
            unit="reqps",
            description="What arrives, what ends, and what ends inside every target. Offered above "
            "ended: the backlog grows; add replicas or tighten limits.",
            queries=(
                Query(
                    rate("tailrace_requests_offered_total", REQUESTS, "tier"), "{{tier}} offered"
                ),
                Query(rate("tailrace_requests_total", REQUESTS, "tier"), "{{tier}} ended"),
                Query(rate("tailrace_goodput_requests_total", REQUESTS, "tier"), "{{tier}} good"),
            ),
        ),
        Panel(
            title="Offered and good tokens",
            unit="short",
            description="Output tokens a second, and those of requests inside every target. A gap "
            "is work that helped nobody: shed load earlier, or by tier.",
            queries=(
                Query(rate("tailrace_output_tokens_total", REQUESTS, "tier"), "{{tier}} all"),
                Query(rate("tailrace_goodput_tokens_total", REQUESTS, "tier"), "{{tier}} good"),
            ),
        ),
        Panel(
            title="Targets",
            look="table",
            unit="none",
            minimum=None,
            description="What each tier promises now, in seconds, and the share of requests it "
            "promises it for. Change them in the gateway's user_config, `tiers`.",
            queries=(
                Query(
                    'max by (tier, slo) (tailrace_slo_target_seconds{job=~"$job", tier=~"$tier"})',
                    "target",
                ),
                Query(
                    'max by (tier) (tailrace_slo_objective_ratio{job=~"$job", tier=~"$tier"})',
                    "objective",
                ),
            ),
        ),
    ),
)

_PHASES = Row(
    "Where the time goes",
    (
        Panel(
            title="Phases, p99 of each, stacked",
            look="stacked",
            unit="s",
            width=12,
            height=9,
            description="The p99 of each phase by itself: the tallest one is where the tail is "
            "made. queue: add decode slots. prefill: add prefill replicas or smaller chunks. "
            "stream: output length, batch size or slow readers.",
            queries=(
                Query(
                    quantile(0.99, _PHASE, REQUESTS, "phase"),
                    "{{phase}}",
                ),
            ),
        ),
        Panel(
            title="Phases, mean, stacked",
            look="stacked",
            unit="s",
            width=12,
            height=9,
            description="Phases follow each other without a gap, so this adds up to the mean "
            f"duration. In order: {', '.join(PHASES)}.",
            queries=(
                Query(
                    f"{rate(f'{_PHASE}_sum', REQUESTS, 'phase')}\n/ on () group_left ()\n"
                    f"({total(f'{_DURATION}_count', REQUESTS)} > 0)",
                    "{{phase}}",
                ),
                Query(
                    share(
                        total(f"{_DURATION}_sum", REQUESTS), total(f"{_DURATION}_count", REQUESTS)
                    ),
                    "duration",
                    limit=True,
                ),
            ),
        ),
        Panel(
            title="Phases account for",
            look="stat",
            unit="percentunit",
            width=4,
            height=4,
            decimals=2,
            minimum=None,
            red_below=0.95,
            description="Sum of the phases over the durations: 100 % unless the breakdown has a "
            "defect. Anything else: do not trust the panels beside it, and report it.",
            queries=(
                Query(share(total(f"{_PHASE}_sum", REQUESTS), total(f"{_DURATION}_sum", REQUESTS))),
            ),
        ),
        Panel(
            title="First token, with and without streaming",
            unit="s",
            width=20,
            height=6,
            description="Without streaming the first token is when it is known, with it when it is "
            "written. Only streaming high: slow readers, or the gateway's processor is full.",
            queries=(
                Query(
                    quantile(0.99, "tailrace_request_ttft_seconds", REQUESTS, "streaming"),
                    "p99, streaming {{streaming}}",
                ),
                Query(
                    mean("tailrace_request_ttft_seconds", REQUESTS, "streaming"),
                    "mean, streaming {{streaming}}",
                ),
            ),
        ),
    ),
)

_OUTSIDE = Row(
    "Outside the model",
    (
        Panel(
            title="Tools and retrieval",
            unit="s",
            width=24,
            height=6,
            empty="only clients that send spans have any",
            description="Time that clients told of: tools, retrieval and other work around the "
            "model. High here: the model is not what makes the application slow.",
            queries=(
                Query(quantile(0.5, _SPANS, REQUESTS, "kind"), "{{kind}} p50"),
                Query(quantile(0.99, _SPANS, REQUESTS, "kind"), "{{kind}} p99"),
            ),
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Answers by status",
            look="stacked",
            unit="reqps",
            description="499: the client left. 429 and 503: refused for load, see the queue. 5xx "
            "otherwise: search the gateway's log for the request id.",
            queries=(Query(rate("tailrace_requests_total", REQUESTS, "code"), "{{code}}"),),
        ),
        Panel(
            title="Clients that left, by phase",
            look="stacked",
            unit="reqps",
            empty="a phase has a series once a client left in it",
            description="In queue or prefill: their patience is shorter than the wait. In stream: "
            "they had enough, or their connection broke.",
            queries=(
                Query(rate("tailrace_client_disconnects_total", MODEL, "phase"), "{{phase}}"),
            ),
        ),
        Panel(
            title="Choices by finish reason",
            look="stacked",
            unit="reqps",
            description="Many `length`: outputs run into their limits; clients may want larger "
            "ones, or the model does not stop. `error`: see the decode replicas' logs.",
            queries=(
                Query(rate("tailrace_request_finishes_total", REQUESTS, "reason"), "{{reason}}"),
            ),
        ),
        Panel(
            title="Tokens in and out",
            unit="short",
            description="Prompt and output tokens a second. Which pool works is their ratio: "
            "prompts load prefill, outputs load decode.",
            queries=(
                Query(rate("tailrace_input_tokens_total", REQUESTS, "tier"), "{{tier}} in"),
                Query(rate("tailrace_output_tokens_total", REQUESTS, "tier"), "{{tier}} out"),
            ),
        ),
        Panel(
            title="Prompt length",
            unit="short",
            description="Tokens of a prompt. A rising p99 makes first tokens slower for everybody "
            "behind it: smaller prefill chunks, or a limit on prompts.",
            queries=tuple(
                Query(quantile(q, "tailrace_request_input_tokens", REQUESTS), name)
                for q, name in _QUANTILES[:3]
            ),
        ),
        Panel(
            title="Output length",
            unit="short",
            description="Tokens of an answer, all choices together. End-to-end latency follows it; "
            "set default_max_tokens if a model does not stop by itself.",
            queries=tuple(
                Query(quantile(q, "tailrace_request_output_tokens", REQUESTS), name)
                for q, name in _QUANTILES[:3]
            ),
        ),
    ),
)

TAIL = Board(
    uid="tailrace-tail",
    title="Tailrace: tail latency",
    description="Which tier misses its target, how badly, and in which phase. Start here.",
    variables=("job", "model", "tier", "window", "gateway"),
    rows=(_NOW, _TAIL, _LEVEL, _PHASES, _OUTSIDE, _TRAFFIC),
)
