"""`act-alerting check`: who hears of what, and an exit code where somebody should and does not."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo.servers import binary
from tests.alerting.test_alertmanager import CONFIG, RECEIVERS, shipped_routes
from tests.alerting.test_cli import run

SHIPPED = yaml.safe_load(CONFIG.read_text())


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("check", *arguments, "--amtool", binary("amtool"))


def ways(answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Alert to the words about it."""
    found = {}
    for line in answer.stdout.splitlines():
        way, _, names = line.rpartition(": ")
        found |= dict.fromkeys(names.split(", "), way)
    return found


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """The shipped file after a change."""

    def make(change: Callable[[dict[str, Any]], None]) -> Path:
        config = copy.deepcopy(SHIPPED)
        change(config)
        path = tmp_path / "alertmanager.yml"
        path.write_text(yaml.safe_dump(config))
        return path

    return make


def receiver(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in config["receivers"] if entry["name"] == name)
    assert isinstance(found, dict)
    return found


class TestShipped:
    def test_each_alert_and_its_way(self) -> None:
        answer = check(CONFIG)
        assert answer.returncode == 0, answer.stderr
        people = "tells people by slack and email to oncall@example.com"
        words = {
            "trainer,people": f"asks the trainer, {people}",
            "people": people,
            "dashboard": "tells nobody",
            "watchdog": "tells the receiver that alerts get through",
        }
        assert ways(answer) == {name: words[taken] for name, taken in RECEIVERS.items()}

    def test_who_is_listed_and_what_is_not_posted_to_them(self, tmp_path: Path) -> None:
        run("init", tmp_path, "--bot", "wecom", "--language", "zh")
        (tmp_path / "wecom-url").write_text("https://a.example/4711")
        answer = check(CONFIG, "--config", tmp_path / "receiver.yml")
        assert answer.returncode == 0
        *_, hint, listed = answer.stdout.splitlines()
        assert hint.startswith("nothing is posted to /messages")
        assert listed == f"notify: in {tmp_path / 'receiver.yml'} lists wecom (wecom, zh)"
        assert "4711" not in answer.stdout

    def test_nobody_is_listed(self, tmp_path: Path) -> None:
        run("init", tmp_path)
        answer = check(CONFIG, "--config", tmp_path / "receiver.yml")
        assert answer.stdout.splitlines()[-1].endswith("receiver.yml lists nobody")


class TestChanged:
    def test_bots_alone_are_people_where_they_are_listed(
        self, tmp_path: Path, changed: Callable[..., Path]
    ) -> None:
        def only_bots(config: dict[str, Any]) -> None:
            people = receiver(config, "people")
            del people["slack_configs"], people["email_configs"]
            people["webhook_configs"] = [{"url": "http://localhost:9464/messages"}]

        path = changed(only_bots)
        run("init", tmp_path, "--bot", "wecom")
        (tmp_path / "wecom-url").write_text("https://a.example/4711")
        answer = check(path, "--config", tmp_path / "receiver.yml")
        assert answer.returncode == 0, answer.stderr
        assert ways(answer)["ActExporterDown"] == "tells people by wecom (wecom)"
        assert "nothing is posted" not in answer.stdout

        answer = check(path)  # posted to a receiver that, as far as is known, tells nobody
        assert answer.returncode == 1
        assert "ActExporterDown" in answer.stderr

    def test_a_route_that_swallows_one_is_1_and_names_it(
        self, changed: Callable[..., Path]
    ) -> None:
        def swallow(config: dict[str, Any]) -> None:
            parent, _ = shipped_routes(config)
            route = {"receiver": "dashboard", "matchers": ['alertname="ActTrainerStalled"']}
            parent["routes"].insert(0, route)

        answer = check(path := changed(swallow))
        assert answer.returncode == 1
        assert answer.stderr == (f"act-alerting: {path}: reaches nobody: ActTrainerStalled.\n")

    def test_a_request_that_people_do_not_hear_of(self, changed: Callable[..., Path]) -> None:
        def forget_to_go_on(config: dict[str, Any]) -> None:
            _, trainer = shipped_routes(config)
            del trainer["continue"]

        answer = check(changed(forget_to_go_on))
        assert answer.returncode == 1
        assert "ActRunaway" in answer.stderr
        assert ways(answer)["ActRunaway"] == "asks the trainer, tells nobody"

    def test_a_route_that_never_matches_is_seen(self, changed: Callable[..., Path]) -> None:
        """An operator that adds a matcher on the namespace."""

        def narrow(config: dict[str, Any]) -> None:
            _, trainer = shipped_routes(config)
            trainer["matchers"].append('namespace="ml"')

        answer = check(changed(narrow))
        assert answer.returncode == 0
        assert "asks the trainer" not in answer.stdout

    def test_a_watchdog_that_reaches_nobody_is_1(self, changed: Callable[..., Path]) -> None:
        answer = check(changed(lambda config: receiver(config, "watchdog").pop("webhook_configs")))
        assert answer.returncode == 1
        assert answer.stderr.endswith("reaches nobody: ActWatchdog.\n")


class TestMistakes:
    def test_a_file_that_alertmanager_does_not_take(self, changed: Callable[..., Path]) -> None:
        answer = check(changed(lambda config: config["route"].update(receiver="none")))
        assert answer.returncode == 1
        assert 'undefined receiver "none"' in answer.stderr
        assert answer.stderr.count("\n") == 1

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        answer = check(tmp_path / "none.yml")
        assert answer.returncode == 1
        assert "does not exist" in answer.stderr

    def test_no_amtool(self) -> None:
        answer = run("check", CONFIG, PATH="/none")
        assert answer.returncode == 2
        assert "amtool is not there" in answer.stderr
        answer = run("check", CONFIG, "--amtool", "/none/amtool")
        assert answer.returncode == 2
