"""Panels of rows: tables, and points of which each is a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, table, xychart
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import xychart as xychart_models

from grafana.looks import CALM, CLEAR, legend, steps
from grafana.panels import Query, shared


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
    panel = shared(table.Panel(), title, text, queries, alerts, width, height=8)
    panel.unit("none").no_value(none).thresholds(steps((), CALM)).show_header(True)
    panel.align(values.FieldTextAlignment.AUTO).cell_options(values.TableAutoCellOptions())
    panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
    panel.transformations(_joined(columns))
    for column in columns:
        panel.override_by_name(column.name, _properties(column))
    return panel


def points(
    title: str,
    text: str,
    *queries: Query,
    x: Column,
    ys: Sequence[Column],
) -> xychart.Panel:
    """A point a row of the joined queries; its labels are in the tooltip."""
    panel = shared(xychart.Panel(), title, text, queries, (), 24, height=9)
    panel.transformations(_joined([x, *ys]))
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
    return panel.legend(legend(side=False))


def _joined(columns: Sequence[Column]) -> list[models.DataTransformerConfig]:
    """One table of all queries, its columns in this order under their names."""
    names = {
        "excludeByName": {"Time": True},
        "indexByName": {column.source: place for place, column in enumerate(columns)},
        "renameByName": {column.source: column.name for column in columns},
    }
    return [
        models.DataTransformerConfig(id_val="merge", options={}),
        models.DataTransformerConfig(id_val="organize", options=names),
    ]


def _properties(column: Column) -> list[models.DynamicConfigValue]:
    chosen: dict[str, object] = {"unit": column.unit}
    if column.decimals is not None:
        chosen["decimals"] = column.decimals
    if column.alert is not None:
        chosen["thresholds"] = steps([column.alert], CLEAR).build()
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

    only = xychart.MatcherConfig().id("byIndex").options(0)
    return (
        xychart.XYSeriesConfig()
        .name(xychart.XychartXYSeriesConfigName().fixed(y.name))
        .frame(xychart.XychartXYSeriesConfigFrame().matcher(only))
        .x(xychart.XychartXYSeriesConfigX().matcher(named(x)))
        .y(xychart.XychartXYSeriesConfigY().matcher(named(y)))
    )
