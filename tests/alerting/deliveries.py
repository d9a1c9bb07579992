"""Webhook payloads as Alertmanager sends them, and run folders as a guard registers them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from alerting.control import ControlDirectory, Status

RUN = "gpt"


def alert(
    alertname: str = "ActRunaway",
    run: str | None = RUN,
    action: str | None = "recover",
    status: str = "firing",
    **labels: str,
) -> dict[str, Any]:
    """One member of a group; None leaves a label out."""
    named = {"alertname": alertname, "run": run, "action": action, **labels}
    return {
        "status": status,
        "labels": {name: value for name, value in named.items() if value is not None},
        "annotations": {"summary": f"{alertname} in {run}"},
        "startsAt": "2026-01-05T10:00:00.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z" if status == "firing" else "2026-01-05T10:05:00Z",
        "generatorURL": "http://prometheus:9090/graph?g0.expr=up",
        "fingerprint": "d34db33fd34db33f",
    }


def payload(*alerts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A whole notification."""
    firing = any(member.get("status") == "firing" for member in alerts)
    return {
        "version": "4",
        "groupKey": '{}/{action=~"checkpoint|recover"}:{action="recover", run="gpt"}',
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": "trainer",
        "groupLabels": {"run": RUN, "action": "recover"},
        "commonLabels": {"run": RUN},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "alerts": list(alerts),
        **fields,
    }


def text(*alerts: dict[str, Any], **fields: Any) -> str:
    """A whole notification as JSON."""
    return json.dumps(payload(*alerts, **fields))


def status(**fields: Any) -> Status:
    """What a guard in the middle of a healthy run publishes."""
    values: dict[str, Any] = {
        "run": RUN,
        "generation": 0,
        "state": "running",
        "step": 1200,
        "rollbacks_left": 3,
        "last_backup_at": None,
        "updated_at": time.time(),
    }
    return Status(**(values | fields))


def register(runs: Path, folder: str = "gpt-2026", **fields: Any) -> ControlDirectory:
    """Do what a guard does at its start: make the run's control directory and publish."""
    control = ControlDirectory(runs / folder / "control")
    control.create()
    control.publish(status(**fields))
    return control
