"""The rules of Grafana's dashboard-linter, written anew: it is Go, and cannot be installed here.

What is not followed stands with its reason in `grafana/dashboards/.lint`, which the linter reads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models import units

from tests.grafana.dashboards import FOLDER, Dashboard, load, parsed
from tests.grafana.promql import complaints

DASHBOARDS = load()
EXCLUDED = yaml.safe_load((FOLDER / ".lint").read_text())["exclusions"]
UNITS = {value for name, value in vars(units).items() if not name.startswith("_")}

Rule = Callable[[Dashboard, Path], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def add(check: Rule) -> Rule:
        RULES[name] = check
        return check

    return add


def sources(dashboard: Dashboard) -> list[Any]:
    return [variable for variable in dashboard.variables if variable.type == "datasource"]


def asked(dashboard: Dashboard) -> list[Any]:
    return [variable for variable in dashboard.variables if variable.type == "query"]


def queries(dashboard: Dashboard) -> list[str]:
    return [target.expr for panel in dashboard.panels for target in panel.targets]


@rule("template-datasource-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    if [(each.name, each.raw["label"]) for each in sources(dashboard)] != [
        ("datasource", "Data source")
    ]:
        yield "no one variable `datasource` labelled `Data source`"


def templated(dashboard: Dashboard, label: str) -> Iterator[str]:
    variables = {variable.name: variable for variable in dashboard.variables}
    if label not in variables:
        yield f"no variable {label}"
    elif not (variables[label].multi and variables[label].all_value == ".+"):
        yield f"{label} cannot have all values"


@rule("template-job-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    yield from templated(dashboard, "job")


@rule("template-instance-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    yield from templated(dashboard, "instance")


@rule("template-label-promql-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for variable in asked(dashboard):
        found = re.fullmatch(r"label_values\((.+), \w+\)", variable.query)
        if found is None or complaints([found[1]], folder):
            yield variable.query


@rule("template-on-time-change-reload-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    on_time_range_changed = 2
    for variable in asked(dashboard):
        if variable.raw["refresh"] != on_time_range_changed:
            yield variable.name


@rule("panel-datasource-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for panel in dashboard.panels:
        if panel.raw["datasource"]["uid"] != "${datasource}":
            yield str(panel)


@rule("panel-title-description-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for panel in dashboard.panels:
        if not (panel.title and panel.description):
            yield str(panel)


@rule("panel-units-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for panel in dashboard.panels:
        chosen = [
            chosen["value"]
            for override in panel.overrides
            for chosen in override["properties"]
            if chosen["id"] == "unit"
        ]
        # What has words for its values has no unit.
        worded = panel.type == "state-timeline"
        if not worded and not {panel.unit, *chosen} <= UNITS:
            yield f"{panel}: {panel.unit!r}, {chosen}"


@rule("panel-no-targets-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for panel in dashboard.panels:
        if not panel.targets:
            yield str(panel)


@rule("target-promql-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    if found := complaints(queries(dashboard), folder):
        yield found


@rule("target-rate-interval-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for expr in queries(dashboard):
        for interval in re.findall(r"\bi?rate\([^\[\]]*\[([^\]]*)\]", expr):
            if interval != "$__rate_interval":
                yield expr


def matched(dashboard: Dashboard, label: str) -> Iterator[str]:
    for expr in queries(dashboard):
        if f'{label}=~"${label}"' not in expr:
            yield expr


@rule("target-job-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    yield from matched(dashboard, "job")


@rule("target-instance-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    yield from matched(dashboard, "instance")


@rule("target-counter-agg-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    for expr in queries(dashboard):
        counters = re.findall(r"\w+_total\b", expr)
        aggregated = re.findall(r"\b(?:i?rate|increase)\(\w+_total(?:\{[^}]*\})?\[", expr)
        if len(counters) != len(aggregated):
            yield expr


@rule("uneditable-dashboard-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    if dashboard.raw["editable"]:
        yield dashboard.title


@rule("target-logql-rule")
def _(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    """And target-logql-auto-rule: nothing asks Loki."""
    for panel in dashboard.panels:
        if {target.raw["datasource"]["type"] for target in panel.targets} != {"prometheus"}:
            yield str(panel)


@pytest.mark.parametrize("name", sorted(set(RULES) - set(EXCLUDED)))
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_rule_is_followed(dashboard: Dashboard, name: str, tmp_path: Path) -> None:
    assert list(RULES[name](dashboard, tmp_path)) == []


@pytest.mark.parametrize("name", EXCLUDED)
def test_what_is_excluded_has_a_reason_and_needs_it(name: str, tmp_path: Path) -> None:
    assert len(EXCLUDED[name]["reason"].split()) > 5
    assert any(list(RULES[name](dashboard, tmp_path)) for dashboard in DASHBOARDS)


def panel(raw: dict[str, Any]) -> Any:
    """The first one that is no row."""
    return next(each for each in raw["panels"] if each["type"] != "row")


def first_query(raw: dict[str, Any], expr: str) -> None:
    panel(raw)["targets"][0]["expr"] = expr


BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "template-datasource-rule": lambda raw: raw["templating"]["list"][0].update(name="source"),
    "template-label-promql-rule": lambda raw: raw["templating"]["list"][1].update(
        query="label_values(act_step{, run)"
    ),
    "template-on-time-change-reload-rule": lambda raw: raw["templating"]["list"][1].update(
        refresh=1
    ),
    "panel-datasource-rule": lambda raw: panel(raw)["datasource"].update(uid="act-prometheus"),
    "panel-title-description-rule": lambda raw: panel(raw).update(description=""),
    "panel-units-rule": lambda raw: panel(raw)["fieldConfig"]["defaults"].update(unit="furlong"),
    "panel-no-targets-rule": lambda raw: panel(raw).update(targets=[]),
    "target-promql-rule": lambda raw: first_query(raw, "sum(act_step"),
    "target-rate-interval-rule": lambda raw: first_query(raw, "rate(act_steps_total[5m])"),
    "target-counter-agg-rule": lambda raw: first_query(raw, "sum(act_steps_total)"),
    "uneditable-dashboard-rule": lambda raw: raw.update(editable=True),
    "target-logql-rule": lambda raw: panel(raw)["targets"][0]["datasource"].update(type="loki"),
}


@pytest.mark.parametrize("name", sorted(set(RULES) - set(EXCLUDED)))
def test_the_rule_finds_what_breaks_it(name: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = copy.deepcopy(dict(DASHBOARDS[0].raw))
    BREAKS[name](raw)
    assert list(RULES[name](parsed("broken", raw), tmp_path))
