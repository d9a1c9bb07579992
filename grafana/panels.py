"""The words that the dashboards are written in: a query, a panel of each kind, a column, a row.

Each kind of panel looks the same everywhere. A panel that is given alerts turns their colour at
their own numbers, and links to their headings in the runbook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
    xychart,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import xychart as xychart_models

from grafana.rules import Rule, rule

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

COLORS = {"critical": "red", "warning": "orange", "info": "blue"}
"""By severity; what no rule speaks of is green where the colour fills a cell, else clear."""
CALM = "green"
_CLEAR = "transparent"

# A step's colour holds from its value on, and a rule `> 0` leaves 0 calm. Far below one of
# anything that is counted.
_ABOVE_ZERO = 0.001

Query = prometheus.Dataquery


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels under a title; a collapsed one asks nothing until it is opened."""

    title: str
    panels: Sequence[Builder[models.Panel]]
    collapsed: bool = False


def query(expr: str, legend: str = "") -> Query:
    """A query over the dashboard's range."""
    return prometheus.Dataquery().expr(_on_one_line(expr)).legend_format(legend).range()


def instant(expr: str, legend: str = "") -> Query:
    """A query for the end of the range, one value a series."""
    return prometheus.Dataquery().expr(_on_one_line(expr)).legend_format(legend).instant()


def row_query(expr: str) -> Query:
    """A query for the end of the range, as rows of a table: a column a label, and the value."""
    return instant(expr).format(prometheus_models.PromQueryFormat.TABLE)


def lines(
    title: str,
    text: str,
    *queries: Query,
    unit: str,
    alerts: Sequence[str] = (),
    log: bool = False,
    width: int = 12,
    side: bool = False,
) -> timeseries.Panel:
    """Lines over time.

    Args:
        title: what is drawn, with what the unit does not say.
        text: what it shows, what is good, and what to do.
        queries: each with its lines.
        unit: Grafana's id of it.
        alerts: those that judge by these values.
        log: a logarithmic scale, for what grows by powers of ten.
        width: of the dashboard's 24.
        side: the legend beside the panel, with each line's last and largest value.
    """
    panel = _shared(timeseries.Panel(), title, text, queries, alerts, width, height=8)
    panel.unit(unit).thresholds(_steps(alerts, _CLEAR)).show_points(values.VisibilityMode.NEVER)
    # A line that ends must be seen to end: nothing is drawn over a gap.
    panel.fill_opacity(4).line_width(1).span_nulls(False)
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(values.TooltipDisplayMode.MULTI)
        .sort(values.SortOrder.DESCENDING)
    )
    panel.legend(_legend(side))
    if alerts:
        panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(
                values.GraphThresholdsStyleMode.DASHED_AND_AREA
            )
        )
    if log:
        panel.scale_distribution(
            common.ScaleDistributionConfig().type(values.ScaleDistribution.LOG).log(10)
        )
    return panel


def dashed(panel: timeseries.Panel, name: str, color: str) -> None:
    """Draw the line of that name dashed, in that colour."""
    style = {"fill": "dash", "dash": [8, 8]}
    panel.override_by_name(
        name,
        [
            models.DynamicConfigValue(id_val="custom.lineStyle", value=style),
            models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color}),
        ],
    )


def band(panel: timeseries.Panel, low: str, high: str, color: str) -> timeseries.Panel:
    """Fill between the lines of these two names."""
    for name in (low, high):
        panel.override_by_name(
            name,
            [
                models.DynamicConfigValue(id_val="custom.lineWidth", value=0),
                models.DynamicConfigValue(
                    id_val="color", value={"mode": "fixed", "fixedColor": color}
                ),
            ],
        )
    return panel.override_by_name(
        high,
        [
            models.DynamicConfigValue(id_val="custom.fillBelowTo", value=low),
            models.DynamicConfigValue(id_val="custom.fillOpacity", value=20),
        ],
    )


