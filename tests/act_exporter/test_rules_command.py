"""The command `rules`: the shipped rules for other thresholds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from act_exporter.exceptions import SettingError
from act_exporter.history import Thresholds
from act_exporter.rules import DEFAULTS, RuleThresholds, render_rules, write_rules
from deploy.demo.servers import REPOSITORY, binary

SHIPPED = REPOSITORY / "prometheus" / "rules"
TEMPLATES = REPOSITORY / "prometheus" / "templates"
OTHERS = RuleThresholds(hard=47.5, sigma=6, window=444, consecutive=7)


def command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "act_exporter.cli", "rules", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def vmalert() -> str | None:
    """VictoriaMetrics' vmalert, which is in Debian's package victoria-metrics."""
    folders = [os.environ.get("ACT_SERVERS", ""), str(REPOSITORY / ".servers" / "bin")]
    path = os.pathsep.join([*filter(None, folders), os.environ.get("PATH", "")])
    return shutil.which("vmalert", path=path)


def rules(texts: dict[str, str]) -> list[dict[str, Any]]:
    return [
        rule
        for text in texts.values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
    ]


class TestShipped:
    def test_the_committed_files_are_what_the_defaults_render(self) -> None:
        """After a change of a template: act-exporter rules -o prometheus/rules"""
        committed = {path.name: path.read_text() for path in SHIPPED.glob("*.yml")}
        assert committed == render_rules(DEFAULTS)

    def test_the_defaults_are_the_trainers(self) -> None:
        trainer = Thresholds()
        assert (DEFAULTS.hard, DEFAULTS.sigma) == (trainer.hard, trainer.sigma)
        assert DEFAULTS.window == trainer.window

    def test_every_mark_in_the_templates_is_a_threshold_and_each_is_used(self) -> None:
        text = "".join(path.read_text() for path in TEMPLATES.glob("*.yml"))
        marks = set(re.findall(r"<<(.*?)>>", text))
        assert marks == {"hard", "sigma", "window", "consecutive"}


class TestOtherThresholds:
    def test_stand_in_every_expression_and_sentence(self) -> None:
        """What differs from the defaults' rules differs by those numbers, and by nothing else."""
        numbers = {"47.5": "100", "6": "5", "444": "500", "7": "3"}
        others, shipped = rules(render_rules(OTHERS)), rules(render_rules(DEFAULTS))
        changed = 0
        for other, ours in zip(others, shipped, strict=True):
            for part in ("expr", "annotations"):
                words, before = str(other.get(part)).split(), str(ours.get(part)).split()
                for word, old in zip(words, before, strict=True):
                    if word != old:
                        changed += 1
                        (number,) = re.findall(r"[\d.]*\d", word)
                        assert old == word.replace(number, numbers[number])
        assert changed > 20

    def test_are_what_promtool_takes(self, tmp_path: Path) -> None:
        paths = write_rules(tmp_path, OTHERS)
        subprocess.run([binary("promtool"), "check", "rules", *paths], check=True)

    def test_decide_when_an_alert_fires(self, tmp_path: Path) -> None:
        write_rules(tmp_path, OTHERS)
        labels = 'run="gpt",rank="0",layer="h.0",tensor="output"'
        series = {
            f"act_layer_absmax_peak{{{labels}}}": "60x20",
            f"act_layer_absmax_baseline{{{labels}}}": "1x20",
            f'act_layer_exceeded_consecutive{{{labels},rule="hard"}}': "3x10 7x10",
            'act_rule_threshold{run="gpt",rank="0",rule="hard"}': "47.5x20",
            'act_rule_threshold{run="gpt",rank="0",rule="window"}': "500x20",
        }

        def firing(name: str) -> str:
            return f'count(ALERTS{{alertname="{name}"}})'

        expected = [
            ("ActLayerAboveBaseline", "1m", 1),
            ("ActRunaway", "2m30s", None),
            ("ActRunaway", "2m45s", 1),
            ("ActThresholdsDiffer", "1m", 1),
        ]
        cases = {
            "rule_files": [str(tmp_path / "*.yml")],
            "evaluation_interval": "15s",
            "tests": [
                {
                    "interval": "15s",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": firing(name),
                            "eval_time": at,
                            "exp_samples": [{"labels": "{}", "value": count}] if count else [],
                        }
                        for name, at, count in expected
                    ],
                }
            ],
        }
        file = tmp_path / "cases.yaml"
        file.write_text(yaml.safe_dump(cases))
        done = subprocess.run(
            [binary("promtool"), "test", "rules", file], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(
        "wrong", [{"hard": 0}, {"sigma": float("nan")}, {"window": -1}, {"consecutive": 2.5}]
    )
    def test_that_cannot_serve_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SettingError, match=next(iter(wrong))):
            RuleThresholds(**wrong)


