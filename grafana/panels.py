"""The words that the dashboards are written in: a row, a query, and a panel of each kind.

Each kind of panel looks the same everywhere. A panel that is given alerts turns their colour at
their own numbers, and links to their headings in the runbook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from grafana.looks import CALM, CLEAR, legend, runbook, steps, words
from grafana.rules import rule

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Below what any logarithm to the base of ten comes to.
_LEAST = -400.0

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
    panel = shared(timeseries.Panel(), title, text, queries, alerts, width, height=8)
    panel.unit(unit).thresholds(steps(alerts, CLEAR)).show_points(values.VisibilityMode.AUTO)
    # A line that ends must be seen to end: nothing is drawn over a gap.
    panel.fill_opacity(4).line_width(1).span_nulls(False)
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(values.TooltipDisplayMode.MULTI)
        .sort(values.SortOrder.DESCENDING)
    )
    panel.legend(legend(side=side))
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


def number(
    title: str,
    text: str,
    *queries: Query,
    unit: str,
    alerts: Sequence[str] = (),
    color: str = CALM,
    worse: Mapping[float, str] | None = None,
    none: str = "none",
    named: bool = False,
    width: int = 3,
) -> stat.Panel:
    """One large number, or one a series.

    `color` is what it has, without data too, where no alert's number is passed and none of the
    values of `worse`; `none` stands there without data. Where it is `named` the series' legend
    stands above the value. The others are as of `lines`.
    """
    panel = shared(stat.Panel(), title, text, queries, alerts, width, height=4)
    mode = values.BigValueTextMode.VALUE_AND_NAME if named else values.BigValueTextMode.VALUE
    panel.unit(unit).thresholds(steps(alerts, color, worse)).no_value(none).text_mode(mode)
    panel.color_mode(values.BigValueColorMode.BACKGROUND_SOLID)
    panel.graph_mode(values.BigValueGraphMode.NONE).justify_mode(values.BigValueJustifyMode.CENTER)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel.orientation(values.VizOrientation.HORIZONTAL)


def timeline(
    title: str,
    text: str,
    *queries: Query,
    meanings: Mapping[int, tuple[str, str]],
    alerts: Sequence[str] = (),
) -> statetimeline.Panel:
    """Bars from when to when, a row a series; its values are words with a colour."""
    panel = shared(statetimeline.Panel(), title, text, queries, alerts, 12, height=8)
    panel.mappings([words(meanings)])
    panel.show_value(values.VisibilityMode.NEVER).merge_values(True).row_height(0.8)
    panel.no_value("none").fill_opacity(80).line_width(0)
    panel.tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.SINGLE))
    return panel.legend(legend(side=False).show_legend(False))


def heat(
    title: str, text: str, each: Query, *, alert: str, low: float, high: float
) -> heatmap.Panel:
    """A row a series, time to the right, the value as a colour between `low` and `high`.

    Grafana sorts the rows by their names where each begins with a number.
    """
    panel = shared(heatmap.Panel(), title, text, [each], [alert], 24, height=14)
    panel.calculate(False).cell_gap(0).show_value(values.VisibilityMode.NEVER)
    panel.rows_frame(heatmap.RowsHeatmapOptions().layout(values.HeatmapCellLayout.AUTO))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        # From blue by yellow to red, in dark and in light, and for the colour-blind too.
        .scheme("RdYlBu")
        .fill("dark-orange")
        .exponent(0.5)
        .steps(64)
        .min(low)
        .max(high)
        .reverse(False)
    )
    panel.y_axis(heatmap.YAxisConfig().reverse(True).axis_placement(values.AxisPlacement.LEFT))
    # By default it leaves out what is 0 or less, as it mostly counts; a logarithm is often so.
    panel.filter_values(heatmap.FilterValueRange().le(_LEAST))
    panel.cell_values(heatmap.CellValues().unit("none").decimals(2)).unit("none")
    panel.mode(values.TooltipDisplayMode.SINGLE).show_color_scale(True)
    return panel.show_legend()


class _AnyPanel(Protocol):
    """What all of the SDK's builders of panels have."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: models.DataSourceRef) -> Self: ...
    def links(self, links: list[Builder[models.DashboardLink]]) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def with_target(self, target: Builder[Dataquery]) -> Self: ...


_PanelT = TypeVar("_PanelT", bound=_AnyPanel)


def shared(
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
    judged = ", ".join(map(str, named))
    panel.title(title).description(text + (f" Alerts on it: {judged}." if named else ""))
    panel.datasource(DATASOURCE).span(width).height(height)
    panel.links([runbook(each) for each in named])
    for place, each in enumerate(queries):
        panel.with_target(each.ref_id(chr(ord("A") + place)).datasource(DATASOURCE))
    return panel


def _on_one_line(expr: str) -> str:
    return " ".join(expr.split())
