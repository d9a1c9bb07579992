"""The committed dashboards as the tests read them: small frozen values, rows flattened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo.servers import REPOSITORY

FOLDER = REPOSITORY / "grafana" / "dashboards"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One query of a panel.

    Attributes:
        instant: asked for one moment, the range's end; else over the range.
        format: "time_series", "table" or "heatmap".
        raw: as in the JSON.
    """

    expr: str
    refId: str  # noqa: N815 - Grafana's word
    legendFormat: str  # noqa: N815 - Grafana's word
    instant: bool
    format: str
    raw: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A colour, and the value from which on it holds; None is minus infinity."""

    color: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel that is no row.

    Attributes:
        dashboard: its dashboard's uid.
        row: title of the row that it stands in.
        unit: the default one, by Grafana's id ("s", "percentunit").
        overrides: what holds for some of its fields only, as in the JSON.
        raw: the whole panel, as in the JSON.
    """

    dashboard: str
    row: str
    id: int
    title: str
    type: str
    description: str
    unit: str
    targets: Sequence[Target]
    thresholds: Sequence[Threshold]
    overrides: Sequence[Mapping[str, Any]]
    raw: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.title}"


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Marks over all panels of a dashboard."""

    name: str
    expr: str
    raw: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of a dashboard.

    Attributes:
        type: "datasource", "query", ...
        query: as text: `label_values(...)`, or the data source's kind.
        multi: several values may be chosen.
        include_all: all of them may be; `all_value` then stands in the query.
    """

    name: str
    type: str
    query: str
    multi: bool
    include_all: bool
    all_value: str | None
    raw: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One file of `grafana/dashboards`; `name` is the file's, without its suffix."""

    name: str
    uid: str
    title: str
    variables: Sequence[Variable]
    panels: Sequence[Panel]
    annotations: Sequence[Annotation]
    raw: Mapping[str, Any]


def load() -> list[Dashboard]:
    """All committed dashboards, by file name."""
    return [
        parsed(path.stem, json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))
    ]


def parsed(name: str, raw: Mapping[str, Any]) -> Dashboard:
    """A dashboard of this JSON."""
    return Dashboard(
        name=name,
        uid=raw["uid"],
        title=raw["title"],
        variables=[_variable(each) for each in raw["templating"]["list"]],
        panels=[_panel(raw["uid"], row, each) for row, each in _flattened(raw["panels"])],
        annotations=[
            Annotation(name=each["name"], expr=each["target"]["expr"], raw=each)
            for each in raw["annotations"]["list"]
        ],
        raw=raw,
    )


def _flattened(panels: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each panel with its row's title; a collapsed row holds its panels, others go before them."""
    row = ""
    for panel in panels:
        if panel["type"] != "row":
            yield row, panel
            continue
        row = panel["title"]
        for inner in panel["panels"]:
            yield row, inner


def _variable(raw: Mapping[str, Any]) -> Variable:
    query = raw["query"]
    return Variable(
        name=raw["name"],
        type=raw["type"],
        query=query if isinstance(query, str) else query["query"],
        multi=raw.get("multi", False),
        include_all=raw.get("includeAll", False),
        all_value=raw.get("allValue"),
        raw=raw,
    )


def _panel(dashboard: str, row: str, raw: Mapping[str, Any]) -> Panel:
    config = raw.get("fieldConfig", {})
    defaults = config.get("defaults", {})
    return Panel(
        dashboard=dashboard,
        row=row,
        id=raw["id"],
        title=raw["title"],
        type=raw["type"],
        description=raw.get("description", ""),
        unit=defaults.get("unit", ""),
        targets=[_target(each) for each in raw.get("targets", [])],
        thresholds=[
            Threshold(color=step["color"], value=step["value"])
            for step in defaults.get("thresholds", {}).get("steps", [])
        ],
        overrides=config.get("overrides", []),
        raw=raw,
    )


def _target(raw: Mapping[str, Any]) -> Target:
    return Target(
        expr=raw["expr"],
        refId=raw["refId"],
        legendFormat=raw.get("legendFormat", ""),
        instant=raw.get("instant", False),
        format=raw.get("format", "time_series"),
        raw=raw,
    )