class TestVmalert:
    def test_each_group_is_evaluated_as_often_as_prometheus_does_it(self) -> None:
        """vmalert evaluates once a minute unless a group says otherwise."""
        config = yaml.safe_load((REPOSITORY / "prometheus" / "prometheus.yml").read_text())
        for text in render_rules(DEFAULTS, vmalert=True).values():
            for group in yaml.safe_load(text)["groups"]:
                assert group["interval"] == config["global"]["evaluation_interval"]

    def test_rules_are_those_of_prometheus_and_without_what_1_79_does_not_know(self) -> None:
        ours = rules(render_rules(DEFAULTS, vmalert=True))
        assert ours == rules(render_rules(DEFAULTS))
        known = {"record", "alert", "expr", "for", "labels", "annotations"}
        assert all(rule.keys() <= known for rule in ours)

    @pytest.mark.skipif(vmalert() is None, reason="no vmalert: Debian's victoria-metrics has it")
    def test_vmalert_takes_them(self, tmp_path: Path) -> None:
        write_rules(tmp_path, OTHERS, vmalert=True)
        program = vmalert()
        assert program is not None
        done = subprocess.run(
            [program, "-dryRun", f"-rule={tmp_path}/*.yml"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


class TestCommand:
    def test_writes_the_files_and_names_them(self, tmp_path: Path) -> None:
        done = command("--hard", "50", "--consecutive", "4", "-o", tmp_path / "new" / "rules")
        assert done.returncode == 0, done.stderr
        written = [Path(line) for line in done.stdout.splitlines()]
        assert written == sorted((tmp_path / "new" / "rules").glob("*.yml"))
        assert "--hard 50 --sigma 5 --window 500 --consecutive 4" in written[0].read_text()

    def test_replaces_what_was_rendered_and_nothing_else(self, tmp_path: Path) -> None:
        assert command("-o", tmp_path).returncode == 0
        assert command("--sigma", "6", "-o", tmp_path).returncode == 0
        own = tmp_path / "layers.yml"
        own.write_text("groups: []\n")
        before = (tmp_path / "activations.yml").read_text()
        done = command("--sigma", "7", "-o", tmp_path)
        assert done.returncode == 1
        assert done.stderr == (
            f"act-exporter: {own} exists and was not rendered; nothing was written\n"
        )
        assert (tmp_path / "activations.yml").read_text() == before
        assert "--sigma 6 " in before

    def test_says_which_number_cannot_serve(self, tmp_path: Path) -> None:
        done = command("--hard", "-3", "-o", tmp_path)
        assert done.returncode == 1
        assert done.stderr == "act-exporter: hard=-3.0 must be above 0\n"
        assert not list(tmp_path.iterdir())

    def test_works_from_an_installed_wheel(self, tmp_path: Path) -> None:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
        subprocess.run([*build, "."], cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        where = [sys.executable, "-c", "import act_exporter; print(act_exporter.__file__)"]
        found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert found.stdout.startswith(str(tmp_path / "site"))
        done = command("-o", tmp_path / "rules", cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        for path in SHIPPED.glob("*.yml"):
            assert (tmp_path / "rules" / path.name).read_text() == path.read_text()
