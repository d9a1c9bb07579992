"""The README's tables and queries are held to what is really exposed and shipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry

from act_exporter import start_exporter
from act_exporter.collector import FAMILIES
from alerting.metrics import Metrics
from alerting.recovery.metrics import GuardMetrics
from deploy.demo.servers import REPOSITORY, binary
from tests.alerting.bots import SECRET, FeishuBot

README = (REPOSITORY / "README.md").read_text()
RULES = [
    rule
    for path in sorted((REPOSITORY / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def exposed() -> set[str]:
    """Names of all samples: the exporter's and the guard's page, and the receiver's."""
    names = {family.name for family in FAMILIES}
    receiver = CollectorRegistry()
    Metrics(receiver)
    with start_exporter(torch.nn.Linear(1, 1), 0, run="readme") as exporter:
        GuardMetrics("readme").register(exporter.registry)
        for registry in (exporter.registry, receiver):
            for family in registry.collect():
                names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def test_the_metrics_table_is_what_is_exposed() -> None:
    rows = [line.split("|")[1] for line in section("Metrics").splitlines() if "| `act_" in line]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == exposed()


def test_the_rules_use_nothing_that_is_not_exposed() -> None:
    for rule in RULES:
        used = set(re.findall(r"(?<![\w:])act_\w+", rule["expr"]))
        assert used <= exposed(), rule


def test_the_alerts_table_is_what_is_shipped() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:3]]
        for line in section("Alerts").splitlines()
        if line.startswith("| `Act")
    ]
    assert dict(rows) == {
        rule["alert"]: rule["labels"]["severity"] for rule in RULES if "alert" in rule
    }


def test_the_queries_are_valid(tmp_path: Path) -> None:
    queries = re.findall(r"```promql\n(.*?)```", README, re.DOTALL)[0].splitlines()
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "readme", "rules": rules}]}))
    done = subprocess.run([binary("promtool"), "check", "rules", file], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    names = {name for query in queries for name in re.findall(r"(?<![\w:])act_\w+", query)}
    assert names <= exposed()
    records = {rule["record"] for rule in RULES if "record" in rule}
    assert set(re.findall(r"layer:\S+", "\n".join(queries))) <= records


def test_from_nothing_to_a_signed_message(tmp_path: Path) -> None:
    """The commands of the section, with a bot on this machine that checks the signature."""
    chapter = section("In your monitoring").split("### Feishu, DingTalk, WeCom")[1]
    prepare, send = re.findall(r"```sh\n(.*?)```", chapter, re.DOTALL)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def shell(commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", commands],
            cwd=tmp_path,
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )

    with FeishuBot().serving() as bot:
        done = shell(prepare)
        assert done.returncode == 0, done.stderr
        for command in ("act-alerting send-test", "act-alerting serve"):
            assert f"{command} --config receiver.yml" in done.stdout
        (tmp_path / "feishu-url").write_text(bot.url)
        (tmp_path / "feishu-secret").write_text(SECRET)
        done = shell(send)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"`{done.stdout.strip()}`" in chapter
        assert "测试消息" in bot.texts()[0]


def test_the_remedies_of_the_example_are_accepted(tmp_path: Path, monkeypatch: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", section("In your trainer"), re.DOTALL)
    [example] = [block for block in blocks if "remedies=" in block]
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loader": list(torch.ones(3, 2)),
    }
    exec(example, names)
    steps = [step for step, _ in names["guard"].steps(2)]
    assert steps == [1, 2]
    assert (tmp_path / "runs" / "gpt" / "guard.json").exists()


@pytest.mark.parametrize("name", re.findall(r"`(ACT_\w+)`", section("In your trainer")))
def test_the_variables_are_read_somewhere(name: str) -> None:
    sources = [
        path
        for folder in ("act_exporter", "alerting", "deploy")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    ]
    assert any(name in path.read_text() for path in sources)
