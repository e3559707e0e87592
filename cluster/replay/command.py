"""`tailrace replay`: real traffic against an OpenAI endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from cluster.cli import emit, json_option, say
from cluster.report.command import figure_options, prices_of, slo_of
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.replay.arrivals import Profile
    from cluster.replay.mix import Part
    from cluster.replay.replay import Spec
    from cluster.replay.trace import Trace


@click.command()
@click.argument("traces", metavar="[NAME=]TRACE...", nargs=-1, required=True)
@click.option("--url", help="Server to load. Default: the running session, else port 8000.")
@click.option(
    "--mix",
    metavar="SOURCE=SHARE:TIER,...",
    help="How much of the traffic is which trace, at which tier; or a YAML file with parts. A "
    "source is a trace's name or a part of it.",
)
@click.option("--format", "format_name", help="Of the traces. Default: told from their fields.")
@click.option("--length-factor", type=float, default=1.0, show_default=True, help="Of all lengths.")
@click.option("--time-factor", type=float, default=1.0, show_default=True, help="Of all gaps.")
@click.option("--rate", type=float, help="Requests a second wanted, instead of a time factor.")
@click.option(
    "--arrivals",
    type=click.Choice(["trace", "poisson", "constant"]),
    default="trace",
    show_default=True,
    help="Traces without arrivals of their own are poisson.",
)
@click.option("--ramp", metavar="FIRST:LAST:SECONDS", help="Multiples of the rate, evenly between.")
@click.option("--bursts", metavar="EVERY:FOR:TIMES", help="Seconds, seconds, multiple of the rate.")
@click.option("--users", type=click.IntRange(min=1), help="Closed loop with so many users.")
@click.option("--requests", type=click.IntRange(min=1), help="Stop after so many.")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), help="Seconds offered.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, help="Each trace so often, in a row."
)
@click.option("--skip", type=click.FloatRange(min=0), default=0.0, help="Seconds of the trace.")
@click.option(
    "--tick",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    help="Seconds over which a Mooncake tick is spread; 0 leaves it on one instant.",
)
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True
)
@click.option(
    "--prompts",
    type=click.Choice(["text", "ids"]),
    default="text",
    show_default=True,
    help="Token ids are exact everywhere; completions only.",
)
@click.option("--no-stream", is_flag=True, help="Ask for whole answers.")
@click.option("--count-tokens", is_flag=True, help="Ask for the tokens of every chunk.")
@click.option("--model", help="For parts of the mix that name none. Default: the first served.")
@click.option("--tier", help="Service tier, without --mix.")
@click.option("--sampling", metavar="JSON", help='Fields of the body: {"temperature": 0.7}.')
@click.option("--stop", multiple=True, help="Stop string. May be given more than once.")
@click.option("--free-length", is_flag=True, help="Let the model end answers before their length.")
@click.option("--turns", type=click.IntRange(min=1), help="So many requests make a conversation.")
@click.option("--think", type=click.FloatRange(min=0), help="Seconds from an answer to a turn.")
@click.option("--disconnects", type=click.FloatRange(0, 1), help="Share of clients that leave.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="As the openai client makes them; its own default is 2.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for a request, retries included.",
)
@click.option("--max-context", type=click.IntRange(min=2), help="Tokens. Default: the model's.")
@click.option("--max-output", type=click.IntRange(min=1), help="Longest answer asked for.")
@click.option(
    "--tokenizer", help="Folder or model source, for servers that do not answer /tokenize."
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=1,
    help="Of the server's prefix cache. Default: the session's own, else single tokens.",
)
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@click.option(
    "--keys", type=click.Path(path_type=Path), help="YAML file: API keys by tenant of the mix."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--label", default="", help="What reports call this run.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for outcomes.jsonl and the report: JSON, CSV, HTML.",
)
@figure_options
@json_option
def replay(traces: tuple[str, ...], **options: Any) -> None:
    """Offer the traffic of TRACE to a server and report what came of every request.

    An open loop (but for --users): a request is sent when it is due, whatever became of the
    others, and lateness is reported. Formats: Azure, Mooncake, BurstGPT, ServeGen-like lines,
    CSVs of lengths, and our gateway's own request log. Ctrl-C ends it with the report so far.
    """
    from cluster.chat import default_url
    from cluster.replay.replay import RAW_FILE, offer, open_raw, prepare
    from cluster.report.figures import summarise
    from cluster.report.files import write_report
    from cluster.report.pools import PoolSampler
    from cluster.report.single import headline

    slo = slo_of(options["slo"])
    prices = prices_of(options["price"], options["prices_file"], options["currency"])
    spec = spec_of(traces, options)
    prepared = prepare(
        spec,
        options["url"] or default_url(),
        api_key=options["api_key"],
        keys=_keys(options["keys"]),
    )
    run = prepared.run
    rate = f"{run.rate:.2f} a second" if run.rate else f"{run.loop} loop"
    say(f"{run.num_requests} requests to {run.url}, {rate}")
    directory: Path | None = options["out"]
    if directory is None:
        done, outcomes = offer(prepared, say=say)
        summary = summarise(done, outcomes, slo, prices)
    else:
        with open_raw(directory) as raw, PoolSampler(prepared.target.url) as pools:
            done, outcomes = offer(prepared, raw=raw, say=say)
        samples = pools.during(done.end.duration_s if done.end else 0.0)
        summary = write_report(
            directory, done, outcomes, slo=slo, prices=prices, pools=samples
        ).summary
    if options["as_json"]:
        emit(summary)
        return
    say(headline(summary))
    if directory is not None:
        say(f"raw result: {directory / RAW_FILE}")
        click.echo(directory / "report.html")


def spec_of(traces: Sequence[str], options: dict[str, Any]) -> Spec:
    """What the options of `replay` ask for. Raises ConfigError, TraceError."""
    from cluster.replay.load import Patience
    from cluster.replay.replay import Spec
    from cluster.replay.retry import RetryPolicy
    from cluster.replay.workload import Factors

    read = tuple(
        trace.repeated(options["repeat"])
        for trace in _traces(traces, options["format_name"], options["tick"])
    )
    return Spec(
        traces=read,
        mix=_mix(options, read),
        factors=Factors(
            length=options["length_factor"],
            time=options["time_factor"],
            rate=options["rate"],
            arrivals=options["arrivals"],
            profile=_profile(options["ramp"], options["bursts"]),
            users=options["users"],
            max_requests=options["requests"],
            max_duration_s=options["duration"],
            skip_s=options["skip"],
            max_context_tokens=options["max_context"],
            max_output_tokens=options["max_output"],
            block_tokens=options["block_tokens"],
            seed=options["seed"],
        ),
        patience=Patience(
            timeout_s=options["timeout"], retry=RetryPolicy(max_retries=options["retries"])
        ),
        endpoint=options["endpoint"],
        prompts=options["prompts"],
        stream=not options["no_stream"],
        count_tokens=options["count_tokens"],
        model=options["model"],
        tokenizer=options["tokenizer"],
        label=options["label"],
    )


def _traces(arguments: Sequence[str], format_name: str | None, tick_s: float) -> tuple[Trace, ...]:
    from cluster.replay.formats import read_trace

    read: list[Trace] = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = "", argument
        read.append(read_trace(Path(path), name=name or None, format=format_name, tick_s=tick_s))
    return tuple(read)


def _mix(options: dict[str, Any], traces: Sequence[Trace]) -> tuple[Part, ...]:
    """The parts, with what the other options say for those that do not say it themselves."""
    from cluster.replay.mix import Part, parse_mix

    if options["mix"] is None:
        parts = tuple(Part(source=trace.name, tier=options["tier"]) for trace in traces)
        if options["tier"] is not None:
            parts = parse_mix(",".join(f"{trace.name}:{options['tier']}" for trace in traces))
    elif options["tier"] is not None:
        raise ConfigError("--mix and --tier: the mix names tiers itself; leave --tier out")
    else:
        parts = parse_mix(options["mix"])
    said = {
        "model": options["model"],
        "sampling": _sampling(options["sampling"]),
        "stop": options["stop"] or None,
        "fixed_length": False if options["free_length"] else None,
        "turns": options["turns"],
        "think_s": options["think"],
        "disconnects": options["disconnects"],
    }
    return tuple(
        part.model_copy(
            update={
                "source": _source(part.source, traces),
                **{
                    name: value
                    for name, value in said.items()
                    if value is not None and name not in part.model_fields_set
                },
            }
        )
        for part in parts
    )


def _source(name: str, traces: Sequence[Trace]) -> str:
    """The trace that is called so, or whose name alone has it in it."""
    names = [trace.name for trace in traces]
    if name in names:
        return name
    found = [each for each in names if name in each]
    if len(found) != 1:
        raise ConfigError(
            f"--mix: source {name!r} is {'more than one' if found else 'none'} of the traces "
            f"given ({', '.join(names)}): write NAME=PATH"
        )
    return found[0]


def _sampling(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--sampling {text!r}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--sampling {text!r}: must be an object")
    return cast("dict[str, Any]", value)


def _profile(ramp: str | None, bursts: str | None) -> Profile:
    from cluster.replay.arrivals import Bursts, Profile, Ramp

    return Profile(
        ramp=None if ramp is None else Ramp(*_three("--ramp", ramp)),
        bursts=None if bursts is None else Bursts(*_three("--bursts", bursts)),
    )


def _three(option: str, text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: must be three numbers with colons") from None
    return first, second, third


def _keys(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    import yaml

    try:
        value = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--keys {path}: {error.strerror}") from None
    except yaml.YAMLError:
        raise ConfigError(f"--keys {path}: not YAML") from None  # its message quotes the keys
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(key, str)
        for name, key in cast("dict[Any, Any]", value).items()
    ):
        raise ConfigError(f"--keys {path}: must map tenants to API keys")
    return cast("dict[str, str]", value)