def number(
    title: str,
    text: str,
    *queries: Query,
    unit: str,
    alerts: Sequence[str] = (),
    color: str = CALM,
    none: str = "none",
    named: bool = False,
    width: int = 3,
) -> stat.Panel:
    """One large number, or one a series.

    `color` is what it has where no alert's number is passed, `none` what stands there without data;
    where it is `named` the series' legend stands above the value. The others are as of `lines`.
    """
    panel = _shared(stat.Panel(), title, text, queries, alerts, width, height=4)
    mode = values.BigValueTextMode.VALUE_AND_NAME if named else values.BigValueTextMode.VALUE
    panel.unit(unit).thresholds(_steps(alerts, color)).no_value(none).text_mode(mode)
    panel.color_mode(values.BigValueColorMode.BACKGROUND_SOLID)
    panel.graph_mode(values.BigValueGraphMode.NONE).justify_mode(values.BigValueJustifyMode.CENTER)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel.orientation(values.VizOrientation.HORIZONTAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table: a label, or a query's value.

    Attributes:
        name: what stands above it.
        source: the label's name, or "Value #A" for that of the first query.
        unit: Grafana's id of it.
        alert: the one whose number colours its cells.
        mappings: words in place of values.
        link: where its cells lead to, title and address.
    """

    name: str
    source: str
    unit: str = "string"
    decimals: int | None = None
    alert: str | None = None
    mappings: Sequence[models.ValueMapping] = ()
    link: tuple[str, str] | None = None


def rows(
    title: str,
    text: str,
    *queries: Query,
    columns: Sequence[Column],
    sort_by: str,
    alerts: Sequence[str] = (),
    none: str = "none",
    width: int = 24,
) -> table.Panel:
    """A table of the queries' rows, those joined whose labels are equal; sorted, largest first."""
    panel = _shared(table.Panel(), title, text, queries, alerts, width, height=7)
    panel.unit("none").no_value(none).thresholds(_steps((), CALM)).show_header(True)
    panel.align(values.FieldTextAlignment.AUTO).cell_options(values.TableAutoCellOptions())
    panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True},
                "indexByName": {column.source: place for place, column in enumerate(columns)},
                "renameByName": {column.source: column.name for column in columns},
            },
        )
    )
    for column in columns:
        panel.override_by_name(column.name, _properties(column))
    return panel


def timeline(title: str, text: str, *queries: Query, width: int = 12) -> statetimeline.Panel:
    """Bars from when to when, a row a series; its values are 1 info, 2 warning, 3 critical."""
    panel = _shared(statetimeline.Panel(), title, text, queries, (), width, height=7)
    panel.mappings([words({1: ("info", "blue"), 2: ("warning", "orange"), 3: ("critical", "red")})])
    panel.show_value(values.VisibilityMode.NEVER).merge_values(True).row_height(0.8)
    panel.no_value("none").fill_opacity(80).line_width(0)
    panel.tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.SINGLE))
    return panel.legend(_legend(side=False).show_legend(False))


def heat(
    title: str, text: str, each: Query, *, alert: str, low: float, high: float
) -> heatmap.Panel:
    """A row a series, time to the right, the value as a colour between `low` and `high`.

    Grafana sorts the rows by their names where each begins with a number.
    """
    panel = _shared(heatmap.Panel(), title, text, [each], [alert], 24, height=14)
    panel.calculate(False).cell_gap(0).show_value(values.VisibilityMode.NEVER)
    panel.rows_frame(heatmap.RowsHeatmapOptions().layout(values.HeatmapCellLayout.AUTO))
    panel.color(
        heatmap.HeatmapColorOptions().scheme("YlOrRd").steps(64).min(low).max(high).reverse(False)
    )
    panel.y_axis(heatmap.YAxisConfig().reverse(True).axis_placement(values.AxisPlacement.LEFT))
    panel.cell_values(heatmap.CellValues().unit("none").decimals(2)).unit("none")
    panel.mode(values.TooltipDisplayMode.SINGLE).show_color_scale(True)
    return panel.show_legend()


def points(
    title: str,
    text: str,
    *queries: Query,
    x: Column,
    ys: Sequence[Column],
    hidden: Sequence[str] = (),
) -> xychart.Panel:
    """A point a row of the joined queries; a label that is in the tooltip only is in neither."""
    panel = _shared(xychart.Panel(), title, text, queries, (), 24, height=9)
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(("Time", *hidden), True),
                "indexByName": {},
                "renameByName": {column.source: column.name for column in (x, *ys)},
            },
        )
    )
    panel.mapping(xychart_models.SeriesMapping.MANUAL).series([_pair(x, y) for y in ys])
    panel.show(xychart_models.XYShowMode.POINTS).unit(ys[0].unit)
    panel.point_size(xychart.XychartFieldConfigPointSize().fixed(7))
    panel.override_by_name(
        x.name,
        [models.DynamicConfigValue(id_val="custom.scaleDistribution", value={"type": "linear"})],
    )
    panel.scale_distribution(
        common.ScaleDistributionConfig().type(values.ScaleDistribution.LOG).log(10)
    )
    panel.tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.SINGLE))
    return panel.legend(_legend(side=False))


