"""`tailrace dashboards`: check, write or push dashboards, rules and alerts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dashboards.errors import DashboardError
from dashboards.rules import RUNBOOK

_json_option = click.option(
    "as_json", "--json", is_flag=True, help="One JSON object on standard output."
)
_runbook_option = click.option(
    "--runbook",
    default=RUNBOOK,
    show_default=True,
    metavar="URL",
    help="Where alerts send the reader; the alert's name is the anchor.",
)


@click.group()
def dashboards() -> None:
    """Grafana dashboards, Prometheus rules and alerts, from the code that serves.

    They need the extra `dashboards`.
    """


@dashboards.command()
@_json_option
def check(as_json: bool) -> None:
    """Say whether every query reads what exists, and every metric is on a dashboard."""
    from dashboards.boards import boards
    from dashboards.everything import checked, rule_groups

    checked()
    figures = {
        "dashboards": len(boards()),
        "panels": sum(len(board.panels) for board in boards()),
        "queries": sum(len(panel.queries) for board in boards() for panel in board.panels),
        "recording_rules": sum(len(group.recordings) for group in rule_groups()),
        "alerts": sum(len(group.alerts) for group in rule_groups()),
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        click.echo(", ".join(f"{n} {name.replace('_', ' ')}" for name, n in figures.items()))


@dashboards.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--ray",
    "ray_session",
    metavar="SESSION",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also, or only, where the Grafana that Ray provisions looks; SESSION is Ray's session "
    "directory, such as /tmp/ray/session_latest.",
)
@click.option(
    "--ray-names",
    is_flag=True,
    help="Put the rules for Ray's names among the PrometheusRules: Prometheus scrapes Ray's "
    "agents, not the gateway.",
)
@_runbook_option
@_json_option
def export(
    directory: Path | None, ray_session: Path | None, ray_names: bool, runbook: str, as_json: bool
) -> None:
    """Write dashboards, rules and Kubernetes manifests below DIRECTORY."""
    from dashboards import export as files

    if directory is None and ray_session is None:
        raise click.UsageError("say where to: DIRECTORY, --ray SESSION or both")
    written: list[Path] = []
    if directory is not None:
        written += files.export(directory, runbook=runbook, ray_names_too=ray_names)
    if ray_session is not None:
        written += files.export_to_ray(ray_session)
    if as_json:
        click.echo(json.dumps({"files": [str(path) for path in written]}))
    else:
        for path in written:
            click.echo(path)


@dashboards.command()
@click.option(
    "--url",
    envvar="GRAFANA_URL",
    default="http://127.0.0.1:3000",
    show_default=True,
    help="Grafana's address, with the path if it is served below one. Also: GRAFANA_URL.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token of a service account. Otherwise: GRAFANA_TOKEN.",
)
@click.option(
    "--prometheus",
    "prometheus_url",
    metavar="URL",
    help="Prometheus as Grafana reaches it: adds or corrects the data source.",
)
@click.option(
    "--datasource",
    "datasource_uid",
    metavar="UID",
    help="Data source to use. Default: the one that --prometheus adds.",
)
@click.option("--folder", "folder_uid", metavar="UID", help="Folder to use. Default: tailrace.")
@_runbook_option
@_json_option
def push(
    url: str,
    token_file: Path | None,
    prometheus_url: str | None,
    datasource_uid: str | None,
    folder_uid: str | None,
    runbook: str,
    as_json: bool,
) -> None:
    """Make a running Grafana show them: folder, data source, dashboards, alert rules.

    Running it again changes only what differs.
    """
    from dashboards.everything import FOLDER_UID
    from dashboards.provision import DATASOURCE_UID, Grafana

    token = os.environ.get("GRAFANA_TOKEN")
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise DashboardError(
                f"{token_file}: {error.strerror or error}; give a file with the token"
            ) from error
    with Grafana(url, token) as grafana:
        changes = grafana.push(
            prometheus_url=prometheus_url,
            datasource_uid=datasource_uid or DATASOURCE_UID,
            folder_uid=folder_uid or FOLDER_UID,
            runbook=runbook,
        )
    lists = {
        "created": changes.created,
        "updated": changes.updated,
        "unchanged": changes.unchanged,
        "removed": changes.removed,
    }
    if as_json:
        click.echo(json.dumps({"url": url, **lists}))
        return
    for word, items in lists.items():
        for item in items:
            click.echo(f"{word:10} {item}")
