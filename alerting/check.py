"""`act-alerting check`: which shipped alert an alertmanager.yml brings to whom, in words.

The routes are amtool's answer, so what is said is what Alertmanager does; whom a receiver stands
for is read from the file. Silences and inhibition are not part of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from alerting.exceptions import AlertingError
from alerting.shipped import shipped
from alerting.targets import Target
from alerting.watchdog import ALERTNAME as WATCHDOG

LIMIT_SECONDS = 30.0
"""amtool answers in milliseconds."""
_LABEL = re.compile(r"\$labels\.(\w+)")
_TRAINER, _MESSAGES, _WATCHDOG = "/alerts", "/messages", "/watchdog"
"""The receiver's own paths; any other webhook is somebody else's."""


class CheckError(AlertingError):
    """amtool is not there, or the file is none that Alertmanager takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Where alerts go.

    Attributes:
        trainer: whether the receiver is asked to act on them.
        messages: whether they are posted for those whom the receiver tells.
        watchdog: whether the receiver learns from them that alerts get through.
        people: ways to people, in words; empty where nobody is told.
    """

    trainer: bool
    messages: bool
    watchdog: bool
    people: tuple[str, ...]

    def __str__(self) -> str:
        parts = ["asks the trainer"] if self.trainer else []
        parts += ["tells the receiver that alerts get through"] if self.watchdog else []
        if self.people:
            parts.append(f"tells people by {' and '.join(self.people)}")
        elif not self.watchdog:
            parts.append("tells nobody")
        return ", ".join(parts)


def check_alertmanager(
    config: Path, amtool: Path, targets: tuple[Target, ...]
) -> tuple[list[str], list[str]]:
    """Where each shipped alert goes.

    Args:
        config: an alertmanager.yml.
        amtool: Alertmanager's own tool.
        targets: of the receiver's `notify:`, who get what is posted to `/messages`.

    Returns:
        A line each way with its alerts; and the names of alerts that reach nobody. An alert of
        severity `info` is meant to, but for the watchdog.

    Raises:
        CheckError: Alertmanager would not take the file, or amtool cannot be run.
    """
    _amtool(amtool, "check-config", str(config))
    content = yaml.safe_load(config.read_bytes())
    receivers = {entry["name"]: entry for entry in content["receivers"]}
    ways: dict[Way, list[str]] = {}
    lost = []
    for labels in _shipped_alerts():
        pairs = [f"{name}={value}" for name, value in labels.items()]
        said = _amtool(amtool, "config", "routes", "test", f"--config.file={config}", *pairs)
        taken = [receivers[name] for name in said.strip().split(",") if name in receivers]
        way = _way(taken, targets)
        name = labels["alertname"]
        ways.setdefault(way, []).append(name)
        is_told = way.people or (way.watchdog and name == WATCHDOG)
        if not is_told and (labels["severity"] != "info" or name == WATCHDOG):
            lost.append(name)
    lines = [f"{way}: {', '.join(names)}" for way, names in ways.items()]
    if targets and not any(way.messages for way in ways):
        lines.append(
            "nothing is posted to /messages: `notify:` hears of what the receiver does only"
        )
    return lines, lost


def _shipped_alerts() -> Iterator[dict[str, str]]:
    """Labels of each shipped alert: the rule's own, and those that its texts speak of."""
    for path in sorted(shipped("prometheus/rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_bytes())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    spoken_of = dict.fromkeys(_LABEL.findall(str(rule["annotations"])), "any")
                    yield {**spoken_of, "alertname": rule["alert"], **rule["labels"]}


def _way(receivers: list[dict[str, Any]], targets: tuple[Target, ...]) -> Way:
    paths: set[str] = set()
    people: dict[str, None] = {}
    for receiver in receivers:
        for key, entries in receiver.items():
            for entry in entries if key.endswith("_configs") else []:
                path = urlsplit(str(entry.get("url", ""))).path if key == "webhook_configs" else ""
                if path in (_TRAINER, _MESSAGES, _WATCHDOG):
                    paths.add(path)
                else:
                    to = f" to {entry['to']}" if "to" in entry else ""
                    people[key.removesuffix("_configs") + to] = None
    if _MESSAGES in paths:
        people |= {f"{target.name} ({target.kind})": None for target in targets}
    return Way(
        trainer=_TRAINER in paths,
        messages=_MESSAGES in paths,
        watchdog=_WATCHDOG in paths,
        people=tuple(people),
    )


def _amtool(amtool: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [amtool, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckError(f"{amtool} cannot be run: {error}.") from error
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())
        raise CheckError(f"amtool {' '.join(arguments[:2])}: {words}")
    return done.stdout
