"""The committed dashboards: as their source renders them, true to the rules and the metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo.servers import REPOSITORY
from grafana.build import rendered
from tests.grafana.dashboards import Dashboard, Panel, load
from tests.grafana.promql import complaints, metrics
from tests.test_readme import RULES, exposed

DASHBOARDS = load()
PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OTHERS = {
    # Prometheus' own.
    "up",
    "scrape_duration_seconds",
    "ALERTS",
    "alertmanager_notifications_failed_total",
    # node_exporter's, as of 1.5.
    "node_cpu_seconds_total",
    "node_filesystem_avail_bytes",
    "node_filesystem_size_bytes",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemTotal_bytes",
    "node_network_receive_bytes_total",
    "node_network_transmit_bytes_total",
    "node_uname_info",
    # dcgm-exporter's default counters, before its 4.9.
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_XID_ERRORS",
}


def names(item: Any) -> str:
    return str(item.name if isinstance(item, Dashboard) else item)


def named_alerts(panel: Panel) -> list[str]:
    """Those whose runbook it links to."""
    return re.findall(r"Runbook: (\w+)", str([link["title"] for link in panel.raw["links"]]))


def expressions(dashboard: Dashboard) -> list[str]:
    queries = [target.expr for panel in dashboard.panels for target in panel.targets]
    return queries + [annotation.expr for annotation in dashboard.annotations]


def every_panel(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows too."""
    for panel in dashboard.raw["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_they_are_what_the_source_renders() -> None:
    folder = REPOSITORY / "grafana" / "dashboards"
    committed = {path: path.read_text() for path in folder.glob("*.json")}
    assert committed == rendered(), "run `make dashboards`"


def test_the_four_are_there() -> None:
    assert {each.uid: each.title for each in DASHBOARDS} == {
        "act-runs": "act-exporter / Runs",
        "act-layers": "act-exporter / Layers",
        "act-training": "act-exporter / Training and recovery",
        "act-exporter": "act-exporter / Exporter health",
    }


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=names)
class TestEach:
    def test_an_import_makes_it_anew(self, dashboard: Dashboard) -> None:
        assert dashboard.raw["id"] is None
        # Of Grafana 11.6; an older one reads a newer schema at its own risk.
        assert dashboard.raw["schemaVersion"] == 41
        [source] = [each for each in dashboard.variables if each.type == "datasource"]
        assert (source.name, source.query) == ("datasource", "prometheus")
        text = str(dashboard.raw)
        assert set(re.findall(r"'uid': '([^']*)'", text)) == {"${datasource}", dashboard.uid}

    def test_ids_are_set_and_unique(self, dashboard: Dashboard) -> None:
        ids = [panel["id"] for panel in every_panel(dashboard)]
        assert ids == list(range(1, len(ids) + 1))
        for panel in dashboard.panels:
            references = [target.refId for target in panel.targets]
            assert all(references), panel
            assert len(set(references)) == len(references), panel

    def test_no_panel_lies_on_another(self, dashboard: Dashboard) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in every_panel(dashboard):
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            cells = {
                (place["x"] + right, place["y"] + down)
                for right in range(place["w"])
                for down in range(place["h"])
            }
            assert not taken & cells, panel["title"]
            taken |= cells

    def test_every_query_is_valid(self, dashboard: Dashboard, tmp_path: Path) -> None:
        assert complaints(expressions(dashboard), tmp_path) == ""

    def test_every_metric_is_exposed(self, dashboard: Dashboard) -> None:
        asked = set().union(*map(metrics, expressions(dashboard)))
        for variable in dashboard.variables:
            asked |= set(re.findall(r"(?:act|node|DCGM)_\w+", variable.query))
        assert asked <= exposed() | RECORDED | OTHERS

    def test_it_shows_one_data_source_by_its_variable(self, dashboard: Dashboard) -> None:
        for panel in dashboard.panels:
            for target in panel.targets:
                assert target.raw["datasource"]["uid"] == "${datasource}", panel

    def test_links_lead_to_the_others_and_keep_what_was_chosen(self, dashboard: Dashboard) -> None:
        links = {link["url"]: link for link in dashboard.raw["links"]}
        assert set(links) == {f"/d/{each.uid}" for each in DASHBOARDS if each != dashboard}
        assert all(link["includeVars"] and link["keepTime"] for link in links.values())

    def test_alerts_and_rollbacks_are_marked(self, dashboard: Dashboard) -> None:
        marks = {annotation.name: annotation.expr for annotation in dashboard.annotations}
        for severity in ("critical", "warning"):
            assert 'alertstate="firing"' in marks[f"Alerts: {severity}"]
            assert f'severity="{severity}"' in marks[f"Alerts: {severity}"]
        assert metrics(marks["Rollbacks"]) == {"act_rollbacks_total"}

    def test_every_variable_is_used(self, dashboard: Dashboard) -> None:
        used = set(re.findall(r"\$\{?(\w+)", str(dashboard.raw)))
        assert {variable.name for variable in dashboard.variables} <= used


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_stands_on_a_panel_with_its_number_and_its_runbook(name: str) -> None:
    """The number as the rule has it, read here from the committed rule once more."""
    panels = [panel for panel in PANELS if name in named_alerts(panel)]
    assert panels
    [runbook] = {
        link["url"]
        for panel in panels
        for link in panel.raw["links"]
        if link["title"] == f"Runbook: {name}"
    }
    assert runbook == ALERTS[name]["annotations"]["runbook_url"]
    expression = " ".join(ALERTS[name]["expr"].split())
    number = re.search(r" (?:[<>]=?|==) ([\d.]+)", expression)
    color = {"critical": "red", "warning": "orange", "info": "blue"}[
        ALERTS[name]["labels"]["severity"]
    ]
    for panel in panels:
        assert name in panel.description
        if number is None or panel.type not in ("timeseries", "stat"):
            continue
        falling = re.search(r" (<=?|==) ", expression) is not None
        steps = panel.thresholds
        *_, place = [
            place
            for place, step in enumerate(steps)
            if step.value is not None and abs(step.value - float(number[1])) <= 0.001
        ]
        # Where two alerts share the number the worse one's colour is seen.
        assert {steps[place - 1 if falling else place].color} <= {color, "red"}, panel


@pytest.mark.parametrize("panel", PANELS, ids=names)
def test_descriptions_say_what_it_shows_and_what_to_do(panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert len(panel.description.split()) >= 8 or panel.title == "Version"


def test_a_joined_run_has_its_rank() -> None:
    """With reduce="global" the only rank is "all"; what the guard exposes has rank 0 even then."""
    for panel in PANELS:
        for target in panel.targets:
            for selector in re.findall(r"act_(?:rollback|checkpoint)\w*\{[^}]*\}", target.expr):
                assert "rank" not in selector, panel
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            if variable.name == "rank":
                assert variable.query == 'label_values(act_step{run="$run"}, rank)'
                assert (variable.all_value, variable.multi) == (".+", True)


def test_provisioning_reads_a_folder_and_keeps_to_it() -> None:
    path = REPOSITORY / "grafana" / "provisioning" / "dashboards" / "act.yml"
    [provider] = yaml.safe_load(path.read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    assert Path(provider["options"]["path"]).is_absolute()
