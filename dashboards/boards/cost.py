"""What a million tokens cost, and how much of it helped nobody."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import MODEL, REQUESTS, share, total

_REPLICAS = f'sum(max by (model, role) (tailrace_replicas_up{{{MODEL}, role=~"prefill|decode"}}))'
_A_SECOND = f"$replica_hour * {_REPLICAS} / 3600"


def _million(tokens: str) -> str:
    return f"1e6 * {share(_A_SECOND, tokens)}"


_MONEY = Row(
    "Money",
    (
        Panel(
            title="Cost of a million output tokens",
            look="stat",
            unit="none",
            decimals=2,
            description="All prefill and decode replicas at the price above, over the tokens given "
            "to clients. High at low load: scale down, or fill up with batch work.",
            queries=(Query(_million(total("tailrace_output_tokens_total", REQUESTS))),),
        ),
        Panel(
            title="Cost of a million good tokens",
            look="stat",
            unit="none",
            decimals=2,
            description="The same over tokens of requests inside every target. Far above the "
            "figure beside it: you pay for answers that came too late; see the tail first.",
            queries=(Query(_million(total("tailrace_goodput_tokens_total", REQUESTS))),),
        ),
        Panel(
            title="Cost of a million tokens, prompts included",
            look="stat",
            unit="none",
            decimals=2,
            description="Prompt and output tokens together, as most price lists do not count. Use "
            "it to compare workloads with different shares of prompts.",
            queries=(
                Query(
                    _million(
                        f"({total('tailrace_input_tokens_total', REQUESTS)} + "
                        f"{total('tailrace_output_tokens_total', REQUESTS)})"
                    )
                ),
            ),
        ),
        Panel(
            title="Cost over time",
            unit="none",
            width=16,
            description="A million output tokens, all and good. Rising at night is idle capacity; "
            "rising by day is work that helps nobody.",
            queries=(
                Query(_million(total("tailrace_output_tokens_total", REQUESTS)), "output"),
                Query(_million(total("tailrace_goodput_tokens_total", REQUESTS)), "good"),
            ),
        ),
        Panel(
            title="Replicas paid for",
            unit="short",
            decimals=0,
            description="Prefill and decode replicas that are up. Compare its shape with that of "
            "the load: what does not follow is paid for and idle.",
            queries=(
                Query(
                    "max by (model, role) "
                    f'(tailrace_replicas_up{{{MODEL}, role=~"prefill|decode"}})',
                    "{{model}} {{role}}",
                ),
            ),
        ),
    ),
)

_WORK = Row(
    "Work",
    (
        Panel(
            title="Processor seconds for 1,000 output tokens",
            unit="s",
            description="Of all processes of a role. The gateway's share is our overhead: rising "
            "without a change in traffic is a regression.",
            queries=(
                Query(
                    "1000 * sum by (role) (rate(tailrace_process_cpu_seconds_total"
                    '{job=~"$job"}[$window]))\n/ on () group_left ()\n'
                    f"({total('tailrace_output_tokens_total', REQUESTS)} > 0)",
                    "{{role}}",
                ),
            ),
        ),
        Panel(
            title="Energy for 1,000 output tokens",
            unit="joule",
            empty="there are figures of devices only where a replica owns one",
            description="Joules of all GPUs. Falls with larger batches: if it is high at low load, "
            "fewer replicas would do.",
            queries=(
                Query(
                    "1000 * "
                    + share(
                        total("tailrace_gpu_energy_joules_total", MODEL),
                        total("tailrace_output_tokens_total", REQUESTS),
                    )
                ),
            ),
        ),
        Panel(
            title="Output that helped nobody",
            unit="percentunit",
            maximum=1.0,
            description="Output tokens of requests that missed a target, failed or were left. Shed "
            "load before it starts instead of after.",
            queries=(
                Query(
                    "1 - "
                    + share(
                        total("tailrace_goodput_tokens_total", REQUESTS),
                        total("tailrace_output_tokens_total", REQUESTS),
                    )
                ),
            ),
        ),
    ),
)

COST = Board(
    uid="tailrace-cost",
    title="Tailrace: cost of tokens",
    description="What a million tokens cost, and how much of it helped nobody.",
    variables=("job", "model", "tier", "replica_hour", "window", "gateway"),
    rows=(_MONEY, _WORK),
)
