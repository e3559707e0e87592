"""What each replica's engine does: batches, steps, KV memory, caches, and the processes around."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import ENGINE as SELECT
from dashboards.queries import MODEL, POOL, mean, quantile, rate, share

_JOB = 'job=~"$job"'


def _tail(name: str) -> tuple[Query, ...]:
    return (
        Query(quantile(0.5, name, SELECT, "model_name"), "{{model_name}} p50"),
        Query(quantile(0.99, name, SELECT, "model_name"), "{{model_name}} p99"),
    )


_BATCH = Row(
    "Batch",
    (
        Panel(
            title="Running requests",
            unit="short",
            decimals=0,
            description="Requests in the running batch. One replica far above the others: routing "
            "is uneven; see who chooses on the prefill and decode board.",
            queries=(
                Query(f"sum by (replica) (vllm:num_requests_running{{{SELECT}}})", "{{replica}}"),
            ),
        ),
        Panel(
            title="Waiting in the engine",
            unit="short",
            decimals=0,
            description="Admitted, and not running yet: for KV memory, or for KV on its way. "
            "Growing: lower max_running_requests, or add memory for KV.",
            queries=(
                Query(f"sum by (replica) (vllm:num_requests_waiting{{{SELECT}}})", "{{replica}}"),
            ),
        ),
        Panel(
            title="Preemptions",
            unit="short",
            description="Requests that lost their blocks to another and start over, a second. More "
            "than a few a minute: too many run for the memory there is.",
            queries=(Query(rate("vllm:num_preemptions_total", SELECT, "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Step time",
            unit="s",
            description="Plan, forward pass, sampling, commit. The decode p99 is the floor of "
            "every gap between tokens: smaller chunks or fewer running requests lower it.",
            queries=tuple(
                Query(
                    quantile(q, "tailrace_engine_step_seconds", POOL, "role"),
                    f"{{{{role}}}} {name}",
                )
                for q, name in ((0.5, "p50"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Time spent in steps",
            unit="percentunit",
            maximum=1.0,
            red_above=0.95,
            description="How busy each engine is. Prefill at 100 %: first tokens queue there; "
            "decode at 100 % is normal under load, what counts is its step time.",
            queries=(
                Query(
                    "sum by (role, replica) "
                    f"(rate(tailrace_engine_step_seconds_sum{{{POOL}}}[$window]))",
                    "{{role}} {{replica}}",
                ),
            ),
        ),
        Panel(
            title="Steps planned ahead",
            unit="percentunit",
            maximum=1.0,
            description="Steps planned while the one before was computed. 0: overlap is off. Low "
            "with it on: blocks are short, or somebody waits for what each step gives back.",
            queries=(
                Query(
                    share(
                        rate("tailrace_engine_steps_ahead_total", POOL, "role"),
                        rate("tailrace_engine_step_seconds_count", POOL, "role"),
                    ),
                    "{{role}}",
                ),
            ),
        ),
        Panel(
            title="Tokens made for nothing",
            unit="short",
            description="Sampled for requests that had ended, a second: with overlap the last row "
            "of most, without it of those who were cancelled. Near the tokens computed: answers "
            "are so short that overlap does not pay.",
            queries=(
                Query(rate("tailrace_engine_discarded_tokens_total", POOL, "role"), "{{role}}"),
            ),
        ),
        Panel(
            title="Tokens a step",
            unit="short",
            description="Prompt and output together. Decode near 1 with many waiting: something "
            "else than the batch limits it; see KV memory.",
            queries=_tail("vllm:iteration_tokens_total"),
        ),
    ),
)

_TOKENS = Row(
    "Tokens and latency inside the engine",
    (
        Panel(
            title="Tokens computed",
            unit="short",
            description="A second, by the engines' own count. Flat while the queue grows: this is "
            "what the hardware gives; add replicas.",
            queries=(
                Query(
                    rate("vllm:prompt_tokens_total", SELECT, "model_name"), "{{model_name}} prompt"
                ),
                Query(
                    rate("vllm:generation_tokens_total", SELECT, "model_name"),
                    "{{model_name}} output",
                ),
            ),
        ),
        Panel(
            title="First token, in the engine",
            unit="s",
            description="From the decode replica's receipt of the request, KV from elsewhere "
            "included. Low here and high for clients: the time went into the queue.",
            queries=_tail("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            title="Gap between tokens, in the engine",
            unit="s",
            description="Low here and high for clients: links, the gateway's processor, or slow "
            "readers. High here: see step time and batch.",
            queries=_tail("vllm:inter_token_latency_seconds"),
        ),
        Panel(
            title="Time per output token, in the engine",
            unit="s",
            description="A request's mean gap. A p99 far above the p50: some requests were "
            "preempted or paused for their reader.",
            queries=_tail("vllm:request_time_per_output_token_seconds"),
        ),
        Panel(
            title="Whole request, in the engine",
            unit="s",
            description="From receipt to last token. The difference to the clients' end to end is "
            "queue, tokenising and streaming.",
            queries=(
                *_tail("vllm:e2e_request_latency_seconds"),
                Query(
                    quantile(0.99, "vllm:request_decode_time_seconds", SELECT, "model_name"),
                    "{{model_name}} p99, decode alone",
                ),
            ),
        ),
        Panel(
            title="Requests by how they ended",
            look="stacked",
            unit="reqps",
            description="In the engines. error: the model gave nothing that could be sampled; see "
            "the replica's log. cancelled: clients left or deadlines passed.",
            queries=(
                Query(
                    rate("vllm:request_success_total", SELECT, "finished_reason"),
                    "{{finished_reason}}",
                ),
            ),
        ),
    ),
)

_KV = Row(
    "KV memory and caches",
    (
        Panel(
            title="KV memory in use",
            unit="percentunit",
            maximum=1.0,
            red_above=0.95,
            description="Share of blocks held by requests and leases. Near 100 %: preemptions "
            "follow; more kv_memory_bytes, or fewer running requests.",
            queries=(
                Query(f"max by (replica) (vllm:kv_cache_usage_perc{{{SELECT}}})", "{{replica}}"),
            ),
        ),
        Panel(
            title="Memory a replica takes",
            unit="bytes",
            description="Weights and the KV pool, by replica. Little KV beside much weight: "
            "quantise the weights, or kv_dtype: int8.",
            queries=(
                Query(
                    f"sum by (role, replica) (tailrace_weight_bytes{{{POOL}}})",
                    "{{role}} {{replica}} weights",
                ),
                Query(
                    f"sum by (role, replica) (tailrace_kv_pool_bytes{{{POOL}}})",
                    "{{role}} {{replica}} KV",
                ),
            ),
        ),
        Panel(
            title="Longest requests that fit at once",
            unit="short",
            description="Tokens that a KV pool holds over the longest request taken. Below 1 "
            "nothing of full length fits; near 1 such a request preempts all others: more "
            "kv_memory_bytes, or a smaller max_context_tokens.",
            queries=(
                Query(
                    f"min by (role, replica) (tailrace_kv_pool_tokens{{{POOL}}})"
                    f" / min by (role, replica) (tailrace_context_tokens{{{POOL}}})",
                    "{{role}} {{replica}}",
                ),
            ),
        ),
        Panel(
            title="Prefix cache hits",
            unit="percentunit",
            maximum=1.0,
            description="Share of prompt tokens found in the engines' prefix caches. Falling with "
            "the same traffic: memory is too small to keep prefixes, or routing scatters them.",
            queries=(
                Query(
                    share(
                        rate("vllm:prefix_cache_hits_total", SELECT, "model_name"),
                        rate("vllm:prefix_cache_queries_total", SELECT, "model_name"),
                    ),
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            title="Prompt tokens by where their KV came from",
            look="stacked",
            unit="short",
            description="local_compute is what decode replicas spend on prompts between steps. "
            "Rising: lower local_prefill_tokens so that prefill replicas take it.",
            queries=(
                Query(rate("vllm:prompt_tokens_by_source_total", SELECT, "source"), "{{source}}"),
            ),
        ),
        Panel(
            title="Cached tokens a request",
            unit="short",
            description="Prompt tokens that nobody computed for the request, as clients are told. "
            "Mean and p99: a high p99 alone is one conversation that grows.",
            queries=(
                Query(
                    mean(
                        "tailrace_request_cached_tokens",
                        MODEL,
                        "model",
                    ),
                    "{{model}} mean",
                ),
                Query(
                    quantile(
                        0.99,
                        "tailrace_request_cached_tokens",
                        MODEL,
                        "model",
                    ),
                    "{{model}} p99",
                ),
            ),
        ),
        Panel(
            title="KV blocks there are",
            look="table",
            unit="none",
            width=16,
            minimum=None,
            description="Tokens a block and number of blocks, by replica. Replicas that differ: a "
            "rollout is under way, or machines have different memory.",
            queries=(
                Query(
                    "max by (model_name, replica, block_size, num_gpu_blocks) "
                    f"(vllm:cache_config_info{{{SELECT}}})"
                ),
            ),
        ),
    ),
)

_PROCESSES = Row(
    "Processes",
    (
        Panel(
            title="Processor time",
            unit="short",
            description="Processors in use, by role. A gateway near 1: one process cannot do more; "
            "add gateways.",
            queries=(
                Query(
                    "sum by (role, replica) "
                    f"(rate(tailrace_process_cpu_seconds_total{{{_JOB}}}[$window]))",
                    "{{role}} {{replica}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            unit="bytes",
            description="Memory of each process. Rising without end over days: a leak; restart the "
            "replica and report it.",
            queries=(
                Query(
                    f"max by (role, replica) (tailrace_process_resident_memory_bytes{{{_JOB}}})",
                    "{{role}} {{replica}}",
                ),
            ),
        ),
        Panel(
            title="Running for",
            unit="s",
            description="Since each process started. Back to 0: it was restarted; `tailrace "
            "status` and Ray's log say why.",
            queries=(
                Query(
                    "time() - max by (role, replica) "
                    f"(tailrace_process_start_time_seconds{{{_JOB}}})",
                    "{{role}} {{replica}}",
                ),
            ),
        ),
        Panel(
            title="Versions",
            look="table",
            unit="none",
            width=24,
            height=6,
            minimum=None,
            description="Processes by role and version. More than one version: a rollout is under "
            "way, or did not finish.",
            queries=(Query(f"count by (role, version) (tailrace_build_info{{{_JOB}}})"),),
        ),
    ),
)

ENGINE = Board(
    uid="tailrace-engine",
    title="Tailrace: engine, KV and caches",
    description="What each replica's engine does with its steps and its memory.",
    variables=("job", "model", "replica", "window", "gateway"),
    rows=(_BATCH, _TOKENS, _KV, _PROCESSES),
)
