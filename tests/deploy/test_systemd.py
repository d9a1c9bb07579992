"""deploy/systemd: what systemd itself says of the units, and what its directives promise.

systemd does not run where these tests do; `systemd-analyze` reads the units as it would.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alerting import exit_codes
from alerting.supervise.settings import Limits
from deploy.demo.servers import REPOSITORY

UNITS = REPOSITORY / "deploy" / "systemd"
OURS = (
    "act-receiver.service",
    "act-trainer@gpt.service",
    "act-vmagent.service",
    "act-prometheus-agent.service",
)

# Debian's own, as its packages have them in version 2.42 and 0.25, less what hardens the first.
DEBIAN = """
[Service]
Restart=on-failure
User=prometheus
EnvironmentFile=/etc/default/{name}
ExecStart=/usr/bin/{name} $ARGS
ExecReload=/bin/kill -HUP $MAINPID
TimeoutStopSec=20s
SendSIGKILL=no
"""
PROGRAMS = (
    "opt/act/bin/act-alerting",
    "usr/bin/prometheus",
    "usr/bin/prometheus-alertmanager",
    "usr/bin/vmagent",
    "bin/kill",
)
TARGETS = ("basic", "multi-user", "network-online", "shutdown", "sysinit")

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def unit(name: str) -> configparser.RawConfigParser:
    """The last value of each key."""
    parsed = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(UNITS / name)
    return parsed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's files as far as systemd looks at them: units, Debian's, and the programs."""
    system = tmp_path / "etc/systemd/system"
    shutil.copytree(UNITS, system)
    for name in ("prometheus", "prometheus-alertmanager"):
        (system / f"{name}.service").write_text(DEBIAN.format(name=name))
    for name in TARGETS:
        (system / f"{name}.target").write_text("[Unit]\n")
    for name in PROGRAMS:
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path


def analyze(root: Path, *arguments: str) -> str:
    """What it says; fails the test with it when it finds something."""
    done = subprocess.run(
        ["systemd-analyze", f"--root={root}", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@needs_analyze
def test_systemd_finds_nothing_wrong_in_the_units(root: Path) -> None:
    debian = ("prometheus.service", "prometheus-alertmanager.service")
    assert analyze(root, "verify", "--man=no", *OURS, *debian) == ""


@needs_analyze
@pytest.mark.parametrize(
    ("name", "exposure"),
    [
        # Ten times what systemd counts from 0, closed, to 10; it calls below 5 OK.
        ("act-receiver.service", 15),
        ("act-vmagent.service", 15),
        ("act-prometheus-agent.service", 15),
        # Devices and memory that is written and executed stay open for a trainer.
        ("act-trainer@gpt.service", 30),
        ("prometheus-alertmanager.service", 25),
    ],
)
def test_a_service_is_closed(root: Path, name: str, exposure: int) -> None:
    analyze(root, "security", "--offline=true", f"--threshold={exposure}", name)


@pytest.mark.parametrize(
    "name",
    [
        "act-receiver.service",
        "act-trainer@.service",
        "act-vmagent.service",
        "act-prometheus-agent.service",
        "prometheus.service.d/act.conf",
        "prometheus-alertmanager.service.d/act.conf",
    ],
)
def test_it_is_back_within_a_minute_after_any_death(name: str) -> None:
    parsed = unit(name)
    assert parsed["Service"]["Restart"] == "always"
    assert 0 < float(parsed["Service"]["RestartSec"]) <= 60
    # By default systemd gives up after five starts in ten seconds.
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"


def test_a_trainer_that_is_for_people_stays_down() -> None:
    service = unit("act-trainer@.service")["Service"]
    kept_down = {int(code) for code in service["RestartPreventExitStatus"].split()}
    # Ended well, a wrong setting, given up, halted.
    assert kept_down == {0, 2, exit_codes.GAVE_UP, exit_codes.HALTED}
    assert int(service["SuccessExitStatus"]) == exit_codes.RESTART


def test_a_supervisor_has_the_time_that_it_gives_its_trainer() -> None:
    limit = unit("act-trainer@.service")["Service"]["TimeoutStopSec"]
    assert float(limit) > Limits().grace_seconds


@pytest.mark.parametrize("name", ["act-receiver.service", "act-trainer@.service"])
def test_the_command_knows_what_it_is_started_with(name: str) -> None:
    words = unit(name)["Service"]["ExecStart"].split(" -- ")[0].split()
    said = subprocess.run(
        [sys.executable, "-m", "alerting.cli", words[1], "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = {word for word in words if word.startswith("--")}
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", said))
