"""Prefill and decode on separate replicas: does the split work, and what does it cost?"""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import MODEL, POOL, quantile, rate, share

_LINK = "a transfer has series once a prompt went to the prefill pool"


def _role(name: str) -> str:
    return f"max by (model, role) ({name}{{{MODEL}}})"


_DECISIONS = Row(
    "Where prompts are computed",
    (
        Panel(
            title="Decisions",
            look="stacked",
            unit="reqps",
            description="disaggregated: on a prefill replica. local: short, cached meanwhile, or "
            "no prefill replica was fit. fallback: remote prefill failed; see the failures.",
            queries=(
                Query(
                    rate("tailrace_pd_decisions_total", MODEL, "decision, reason"),
                    "{{decision}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Share computed apart",
            unit="percentunit",
            maximum=1.0,
            description="Prompts that went to the prefill pool. Near 0 with long prompts: the pool "
            "is unreachable, or local_prefill_tokens is set too high.",
            queries=(
                Query(
                    share(
                        rate(
                            "tailrace_pd_decisions_total",
                            f'{MODEL}, decision="disaggregated"',
                            "model",
                        ),
                        rate("tailrace_pd_decisions_total", MODEL, "model"),
                    ),
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            title="Fallbacks",
            look="stacked",
            unit="reqps",
            description="What was done after remote prefill failed. local slows running streams "
            "down; refused gave clients a 503: bring the prefill pool back first.",
            queries=(
                Query(rate("tailrace_prefill_fallbacks_total", MODEL, "action"), "{{action}}"),
            ),
        ),
    ),
)

_TRANSFER = Row(
    "KV transfer",
    (
        Panel(
            title="Transfer time",
            unit="s",
            empty=_LINK,
            description="From the first chunk asked for to the last one committed; most of it "
            "overlaps with prefill. Rising with flat prompt lengths: the network or a full "
            "window; raise transfer_window_bytes.",
            queries=tuple(
                Query(
                    quantile(q, "tailrace_kv_transfer_seconds", MODEL, "connector"),
                    f"{{{{connector}}}} {name}",
                )
                for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Exposed transfer time",
            unit="s",
            empty=_LINK,
            description="The part that comes after the prompt was computed: what the client waits "
            "for. More than a few percent of prefill: smaller chunks overlap better.",
            queries=(
                Query(quantile(0.5, "tailrace_kv_transfer_exposed_seconds", MODEL), "p50"),
                Query(quantile(0.99, "tailrace_kv_transfer_exposed_seconds", MODEL), "p99"),
            ),
        ),
        Panel(
            title="KV moved",
            unit="Bps",
            description="Bytes a second, sent by prefill and received by decode. They differ by "
            "what was sent again or thrown away. At the network's limit: decode near prefill.",
            queries=(
                Query(
                    rate("tailrace_kv_transfer_bytes_total", MODEL, "connector"),
                    "received, {{connector}}",
                ),
                Query(rate("tailrace_kv_sent_bytes_total", MODEL, "model"), "{{model}} sent"),
            ),
        ),
        Panel(
            title="Failures by stage",
            look="stacked",
            unit="reqps",
            description="connect, link: a replica or the network went. offer: prefill refused. "
            "chunk, final, stall: it stopped in the middle. Each costs a prompt computed again.",
            queries=(
                Query(
                    rate("tailrace_kv_transfer_failures_total", MODEL, "connector, stage, reason"),
                    "{{connector}} {{stage}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Posting a READ",
            unit="s",
            empty="only replicas with transport: nixl have it",
            description="What the library takes before a READ is on its way, for the whole of one "
            "where the kernel copies. Rising: more or smaller blocks; raise block_tokens.",
            queries=tuple(
                Query(quantile(q, "tailrace_kv_post_seconds", MODEL), name)
                for q, name in ((0.5, "p50"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Damaged chunks",
            look="stat",
            unit="short",
            decimals=0,
            red_above=1.0,
            description="Chunks whose checksum was wrong, in the window. Any is a hardware or "
            "driver fault: no answer came from it, but find the host.",
            queries=(
                Query(f"sum(increase(tailrace_kv_checksum_mismatches_total{{{MODEL}}}[$window]))"),
            ),
        ),
        Panel(
            title="Under way",
            unit="bytes",
            description="Bytes sent and not yet confirmed. Flat at max_unacked_bytes: decode takes "
            "chunks slower than prefill makes them.",
            queries=(
                Query(f"sum by (replica) (tailrace_kv_unacked_bytes{{{POOL}}})", "{{replica}}"),
            ),
        ),
    ),
)

_LEASES = Row(
    "Leases and leaks",
    (
        Panel(
            title="Leases and prompts under way",
            unit="short",
            decimals=0,
            description="Exports whose blocks are held, and prompts being computed for others. "
            "Leases that stay while nothing runs: a decode replica died holding them.",
            queries=(
                Query(
                    f"sum by (replica) (tailrace_kv_leases_active{{{POOL}}})", "{{replica}} leases"
                ),
                Query(
                    f"sum by (replica) (tailrace_prefill_sessions{{{POOL}}})", "{{replica}} prompts"
                ),
            ),
        ),
        Panel(
            title="Expired leases",
            look="stat",
            unit="short",
            decimals=0,
            red_above=1.0,
            description="Leases that ended by their deadline, in the window. Should be 0: decode "
            "replicas release what they are done with. Look for those that died or stall.",
            queries=(
                Query(f"sum(increase(tailrace_kv_leases_expired_total{{{MODEL}}}[$window]))"),
            ),
        ),
        Panel(
            title="Leaked blocks",
            look="stat",
            unit="short",
            decimals=0,
            red_above=1.0,
            description="Blocks that belong to no request, lease or prefix on an idle replica. "
            "Must be 0: restart that replica and report the defect.",
            queries=(Query(f"max(tailrace_kv_leaked_blocks{{{POOL}}})"),),
        ),
    ),
)

_POOLS = Row(
    "Pools and routing",
    (
        Panel(
            title="Replicas up",
            unit="short",
            decimals=0,
            description="Processes whose figures are fresh, as gateways see them. Fewer than "
            "configured: `tailrace status` says what Serve makes of it.",
            queries=(Query(_role("tailrace_replicas_up"), "{{model}} {{role}}"),),
        ),
        Panel(
            title="Stale replicas",
            unit="short",
            decimals=0,
            description="They count as running and say nothing. Above 0 for a minute: the process "
            "hangs or cannot be reached; end it and let Serve replace it.",
            queries=(Query(_role("tailrace_stale_endpoints"), "{{model}} {{role}}"),),
        ),
        Panel(
            title="Age of figures",
            unit="s",
            description="Oldest figures shown. Figures come every second; several seconds mean a "
            "busy event loop or a bad network, and everything here is that late.",
            queries=(Query(_role("tailrace_snapshot_age_seconds"), "{{model}} {{role}}"),),
        ),
        Panel(
            title="Who chose the decode replica",
            look="stacked",
            unit="reqps",
            width=8,
            description="queue: as it should be. own: the queue was away and the gateway chose by "
            "itself, without order or fairness.",
            queries=(Query(rate("tailrace_route_decisions_total", MODEL, "policy"), "{{policy}}"),),
        ),
        Panel(
            title="Choices placed again",
            look="stacked",
            unit="reqps",
            width=8,
            description="lost: their replica died. full: a slot that was promised was gone. "
            "Clients saw a pause; many mean replicas keep dying, or two queues at work.",
            queries=(Query(rate("tailrace_resubmissions_total", MODEL, "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Answers that moved",
            look="stacked",
            unit="reqps",
            description="Choices that had begun and went on at another replica: theirs died, hung "
            "or closed. hung: look at the machine and the network, not at the process.",
            queries=(Query(rate("tailrace_migrations_total", MODEL, "reason"), "{{reason}}"),),
        ),
    ),
)

PD = Board(
    uid="tailrace-pd",
    title="Tailrace: prefill and decode",
    description="Does computing prompts apart work, and what does it cost?",
    variables=("job", "model", "replica", "window", "gateway"),
    rows=(_DECISIONS, _TRANSFER, _LEASES, _POOLS),
)
