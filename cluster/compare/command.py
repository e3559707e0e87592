"""`tailrace compare`: sides that are offered the same traffic in turn."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli import emit, interrupt_on_signals, json_option, say
from cluster.replay.command import replay, spec_of
from cluster.report.command import figure_options, slo_of, slo_option
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.compare.contest import Load, Record
    from cluster.compare.ready import Variant
    from cluster.compare.sides import Side

_OWN = frozenset(
    ("traces", "url", "keys", "label", "out", "as_json", "rate", "users", "duration", "requests")
)
"""Options of `replay` that mean something else here, or nothing."""

_DURATION_S = 35.0


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `replay` that say what is offered."""
    own = {*_OWN, *(each.name for each in _figure_parameters())}
    parameters = [each for each in replay.params if each.name not in own]
    # As click's own decorators leave them, the last first.
    before: list[click.Parameter] = getattr(command, "__click_params__", [])
    setattr(command, "__click_params__", [*before, *reversed(parameters)])  # noqa: B010
    return command


def _figure_parameters() -> list[click.Parameter]:
    def nothing() -> None: ...

    return click.command()(figure_options(nothing)).params


@click.command()
@click.argument(
    "configs", metavar="[A.yaml [B.yaml ...]]", nargs=-1, type=click.Path(path_type=Path)
)
@click.option(
    "--trace",
    "traces",
    metavar="[NAME=]TRACE",
    multiple=True,
    help="What is offered. May be given more than once.",
)
@click.option("--ready", metavar="NAME", help="A comparison by name; `--ready list` names them.")
@click.option("--ladder", type=click.Path(path_type=Path), help="YAML list of rungs: name, set.")
@click.option("--url-b", help="Instead of a second file: a server that runs.")
@click.option("--peer", metavar="NAME", help="Another server, started here; `--peer list`.")
@click.option(
    "--peer-bin",
    type=click.Path(path_type=Path),
    help="Directory with the peer's programs, such as the bin of its own environment.",
)
@click.option("--peer-model", help="Weights in the peer's own form. Default: made from ours.")
@click.option("--peer-arg", multiple=True, help="Added to the peer's command line.")
@click.option("--set", "sets", metavar="PATH=VALUE", multiple=True, help="Edit of every file.")
@click.option("--set-a", metavar="PATH=VALUE", multiple=True, help="Edit of the first file.")
@click.option("--set-b", metavar="PATH=VALUE", multiple=True, help="Edit of the second file.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--loads",
    metavar="MULTIPLE,...",
    help="Multiples of the first side's capacity, which a closed loop finds. Default: 0.8.",
)
@click.option("--rate", metavar="R,...", help="Requests a second, instead of --loads.")
@click.option("--users", metavar="N,...", help="Closed loops, instead of --loads.")
@click.option(
    "--duration",
    type=click.FloatRange(min=1),
    default=_DURATION_S,
    show_default=True,
    help="Seconds that each run of an open loop is offered.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Of a run at most.")
@click.option("--capacity-users", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--capacity-requests", type=click.IntRange(min=2), default=64, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory. Default: compare-DATE here."
)
@click.option(
    "--again",
    type=click.Path(path_type=Path),
    help="Make the report of such a directory again from its raw results; runs nothing.",
)
@_workload_options
@slo_option
@json_option
def compare(configs: tuple[Path, ...], **options: Any) -> None:
    """Offer the same traffic to two configurations or more, or to one and another server.

    Sides take turns (A B B A ...), one at a time on this machine, each started anew. Figures are
    compared pair by pair with intervals, and the report says where each side loses. With --ready or
    --ladder the sides follow from A.yaml (the packaged configuration unless given).
    """
    from cluster.compare.contest import Contest, Plan, Record
    from cluster.compare.peers import PEERS
    from cluster.compare.peers.model import model_of
    from cluster.compare.ready import READY
    from cluster.compare.sides import ConfigSide

    if "list" in (options["ready"], options["peer"]):
        listed = READY if options["ready"] == "list" else PEERS
        for name, each in listed.items():
            click.echo(f"{name:14} {each.text}")
        return
    if (again := options["again"]) is not None:
        _report(Record.load(again), again, options)
        return
    if not options["traces"]:
        raise click.UsageError("--trace is missing: what shall be offered?")
    variants = _variants(configs, options)
    if options["peer"] is not None and options["tokenizer"] is None:
        # A peer may have no route that tells tokens; both sides then get texts by one tokenizer.
        options["tokenizer"] = model_of(variants[0].config).args.source
    plan = Plan(
        spec=spec_of(options["traces"], {**options, "rate": None, "users": None, "label": ""}),
        loads=_loads(options),
        rounds=options["rounds"],
        api_key=options["api_key"],
        capacity_users=options["capacity_users"],
        capacity_requests=options["capacity_requests"],
    )
    sides: list[Side] = [ConfigSide(each) for each in variants]
    if other := _other_side(variants[0], options):
        sides.append(other)
    directory = options["out"] or Path(f"compare-{datetime.now():%Y%m%d-%H%M%S}")
    # So that a session of our own is taken down again.
    interrupt_on_signals()
    record = Contest(sides, plan, directory, say, interrupt_on_signals).hold()
    _report(record, directory, options)


