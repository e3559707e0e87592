"""What every figure of a report means, in one table that each report carries.

Names that AIPerf and guidellm use too mean the same here; where theirs differ, the table says how.
Their definitions were read in AIPerf 0.13.0 (`aiperf/metrics/types/`) and guidellm 0.8.1
(`guidellm/schemas/base/request_stats.py`, `guidellm/benchmark/schemas/metrics.py`); vLLM's are
those of `vllm bench serve`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    key: str
    """In `report.json`."""

    title: str
    unit: str
    text: str
    elsewhere: str = ""
    """What AIPerf, guidellm and vLLM call it, or how theirs differ."""


LATENCIES = (
    Definition(
        key="queue_s",
        title="Queue",
        unit="s",
        text="Time in the server's admission queue, as the server tells it for each request "
        "(`server-timing`, phase queue). Missing where the server does not tell.",
        elsewhere="Not known to AIPerf or guidellm, which see the client's side only.",
    ),
    Definition(
        key="ttft_s",
        title="TTFT",
        unit="s",
        text="From the first byte of the request sent to the first chunk with content (text, "
        "reasoning or a tool call); a chunk with a role alone does not count. Retries are inside.",
        elsewhere="AIPerf time_to_first_token, guidellm time_to_first_token_ms. vLLM counts the "
        "role chunk.",
    ),
    Definition(
        key="ttft_scheduled_s",
        title="TTFT from schedule",
        unit="s",
        text="The same, counted from when the request was due: what a late client hides is inside. "
        "Targets are judged by it.",
        elsewhere="AIPerf's effective latency has the same aim (no coordinated omission).",
    ),
    Definition(
        key="itl_s",
        title="ITL",
        unit="s",
        text="Mean gap between tokens of one request: from its first to its last chunk with "
        "content, divided by output tokens less one. One value a request with two tokens or more.",
        elsewhere="AIPerf inter_token_latency (its request_latency ends with the last content "
        "too); guidellm inter_token_latency_ms for one request. AIPerf's percentiles are over "
        "requests, like these.",
    ),
    Definition(
        key="itl_by_token_s",
        title="ITL by token",
        unit="s",
        text="The same values, each counted once for every gap it stands for (output tokens less "
        "one), so that long answers weigh more.",
        elsewhere="guidellm weighs its ITL mean and percentiles so.",
    ),
    Definition(
        key="icl_s",
        title="Chunk gap",
        unit="s",
        text="Every single gap between neighbouring chunks with content, of all requests together: "
        "the one that shows stalls. Chunks that came in one read are 0 apart.",
        elsewhere="AIPerf inter_chunk_latency; vLLM calls this ITL.",
    ),
    Definition(
        key="tpot_s",
        title="TPOT",
        unit="s",
        text="(end to end less TTFT) / (output tokens less one), with the end of the answer and "
        "not its last content as the end.",
        elsewhere="vLLM and inference-perf TPOT. guidellm's time_per_output_token_ms is another "
        "thing: see NTPOT.",
    ),
    Definition(
        key="ntpot_s",
        title="NTPOT",
        unit="s",
        text="From sending to the last chunk with content, divided by all output tokens.",
        elsewhere="guidellm time_per_output_token_ms; inference-perf NTPOT up to the last bytes.",
    ),
    Definition(
        key="e2e_s",
        title="End to end",
        unit="s",
        text="From the first byte sent to the last byte of the answer. Retries are inside.",
        elsewhere="guidellm request_latency. AIPerf request_latency ends with the last content, "
        "before finish reason and usage.",
    ),
    Definition(
        key="e2e_scheduled_s",
        title="End to end from schedule",
        unit="s",
        text="The same, counted from when the request was due.",
        elsewhere="guidellm: latency from targeted_start.",
    ),
)
"""Of requests that were answered in full. Each has count, mean, p50, p95, p99, p99.9 and max."""

SHARES = (
    Definition(
        key="goodput",
        title="Goodput",
        unit="share of offered",
        text="Requests that met every target of their tier, divided by all that were offered: "
        "shed, failed, timed-out and left ones are misses, as in the server's own metrics. Beside "
        "it: such requests, and their output tokens, a second. An answer "
        "without a first chunk (not streamed) is judged by its end; ITL by `itl_s`, only where "
        "there are two tokens or more.",
        elsewhere="AIPerf and vLLM count good requests a second; theirs leave failed ones out of "
        "the share.",
    ),
    Definition(
        key="shed_share",
        title="Shed",
        unit="share of offered",
        text="Refused with 429 or 503 before any of the answer, after the retries that were asked "
        "for.",
    ),
    Definition(
        key="failed_share",
        title="Failed",
        unit="share of offered",
        text="Errors and time-outs: everything else that was not answered in full.",
    ),
    Definition(
        key="cached_share",
        title="Cached, measured",
        unit="share of input tokens",
        text="Sum of the cached tokens that the server reports, divided by the sum of its input "
        "tokens, over answers that report them.",
        elsewhere="AIPerf: cache read share of usage. inference-perf: cache hit rate.",
    ),
    Definition(
        key="predicted_cached_share",
        title="Cached, predicted",
        unit="share of input tokens",
        text="What an infinite prefix cache would have held when each request was due, by "
        "arithmetic over whole blocks of the trace, divided by the planned input tokens; over the "
        "same answers.",
    ),
)

RATES = (
    Definition(
        key="input_tokens_per_s",
        title="Tokens in",
        unit="tokens/s",
        text="Input tokens of requests answered in full, cached ones included, over the duration.",
    ),
    Definition(
        key="output_tokens_per_s",
        title="Tokens out",
        unit="tokens/s",
        text="Output tokens of requests answered in full, over the duration: from when the first "
        "request was sent to the last byte of all.",
        elsewhere="AIPerf output_token_throughput.",
    ),
    Definition(
        key="requests_per_s",
        title="Requests",
        unit="1/s",
        text="Requests answered in full, over the duration.",
        elsewhere="AIPerf request_throughput.",
    ),
)

OTHERS = (
    Definition(
        key="lateness_s",
        title="Schedule lateness",
        unit="s",
        text="How late the client sent a request. It is the client's own fault, and it says how "
        "far to trust the rest.",
        elsewhere="AIPerf: replay schedule lag.",
    ),
    Definition(
        key="cost",
        title="Cost",
        unit="money per million tokens",
        text="Price of all units of all replicas for the duration, divided by the tokens answered "
        "in full meanwhile; and the same by tokens of requests that met their targets.",
    ),
    Definition(
        key="phases",
        title="Phases",
        unit="s",
        text="Seconds of each request in each phase up to its first token, as the server tells "
        "them in the head of the answer.",
    ),
    Definition(
        key="interval",
        title="Interval (low to high)",
        unit="as the figure",
        text="95 % of the resamples of a stationary bootstrap lie there (Politis and Romano 1994): "
        "it draws runs of neighbouring requests, whose mean length follows from the correlation of "
        "TTFT and end to end (Politis and White 2004), with the seed that is stated. It speaks of "
        "chance within this run, not of what another day or machine would give. Fewer than 10 "
        "requests have none.",
    ),
    Definition(
        key="percentiles",
        title="p50, p95, p99, p99.9",
        unit="as the figure",
        text="Nearest rank: the smallest measured value that at least so many percent of all "
        "values do not exceed. With fewer than 1000 values p99.9 is the largest, with fewer than "
        "100 p99 is: reports mark these.",
    ),
    Definition(
        key="over_offered",
        title="Over everything offered",
        unit="s",
        text="The percentile with every request that got no whole answer counted as infinitely "
        "slow; none where it falls among these.",
        elsewhere="AIPerf: the adj_ metrics.",
    ),
)

DEFINITIONS = (*LATENCIES, *SHARES, *RATES, *OTHERS)


def as_json() -> list[dict[str, str]]:
    return [asdict(each) for each in DEFINITIONS]
