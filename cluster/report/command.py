"""`tailrace report`, and the options that every command with figures shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.cli import emit, json_option, say
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.report.figures import Slo
    from cluster.report.prices import PriceTable

_F = TypeVar("_F", bound=Callable[..., Any])


slo_option = click.option(
    "--slo",
    multiple=True,
    metavar="TIER:ttft=S,itl=S,e2e=S",
    help="Targets of a tier in seconds; * is every tier. May be given more than once.",
)


def figure_options(command: _F) -> _F:
    """`--slo`, `--price`, `--prices` and `--currency`; see `slo_of` and `prices_of`."""
    for option in (
        click.option("--currency", default="USD", show_default=True, help="Of --price."),
        click.option(
            "--prices",
            "prices_file",
            type=click.Path(path_type=Path),
            help="Price table in YAML: currency, and items with name, per_hour, units, replicas.",
        ),
        click.option(
            "--price",
            multiple=True,
            metavar="NAME=PER_HOUR[xUNITS[xREPLICAS]]",
            help="What hardware costs, such as gpu=2.50x4x2. May be given more than once.",
        ),
        slo_option,
    ):
        command = option(command)
    return command


def slo_of(texts: tuple[str, ...]) -> Slo:
    """Of `--slo`. Raises ConfigError."""
    from cluster.report.targets import parse_slo

    return parse_slo(texts)


def prices_of(texts: tuple[str, ...], file: Path | None, currency: str) -> PriceTable | None:
    """Of `--price` and `--prices`. Raises ConfigError."""
    from cluster.report.prices import parse_prices, read_prices

    if file is not None and texts:
        raise ConfigError("--price and --prices: give one of them")
    return parse_prices(texts, currency) if file is None else read_prices(file)


@click.command()
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory of the report. Default: beside RESULT, named after it.",
)
@figure_options
@json_option
def report(
    result: Path,
    out: Path | None,
    slo: tuple[str, ...],
    price: tuple[str, ...],
    prices_file: Path | None,
    currency: str,
    as_json: bool,
) -> None:
    """Figures and plots of RESULT, the raw result that a replay wrote.

    Writes report.json, outcomes.csv and report.html, which needs no other file.
    """
    from cluster.replay.outcome import read_result
    from cluster.report.files import write_report
    from cluster.report.single import headline

    run, outcomes = read_result(result)
    directory = out or result.with_name(f"{result.name.partition('.')[0]}-report")
    files = write_report(
        directory,
        run,
        outcomes,
        slo=slo_of(slo),
        prices=prices_of(price, prices_file, currency),
    )
    if as_json:
        emit({**files.summary, "files": {"json": str(files.json), "html": str(files.html)}})
    else:
        say(headline(files.summary))
        click.echo(files.html)