def _report(record: Record, directory: Path, options: dict[str, Any]) -> None:
    from cluster.compare.files import write_comparison
    from cluster.compare.findings import find, sentences, to_json

    findings = find(
        record, directory, slo_of(options["slo"]), consecutive=options["ladder"] is not None
    )
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    title = f"{' against '.join(findings.sides)}, {when}"
    value = to_json(findings)
    html = write_comparison(directory, findings, title, value)
    if options["as_json"]:
        value.pop("definitions")
        emit({**value, "files": {"html": str(html), "json": str(html.with_suffix(".json"))}})
        return
    for line in sentences(findings):
        say(line)
    click.echo(html)


def _loads(options: dict[str, Any]) -> tuple[Load, ...]:
    from cluster.compare.contest import Load

    given = [name for name in ("loads", "rate", "users") if options[name] is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]}: give one of them")
    if given == ["users"]:
        users = _numbers("--users", options["users"])
        if options["requests"] is None:
            raise ConfigError("--users: a closed loop ends after --requests; say how many")
        if any(each != int(each) for each in users):
            raise ConfigError(f"--users {options['users']!r}: must be whole numbers")
        return tuple(Load(users=int(each)) for each in users)
    if given == ["rate"]:
        return tuple(Load(rate=each) for each in _numbers("--rate", options["rate"]))
    if given == [] and options["time_factor"] != 1.0:
        return (Load(),)
    return tuple(Load(multiple=each) for each in _numbers("--loads", options["loads"] or "0.8"))


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < each < float("inf") for each in numbers):
        raise ConfigError(f"{option} {text!r}: must be numbers above 0 with commas between")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{option} {text!r}: a number is there twice")
    return numbers


def _variants(configs: tuple[Path, ...], options: dict[str, Any]) -> list[Variant]:
    """The sides that are configurations of ours, edits made."""
    from cluster import config as configuration
    from cluster.compare.edits import Edit
    from cluster.compare.ready import READY, ladder, variant

    edits = [Edit.parse(text) for text in options["sets"]]
    derived = [name for name in ("ready", "ladder") if options[name] is not None]
    others = [name for name in ("url_b", "peer") if options[name] is not None]
    if len(derived) + len(others) > 1:
        raise ConfigError("--ready, --ladder, --url-b and --peer: give one of them")
    if (derived or others) and len(configs) > 1:
        raise ConfigError(f"{configs[1]}: with {_said(derived + others)} there is one file at most")
    if (derived or others) and options["set_b"]:
        raise ConfigError("--set-b: needs a second file of ours")
    edits_a = [*edits, *(Edit.parse(text) for text in options["set_a"])]
    path = configs[0] if configs else None
    base = variant(path.stem if path else "packaged", configuration.load(path), edits_a)
    if options["ready"] is not None:
        if options["ready"] not in READY:
            raise ConfigError(f"--ready {options['ready']!r}: there are {', '.join(READY)}")
        return READY[options["ready"]].variants(base.config)
    if options["ladder"] is not None:
        return ladder(base.config, options["ladder"])
    if others:
        return [base]
    edits_b = [*edits, *(Edit.parse(text) for text in options["set_b"])]
    if len(configs) < 2 and not edits_b:
        raise ConfigError(
            "one configuration has nothing to be compared with: give a second file, --set-b, "
            "--ready, --ladder, --url-b or --peer"
        )
    rest = list(configs[1:]) or [path]
    made = [base]
    for number, each in enumerate(rest):
        name = each.stem if each else "packaged"
        if name in {one.name for one in made}:
            name = f"{name} {number + 2}"
        made.append(variant(name, configuration.load(each), edits_b if number == 0 else edits))
    return made


def _said(names: list[str]) -> str:
    return f"--{names[0].replace('_', '-')}"


def _other_side(first: Variant, options: dict[str, Any]) -> Side | None:
    from cluster.compare.peers import PeerOptions, peer_side
    from cluster.compare.sides import UrlSide

    if options["url_b"] is not None:
        return UrlSide("other", options["url_b"])
    if options["peer"] is not None:
        said = PeerOptions(
            bin=options["peer_bin"], model=options["peer_model"], arguments=options["peer_arg"]
        )
        return peer_side(options["peer"], first.config, said)
    return None
