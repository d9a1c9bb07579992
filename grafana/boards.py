"""A dashboard as a value, and its JSON: variables, annotations and links around its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from grafana.looks import COLORS, link
from grafana.panels import DATASOURCE, Row

TITLES = {
    "runs": "Runs",
    "layers": "Layers",
    "training": "Training and recovery",
    "exporter": "Exporter health",
}
"""Of all dashboards, by the name of their file, in the order of their links."""

# The regular expression of "All". Grafana would list each value: with 1,200 layers no server takes
# the address. All samples that are asked with it have the label.
_ALL = ".+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        name: of its file; its uid is "act-" and this.
        variables: those after the data source and the run.
        many_runs: several runs may be chosen, or all; else one.
    """

    name: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[dashboard.QueryVariable] = ()
    many_runs: bool = False


def several(name: str, label: str, query: str, description: str) -> dashboard.QueryVariable:
    """A variable of which several values may be chosen, or all, as it is at first."""
    return (
        _asked(name, label, query, description)
        .multi(True)
        .include_all(True)
        .all_value(_ALL)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def rank() -> dashboard.QueryVariable:
    """The rank, which with reduce="global" is "all", and is a value like others."""
    return several("rank", "Rank", 'label_values(act_step{run="$run"}, rank)', "Of the trainers.")


def firing(run: str, severity: str) -> str:
    """Alerts of ours that fire; the watchdog, which always does, is none."""
    ours = 'alertname=~"Act[A-Z].+", alertname!="ActWatchdog"'
    return f'ALERTS{{alertstate="firing", {ours}, severity="{severity}", {run}}}'


def render(board: Board) -> str:
    """The text of its file."""
    built = (
        dashboard.Dashboard(f"act-exporter / {TITLES[board.name]}")
        .uid(f"act-{board.name}")
        .description(board.description)
        .tags(["act-exporter"])
        # A change made in Grafana would be lost at the next import.
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .variables([_datasource(), _run(board.many_runs), *board.variables])
        .links(
            [link(title, f"/d/act-{name}") for name, title in TITLES.items() if name != board.name]
        )
    )
    for row in board.rows:
        head = dashboard.Row(row.title).collapsed(row.collapsed)
        if row.collapsed:
            for panel in row.panels:
                head.with_panel(panel)
        built.with_row(head)
        if not row.collapsed:
            for panel in row.panels:
                built.with_panel(panel)
    raw = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    # What the SDK leaves out: an id of null makes an import a new dashboard.
    raw["id"] = None
    for variable in raw["templating"]["list"]:
        # What it adds to all variables, of which Grafana's schema has none.
        for key in ("auto", "auto_count", "auto_min"):
            del variable[key]
    raw["annotations"] = {"list": list(_annotations(board))}
    for number, each in enumerate(_all_panels(raw["panels"]), start=1):
        each["id"] = number
    return json.dumps(raw, indent=2, sort_keys=True) + "\n"


def _all_panels(panels: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from panel.get("panels", ())


def _datasource() -> dashboard.DatasourceVariable:
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .description("The Prometheus that scrapes the trainers and evaluates the rules.")
    )


def _run(many: bool) -> dashboard.QueryVariable:
    query = "label_values(act_step, run)"
    if many:
        return several("run", "Run", query, "All that were seen in the range.")
    return _asked("run", "Run", query, "The run that is looked at.")


def _asked(name: str, label: str, query: str, description: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )


def _annotations(board: Board) -> Iterator[dict[str, Any]]:
    """Marks over all panels. The SDK has no words for Prometheus' own keys of them."""
    run = 'run=~"$run"' if board.many_runs else 'run="$run"'
    firing_run = 'run=~"$run|"' if board.many_runs else run
    for severity, color in COLORS.items():
        if severity != "info":
            # One mark an alert: one a layer would hide the panel when all layers explode at once.
            yield _annotation(
                f"Alerts: {severity}",
                color,
                f"max by (alertname, run) ({firing(firing_run, severity)})",
                "{{alertname}}",
                "{{run}}",
            )
    yield _annotation(
        "Rollbacks",
        "purple",
        f"max by (run) (increase(act_rollbacks_total{{{run}}}[$__rate_interval])) > 0",
        "Rolled back",
        "{{run}}",
    )
    yield _annotation(
        "Faults injected on purpose",
        "super-light-blue",
        f"max by (run, layer) (act_injected_fault{{{run}}}) > 1",
        "Injected fault: a drill",
        "{{run}}: {{layer}}",
    )


def _annotation(name: str, color: str, expr: str, title: str, text: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": DATASOURCE.to_json(),
        "enable": True,
        "hide": False,
        "iconColor": color,
        "target": {"refId": "A", "expr": expr},
        "titleFormat": title,
        "textFormat": text,
    }