def words(meanings: dict[int, tuple[str, str]]) -> models.ValueMap:
    """A word and a colour in place of each number."""
    return models.ValueMap(
        options={
            str(value): models.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(meanings.items())
        }
    )


def link(title: str, url: str) -> dashboard.DashboardLink:
    """A link that keeps the range and the variables."""
    kind = models.DashboardLinkType.LINK
    return dashboard.DashboardLink(title).type(kind).url(url).keep_time(True).include_vars(True)


class _AnyPanel(Protocol):
    """What all of the SDK's builders of panels have."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: models.DataSourceRef) -> Self: ...
    def links(self, links: list[Builder[models.DashboardLink]]) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...


_PanelT = TypeVar("_PanelT", bound=_AnyPanel)


def _shared(
    panel: _PanelT,
    title: str,
    text: str,
    queries: Sequence[Query],
    alerts: Sequence[str],
    width: int,
    height: int,
) -> _PanelT:
    """What every panel has."""
    named = [rule(alert) for alert in alerts]
    judged = ", ".join(
        f"{each.name} ({each.severity}, {each.sign} {each.limit:g})" for each in named
    )
    panel.title(title).description(text + (f" Alerts on it: {judged}." if named else ""))
    panel.datasource(DATASOURCE).span(width).height(height)
    panel.links([_runbook(each) for each in named])
    for place, each in enumerate(queries):
        # mypy knows no method that all builders share under one signature.
        panel.with_target(each.ref_id(chr(ord("A") + place)).datasource(DATASOURCE))  # type: ignore[attr-defined]
    return panel


def _runbook(each: Rule) -> dashboard.DashboardLink:
    plain = dashboard.DashboardLink(f"Runbook: {each.name}").type(models.DashboardLinkType.LINK)
    return plain.url(each.runbook).target_blank(True)


def _legend(side: bool) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True)
    if not side:
        return (
            legend.display_mode(values.LegendDisplayMode.LIST)
            .placement(values.LegendPlacement.BOTTOM)
            .calcs([])
        )
    legend.display_mode(values.LegendDisplayMode.TABLE).placement(values.LegendPlacement.RIGHT)
    return legend.calcs(["lastNotNull", "max"]).sort_by("Max").sort_desc(True)


def _steps(alerts: Sequence[str], calm: str) -> dashboard.ThresholdsConfig:
    """The colours of values: calm, and each alert's from where it fires."""
    steps: dict[float | None, str] = {None: calm}
    for each in map(rule, alerts):
        limit = each.limit or _ABOVE_ZERO * (each.sign in (">", "<="))
        if each.sign.startswith(">"):
            steps[limit] = COLORS[each.severity]
        else:
            steps |= {None: COLORS[each.severity], limit: calm}
    ordered = sorted(steps.items(), key=lambda step: (step[0] is not None, step[0] or 0.0))
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in ordered])
    )


def _properties(column: Column) -> list[models.DynamicConfigValue]:
    chosen: dict[str, object] = {"unit": column.unit}
    if column.decimals is not None:
        chosen["decimals"] = column.decimals
    if column.alert is not None:
        chosen["thresholds"] = _steps([column.alert], _CLEAR).build()
    if column.mappings:
        chosen["mappings"] = list(column.mappings)
    if column.alert is not None or column.mappings:
        chosen["custom.cellOptions"] = values.TableColoredBackgroundCellOptions(
            mode=values.TableCellBackgroundDisplayMode.BASIC
        )
    if column.link is not None:
        title, url = column.link
        chosen["links"] = [{"title": title, "url": url}]
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in chosen.items()]


def _pair(x: Column, y: Column) -> xychart.XYSeriesConfig:
    def named(column: Column) -> xychart.MatcherConfig:
        return xychart.MatcherConfig().id("byName").options(column.name)

    return (
        xychart.XYSeriesConfig()
        .name(xychart.XychartXYSeriesConfigName().fixed(y.name))
        .x(xychart.XychartXYSeriesConfigX().matcher(named(x)))
        .y(xychart.XychartXYSeriesConfigY().matcher(named(y)))
    )


def _on_one_line(expr: str) -> str:
    return " ".join(expr.split())
