"""The demo's surroundings: what it renders from the shipped files, and that it leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo.servers import REPOSITORY, running, wait_for
from deploy.demo.stack import render_alertmanager, render_prometheus, render_receiver

PORTS = {"prometheus": 1, "alertmanager": 2, "receiver": 3}


def shipped(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


def differing(ours: Any, theirs: Any, at: str = "") -> set[str]:
    """Paths of the keys in which two configurations differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = {*ours, *theirs}
        return set().union(
            *(differing(ours.get(k), theirs.get(k), f"{at}.{k}".strip(".")) for k in keys)
        )
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return set().union(*(differing(a, b, at) for a, b in zip(ours, theirs, strict=True)))
    return set() if ours == theirs else {at}


class TestRendered:
    def test_prometheus_differs_in_times_and_addresses_only(self) -> None:
        rendered = render_prometheus(4, PORTS)
        assert differing(rendered, shipped("prometheus/prometheus.yml")) == {
            "global.scrape_interval",
            "global.scrape_timeout",
            "global.evaluation_interval",
            "rule_files",
            "alerting.alertmanagers.static_configs.targets",
            "scrape_configs.static_configs.targets",
        }
        assert rendered["global"]["scrape_interval"] == "1000ms"

    def test_alertmanager_differs_in_times_addresses_and_secrets_only(self) -> None:
        rendered = render_alertmanager(PORTS, Path("token"), Path("chat"))
        times = ("group_wait", "group_interval", "repeat_interval")
        keys = differing(rendered, shipped("alerting/alertmanager.yml"))
        keys = {key for key in keys if not key.startswith("global.smtp_")}
        assert keys == {
            *(f"route.routes.{time}" for time in times),
            *(f"route.routes.routes.{time}" for time in times),
            "receivers.email_configs",
            "receivers.slack_configs.api_url_file",
            "receivers.webhook_configs.url",
            "receivers.webhook_configs.http_config.authorization.credentials_file",
        }

    def test_the_receiver_differs_in_addresses_and_paths_only(self) -> None:
        rendered = render_receiver(PORTS, Path("token"), Path("runs"), Path("db"))
        assert differing(rendered, shipped("alerting/receiver.yml")) == {
            "listen",
            "token_file",
            "runs",
            "database",
        }


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "files"
    argv = [sys.executable, "-m", "deploy.demo", f"--folder={folder}"]
    with running("demo", argv, tmp_path, cwd=REPOSITORY) as demo:
        demo.wait_for(
            lambda: "watching" in (folder / "trainer.log").read_text(), "the trainer", timeout=60
        )
        # The demo itself, three servers, the chat and the trainer.
        assert len(processes_of(folder)) >= 6
        assert demo.process is not None
        demo.process.send_signal(number)
        demo.process.wait(60)
        wait_for(lambda: not processes_of(folder), "the end of all processes", timeout=60)
    if number == signal.SIGINT:
        assert demo.returncode() == 130
        assert "all processes were ended" in demo.log.read_text()


def test_a_milestone_that_is_missing_is_named(tmp_path: Path) -> None:
    """Nothing happens and nothing is claimed: with no fault, the verdict is a list of misses."""
    script = (
        "import sys; from deploy.demo import __main__ as demo;"
        "demo.STEPS = 30; demo.FAULT_STEPS = range(31, 32);"
        f"sys.argv = ['demo', '--folder={tmp_path / 'files'}']; sys.exit(demo.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stdout
    assert "missed: not observed: fault" in done.stdout
    assert "missed: not observed: rollback" in done.stdout
    assert (tmp_path / "files" / "chat.jsonl").read_text() == ""
    manifests = (tmp_path / "files" / "runs").glob("*/checkpoints/*/manifest.json")
    assert {json.loads(path.read_text())["generation"] for path in manifests} == {0}


def test_a_folder_with_other_files_is_not_emptied(tmp_path: Path) -> None:
    own = tmp_path / "thesis.txt"
    own.write_text("mine")
    argv = [sys.executable, "-m", "deploy.demo", f"--folder={tmp_path}"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "holds files that are not the demo's" in done.stderr
    assert own.read_text() == "mine"


def test_a_second_demo_leaves_the_first_one_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    argv = [sys.executable, "-m", "deploy.demo", f"--folder={folder}"]
    with running("demo", argv, tmp_path, cwd=REPOSITORY) as demo:
        demo.wait_for((folder / "trainer.log").exists, "the trainer's log", timeout=60)
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr == (
            f"Another demo uses {folder}: end it, or give this one a --folder.\n"
        )
        assert (folder / "trainer.log").exists()
