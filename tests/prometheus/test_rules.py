"""The shipped Prometheus files: promtool's own checks and cases, and what promtool cannot see."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo.servers import REPOSITORY, binary

PROMETHEUS = REPOSITORY / "prometheus"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
CASE_FILES = sorted(Path(__file__).parent.glob("*.yml"))
RUNBOOK_URL = "https://github.com/act-exporter/act-exporter/blob/main/prometheus/runbook.md"
SCRAPE_SECONDS = 15
RANGE = re.compile(r"\[(\w+)(?::\w*)?\]")
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def promtool(*arguments: str | Path) -> str:
    """promtool's output; fails the test with it when promtool is not content."""
    done = subprocess.run(
        [binary("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def rules() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield path, rule


def alerts() -> list[dict[str, Any]]:
    return [rule for _, rule in rules() if "alert" in rule]


def seconds(duration: str) -> float:
    return sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def ids(item: Any) -> str:
    return item.name if isinstance(item, Path) else item["alert"]


class TestPromtool:
    def test_configuration_is_valid_and_finds_every_rule_file(self) -> None:
        output = promtool("check", "config", PROMETHEUS / "prometheus.yml")
        assert f"{len(RULE_FILES)} rule files found" in output

    @pytest.mark.parametrize("path", RULE_FILES, ids=ids)
    def test_rules_are_valid(self, path: Path) -> None:
        promtool("check", "rules", path)

    @pytest.mark.parametrize("path", CASE_FILES, ids=ids)
    def test_cases_pass(self, path: Path) -> None:
        promtool("test", "rules", path)


class TestConfiguration:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())

    def test_the_trainers_own_run_label_is_kept(self) -> None:
        jobs = {job["job_name"]: job for job in self.config["scrape_configs"]}
        assert jobs["act-exporter"]["honor_labels"] is True

    def test_scrapes_and_evaluations_are_15_seconds_apart(self) -> None:
        assert self.config["global"]["scrape_interval"] == f"{SCRAPE_SECONDS}s"
        assert self.config["global"]["evaluation_interval"] == f"{SCRAPE_SECONDS}s"


class TestEveryAlert:
    @pytest.mark.parametrize("alert", alerts(), ids=ids)
    def test_says_how_bad_it_is_and_what_to_do(self, alert: dict[str, Any]) -> None:
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        for annotation in ("summary", "description"):
            assert alert["annotations"][annotation].strip()

    @pytest.mark.parametrize("alert", alerts(), ids=ids)
    def test_links_to_its_heading_in_the_runbook(self, alert: dict[str, Any]) -> None:
        headings = re.findall(r"^#+ (.+)$", (PROMETHEUS / "runbook.md").read_text(), re.M)
        url, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert url == RUNBOOK_URL
        assert alert["alert"] in headings
        assert anchor == alert["alert"].lower()

    @pytest.mark.parametrize("alert", alerts(), ids=ids)
    def test_keeps_its_value_out_of_its_labels(self, alert: dict[str, Any]) -> None:
        """A value in a label makes a new alert of each evaluation."""
        assert "$value" not in str(alert["labels"])
        assert ".Value" not in str(alert["labels"])

    @pytest.mark.parametrize("alert", alerts(), ids=ids)
    def test_has_cases_in_which_it_fires_and_in_which_it_is_silent(
        self, alert: dict[str, Any]
    ) -> None:
        cases = [
            bool(case["exp_alerts"])
            for path in CASE_FILES
            for test in yaml.safe_load(path.read_text())["tests"]
            for case in test["alert_rule_test"]
            if case["alertname"] == alert["alert"]
        ]
        assert True in cases
        # The watchdog is the one that is never silent.
        assert False in cases or alert["expr"] == "vector(1)"
        assert len(cases) >= 3

    def test_has_a_name_of_its_own(self) -> None:
        names = [alert["alert"] for alert in alerts()]
        assert sorted(set(names)) == sorted(names)


FIGURES = "How often the rules are right"
"""The runbook's last section, which is no alert's."""

COMMANDS = ("sed ", "amtool ", "python ")


class TestRunbook:
    text = (PROMETHEUS / "runbook.md").read_text()

    def test_every_heading_is_an_alerts(self) -> None:
        headings = re.findall(r"^## (.+)$", self.text, re.M)
        assert headings.pop() == FIGURES
        assert sorted(headings) == sorted(alert["alert"] for alert in alerts())

    def test_links_inside_it_lead_somewhere(self) -> None:
        anchors = {heading.lower() for heading in re.findall(r"^## (.+)$", self.text, re.M)}
        assert set(re.findall(r"\]\(#(\w+)\)", self.text)) <= anchors

    def test_its_queries_are_valid(self, tmp_path: Path) -> None:
        indented = [line.strip() for line in re.findall(r"^ {4,}\S.*$", self.text, re.M)]
        queries = [line for line in indented if not line.startswith(COMMANDS)]
        records = [{"record": f"query:{n}", "expr": text} for n, text in enumerate(queries)]
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": records}]}))
        promtool("check", "rules", file)
        read = set(re.findall(r"(?:layer|run):\w+:\w+", "\n".join(queries)))
        assert read <= {rule["record"] for _, rule in rules() if "record" in rule}


class TestRuleFiles:
    @pytest.mark.parametrize("path", RULE_FILES, ids=ids)
    def test_no_group_has_a_limit(self, path: Path) -> None:
        """A group over its limit loses all of its alerts."""
        for group in yaml.safe_load(path.read_text())["groups"]:
            assert "limit" not in group

    @pytest.mark.parametrize("path", RULE_FILES, ids=ids)
    def test_recorded_series_are_read_in_the_group_that_records_them(self, path: Path) -> None:
        """Groups run apart: what another group recorded may be one evaluation old."""
        recorded_anywhere = {rule["record"] for _, rule in rules() if "record" in rule}
        for group in yaml.safe_load(path.read_text())["groups"]:
            recorded_before: set[str] = set()
            for rule in group["rules"]:
                read = {name for name in recorded_anywhere if name in rule["expr"]}
                assert read <= recorded_before
                recorded_before.add(rule.get("record", ""))

    @pytest.mark.parametrize("path", RULE_FILES, ids=ids)
    def test_ranges_hold_at_least_four_scrapes(self, path: Path) -> None:
        for rule_path, rule in rules():
            if rule_path == path:
                for duration in RANGE.findall(rule["expr"]):
                    assert seconds(duration) >= 4 * SCRAPE_SECONDS

    def test_recorded_names_say_level_metric_and_operation(self) -> None:
        for _, rule in rules():
            if "record" in rule:
                assert re.fullmatch(r"(layer|run):act_\w+:\w+", rule["record"])


class TestStorm:
    """Every layer of a large model explodes in the same step, on every rank."""

    LAYERS, RANKS = 400, 4

    def series(self) -> Iterator[dict[str, str]]:
        for layer in range(self.LAYERS):
            for rank in range(self.RANKS):
                labels = (
                    f'run="gpt",rank="{rank}",layer="h.{layer}",tensor="output",'
                    f'job="act-exporter",instance="a:{9460 + rank}"'
                )
                yield {"series": f"act_layer_absmax_peak{{{labels}}}", "values": "1x3 900x7"}
                yield {"series": f"act_layer_absmax_baseline{{{labels}}}", "values": "1x11"}
                yield {"series": f"act_layer_absmax_growth_ratio{{{labels}}}", "values": "0.02x11"}
                for name in ("act_layer_depth_jump_ratio", "act_layer_headroom_ratio"):
                    yield {"series": f"{name}{{{labels}}}", "values": "0x3 20x7"}
                for rule in ("hard", "nonfinite"):
                    name = f'act_layer_exceeded_consecutive{{{labels},rule="{rule}"}}'
                    yield {"series": name, "values": "0x3 3x7"}
        for rank in range(self.RANKS):
            labels = f'run="gpt",rank="{rank}",layer="h.0",tensor="output",rule="hard"'
            yield {"series": f"act_onset_step{{{labels}}}", "values": "_x4 7x7"}

    def test_is_one_request_for_recovery_and_one_alert_a_layer(self, tmp_path: Path) -> None:
        def firing(alertname: str) -> str:
            return f'count(ALERTS{{alertname="{alertname}",alertstate="firing"}})'

        expected = {
            "ActRunaway": 1,
            "ActLayerAboveBaseline": self.LAYERS,
            "ActLayerNonFinite": self.LAYERS,
            "ActLayerDrift": self.LAYERS,
            "ActLayerDepthSpike": self.LAYERS,
            "ActLayerHeadroomLow": self.LAYERS,
        }
        cases = {
            "rule_files": [str(path) for path in RULE_FILES],
            "evaluation_interval": "15s",
            "tests": [
                {
                    "interval": "15s",
                    "input_series": list(self.series()),
                    "promql_expr_test": [
                        {
                            "expr": firing(name),
                            "eval_time": "1m30s",
                            "exp_samples": [{"labels": "{}", "value": count}],
                        }
                        for name, count in expected.items()
                    ],
                }
            ],
        }
        path = tmp_path / "storm.yml"
        path.write_text(yaml.safe_dump(cases))
        promtool("test", "rules", path)
