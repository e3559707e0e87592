"""Boards as Grafana's JSON, through its SDK. How panels look is decided here and nowhere else."""

# The SDK's enumerations are strings that it did not annotate as its own types.
# pyright: reportArgumentType=false

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dash
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prom

from dashboards.panels import VARIABLES, Board, Panel, Query, Variable

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "tailrace"
EXPLAIN = "${gateway}/dashboard"
"""The gateway's own page: its slowest requests, each with its waterfall."""


def build(board: Board) -> dict[str, Any]:
    """The dashboard, without an id: its uid is what it is known by."""
    builder = (
        dash.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dash.DashboardLink("Tailrace")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .link(_explain_link("Slowest requests"))
        .with_variable(
            dash.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name in board.variables:
        builder.with_variable(_variable(name, VARIABLES[name]))
    for row in board.rows:
        builder.with_row(dash.Row(row.title))
        for panel in row.panels:
            builder.with_panel(_panel(panel))
    return _finished(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())))


def _finished(value: dict[str, Any]) -> dict[str, Any]:
    """With what the SDK leaves open, and without what its 11.6 writes in error."""
    for number, panel in enumerate(value["panels"], 1):
        panel["id"] = number
    for variable in value["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):  # of interval variables, put on all
            variable.pop(key, None)
    return value


def _explain_link(title: str) -> dash.DashboardLink:
    return (
        dash.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(EXPLAIN)
        .tooltip("The gateway's page; `tailrace explain ID` tells the same in a terminal")
        .target_blank(True)
    )


def _variable(
    name: str, variable: Variable
) -> dash.QueryVariable | dash.CustomVariable | dash.TextBoxVariable:
    if variable.query:
        asked = (
            dash.QueryVariable(name)
            .datasource(DATASOURCE)
            .query(variable.query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(variable.several)
        )
        if variable.several:
            everything = models.VariableOption(text="All", value="$__all", selected=True)
            asked = asked.include_all(True).all_value(".*").current(everything)
        return asked.label(variable.label).description(variable.description)
    if variable.options:
        options = [
            models.VariableOption(text=text, value=text, selected=text == variable.default)
            for text in variable.options
        ]
        return (
            dash.CustomVariable(name)
            .values(",".join(variable.options))
            .options(options)
            .current(next(option for option in options if option.selected))
            .label(variable.label)
            .description(variable.description)
        )
    return (
        dash.TextBoxVariable(name)
        .default_value(variable.default)
        .label(variable.label)
        .description(variable.description)
    )


def _panel(panel: Panel) -> stat.Panel | table.Panel | timeseries.Panel:
    built = {"stat": _stat, "table": _table}.get(panel.look, _lines)(panel)
    built = (
        built.title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .span(panel.width)
        .height(panel.height)
        .datasource(DATASOURCE)
        .links([_explain_link("Explain the slowest requests")])
        .thresholds(_thresholds(panel))
    )
    if panel.minimum is not None:
        built = built.min(panel.minimum)
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.decimals is not None:
        built = built.decimals(panel.decimals)
    if panel.empty:
        built = built.no_value(panel.empty)
    for number, query in enumerate(panel.queries):
        built = built.with_target(_target(panel, query, _ref(number)))
    return built


def _stat(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(looks.BigValueGraphMode.NONE)
        .color_mode(looks.BigValueColorMode.VALUE)
        .orientation(looks.VizOrientation.AUTO)
    )


def _table(panel: Panel) -> table.Panel:
    hidden = [models.DynamicConfigValue(id_val="custom.hidden", value=True)]
    return table.Panel().override_by_regexp("^(Time|__name__|instance|job)$", hidden)


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.look == "stacked"
    mode = looks.StackingMode.NORMAL if stacked else looks.StackingMode.NONE
    built = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.TABLE)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(looks.TooltipDisplayMode.MULTI)
            .sort(looks.SortOrder.DESCENDING)
        )
        .line_width(1)
        .fill_opacity(60 if stacked else 8)
        .show_points(looks.VisibilityMode.NEVER)
        .stacking(common.StackingConfig().mode(mode).group("A"))
    )
    for number, query in enumerate(panel.queries):
        if query.limit:
            built = built.override_by_query(
                _ref(number),
                [
                    models.DynamicConfigValue(
                        id_val="color", value={"mode": "fixed", "fixedColor": "red"}
                    ),
                    models.DynamicConfigValue(
                        id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]}
                    ),
                    models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
                    models.DynamicConfigValue(
                        id_val="custom.stacking", value={"mode": "none", "group": "limit"}
                    ),
                ],
            )
    return built


def _ref(number: int) -> str:
    return chr(ord("A") + number)


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery()
        .ref_id(ref)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .editor_mode(prom.QueryEditorMode.CODE)
    )
    if panel.look == "table":
        return target.instant().format(prom.PromQueryFormat.TABLE)
    return target.instant() if panel.look == "stat" else target.range()


def _thresholds(panel: Panel) -> dash.ThresholdsConfig:
    below, above = panel.red_below, panel.red_above
    if below is not None:
        steps = [(None, "red"), (below, "green")]
    elif above is not None:
        steps = [(None, "green"), (above, "red")]
    else:
        steps = [(None, "green")]
    return (
        dash.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in steps])
    )
