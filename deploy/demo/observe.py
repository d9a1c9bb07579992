"""What the demo must see, and where it looks: from outside, never in the trainer.

Prometheus' and Alertmanager's HTTP APIs, the receiver's database, the checkpoints' files, the chat
stand-in's file and the trainer's log.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from deploy.demo.stack import Stack

HARD = 100.0
"""The shipped hard rule's threshold, times the baseline."""

LOSS_SECONDS = 15.0
"""Losses are compared as means over so many seconds, one sample each: single batches differ by 0.15
from their mean of 2.3."""

LOSS_TOLERANCE = 1.1
"""The loss is back when its mean is at most this times the mean before the fault, and had risen
when it was more: four times what chance does to the difference of two such means."""

_FAULT = re.compile(r"^(\S+ \S+) train WARNING fault: .* before step (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Milestone:
    """Something that was seen: when (Unix seconds), at which step, and in words."""

    at: float
    step: int | None
    detail: str


@dataclass(slots=True)
class Observer:
    """Collects the milestones of one run.

    Attributes:
        stack: the servers.
        run: the run's name.
        trainer_log: the trainer's output.
        chat: the chat stand-in's file.
        finders: milestone name to the method that looks for it, in the order of the loop.
        seen: milestone name to what was seen.
        losses: mean loss "before" and "after", and the largest "at" the fault.
    """

    stack: Stack
    run: str
    trainer_log: Path
    chat: Path
    finders: dict[str, Callable[[], Milestone | None]] = field(init=False)
    seen: dict[str, Milestone] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.finders = {
            "fault": self._fault,
            "first bad sample": self._bad_sample,
            "alert in Prometheus": self._prometheus_alert,
            "alert in Alertmanager": self._alertmanager_alert,
            "message to people": self._message,
            "notification of the receiver": self._notification,
            "request to the trainer": self._request,
            "emergency checkpoint": self._emergency_checkpoint,
            "rollback": self._rollback,
            "first healthy step": self._healthy_step,
        }

    def look(self) -> list[str]:
        """Look for everything that was not seen yet; the names of what is new."""
        fresh = []
        for name, find in self.finders.items():
            if name not in self.seen:
                # Not there yet, or not whole yet, is for the next look.
                with contextlib.suppress(OSError, sqlite3.OperationalError):
                    found = find()
                    if found is not None:
                        self.seen[name] = found
                        fresh.append(name)
        return fresh

    def complete(self) -> bool:
        """Whether everything was seen, and losses for long enough after it."""
        healthy = self.seen.get("first healthy step")
        all_seen = len(self.seen) == len(self.finders)
        return all_seen and healthy is not None and time.time() - healthy.at > LOSS_SECONDS

    def missed(self) -> list[str]:
        """After the run: what was not seen, or not as it must be; empty when all is well."""
        faults = [f"not observed: {name}" for name in self.finders if name not in self.seen]
        if faults:
            return faults
        self._compare_losses()
        if not self.losses["at"] > self.losses["before"] * LOSS_TOLERANCE:
            faults.append("the loss did not rise after the fault")
        if not self.losses["after"] <= self.losses["before"] * LOSS_TOLERANCE:
            faults.append("the loss after the rollback is not back to what it was")
        if self.seen["first healthy step"].at < self.seen["rollback"].at:
            faults.append("the layers were healthy before the rollback")
        rollbacks = self._rows("SELECT id FROM requests WHERE action='recover' AND result='done'")
        counted = self.stack.value(f'max_over_time(act_rollbacks_total{{run="{self.run}"}}[1h])')
        if len(rollbacks) != 1 or counted != 1:
            faults.append(f"{len(rollbacks)} rollbacks answered, {counted} counted, 1 expected")
        return faults

    def progress(self) -> tuple[int, float | None]:
        """The run's step and loss as Prometheus last saw them."""
        step = self.stack.value(f'act_step{{run="{self.run}"}}')
        return int(step or 0), self.stack.value(f'act_loss{{run="{self.run}"}}')

    def _fault(self) -> Milestone | None:
        match = _FAULT.search(self.trainer_log.read_text())
        if match is None:
            return None
        at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        return Milestone(at, int(match[2]), "weights multiplied, says the trainer's log")

    def _bad_sample(self) -> Milestone | None:
        baselines = {
            (labels["layer"], labels["tensor"]): samples[-1][1]
            for labels, samples in self._stored("act_layer_absmax_baseline")
        }
        bad = [
            (at, -peak / baselines[tap], " ".join(tap))
            for labels, samples in self._stored("act_layer_absmax_peak")
            if (tap := (labels["layer"], labels["tensor"])) in baselines
            for at, peak in samples
            if peak > HARD * baselines[tap]
        ]
        if not bad:
            return None
        at, ratio, worst = min(bad)  # of the first scrape
        return self._seen_at(at, f"{worst}: {-ratio:.0f} times its baseline")

    def _prometheus_alert(self) -> Milestone | None:
        times = self._times("ALERTS", alertname="ActRunaway", alertstate="firing")
        if not times:
            return None
        return self._seen_at(times[0], "ActRunaway fires")

    def _alertmanager_alert(self) -> Milestone | None:
        for alert in self.stack.alerts():
            names = [receiver["name"] for receiver in alert["receivers"]]
            if alert["labels"].get("run") == self.run and "trainer" in names:
                what = f"{alert['labels']['alertname']} goes to {' and '.join(sorted(names))}"
                return self._seen_at(time.time(), what)
        return None

    def _message(self) -> Milestone | None:
        fault = self.seen.get("fault")
        for line in self.chat.read_text().splitlines():
            message = json.loads(line)
            title = message["body"]["attachments"][0]["title"]
            # A warning about so young a model may have come before, and is not about the fault.
            if fault is not None and message["at"] >= fault.at and self.run in title:
                return self._seen_at(message["at"], f'chat: "{title}"')
        return None

    def _notification(self) -> Milestone | None:
        row = self._recovery("d.received_at AS at, r.alert AS alert, d.id AS id")
        if row is None:
            return None
        return self._seen_at(row["at"], f"delivery {row['id']}: {row['alert']}")

    def _request(self) -> Milestone | None:
        row = self._recovery("r.claimed_at AS at, r.action AS action, r.generation AS generation")
        if row is None or row["at"] is None:
            return None
        return self._seen_at(row["at"], f"{row['action']}, generation {row['generation']}")

    def _emergency_checkpoint(self) -> Milestone | None:
        for path in (self.stack.runs / self.run).glob("checkpoints/*/manifest.json"):
            manifest = json.loads(path.read_text())
            if manifest["kind"] == "emergency":
                return Milestone(manifest["created_at"], manifest["step"], path.parent.name)
        return None

    def _rollback(self) -> Milestone | None:
        row = self._recovery("r.answered_at AS at, r.*")
        if row is None or row["result"] != "done":
            return None
        folder = self.stack.runs / self.run / "checkpoints" / row["resumed_from"]
        if not (folder / "manifest.json").exists():
            return None
        what = f"from step {row['step']} to {row['resumed_from']}"
        return Milestone(row["at"], row["resumed_step"], what)

    def _healthy_step(self) -> Milestone | None:
        rollback = self.seen.get("rollback")
        scrapes = self._times("act_run_info", generation="1")
        if rollback is None or not scrapes:
            return None
        # Rules are judged a little after the scrape; all of a judgement's samples have one time.
        worst: dict[float, float] = {}
        for _, samples in self._stored("layer:act_layer_absmax:baseline_ratio"):
            for at, ratio in samples:
                worst[at] = max(ratio, worst.get(at, 0.0))
        healthy = [at for at, ratio in sorted(worst.items()) if at >= scrapes[0] and ratio <= HARD]
        if not healthy:
            return None
        return self._seen_at(healthy[0], "every layer is below 100 times its baseline")

    def _compare_losses(self) -> None:
        fault, rollback = self.seen["fault"].at, self.seen["rollback"].at
        healthy = self.seen["first healthy step"].at
        losses = [sample for _, samples in self._stored("act_loss") for sample in samples]
        last = max(at for at, _ in losses)

        def between(start: float, end: float) -> list[float]:
            return [loss for at, loss in losses if start <= at <= end]

        self.losses = {
            "before": statistics.mean(between(fault - LOSS_SECONDS, fault)),
            "at": max(between(fault, rollback)),
            "after": statistics.mean(between(max(healthy, last - LOSS_SECONDS), last)),
        }

    def _seen_at(self, at: float, detail: str) -> Milestone:
        """A milestone of that time, with the step of the last scrape before it."""
        steps = [
            sample
            for _, samples in self._stored("act_step")
            for sample in samples
            if sample[0] <= at
        ]
        return Milestone(at, int(max(steps)[1]) if steps else None, detail)

    def _times(self, metric: str, **labels: str) -> list[float]:
        return sorted(at for _, samples in self._stored(metric, **labels) for at, _ in samples)

    def _stored(
        self, metric: str, **labels: str
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Each series of the run and its samples, as Prometheus stored them."""
        selector = ",".join(
            f'{name}="{value}"' for name, value in {"run": self.run, **labels}.items()
        )
        # No demo is older than an hour.
        return [
            (series["metric"], [(float(at), float(value)) for at, value in series["values"]])
            for series in self.stack.query(f"{metric}{{{selector}}}[1h]")
        ]

    def _recovery(self, columns: str) -> sqlite3.Row | None:
        rows = self._rows(
            f"SELECT {columns} FROM requests r JOIN deliveries d ON d.id = r.delivery_id"  # noqa: S608
            f" WHERE r.action = 'recover' AND r.run = ? ORDER BY r.created_at",
            self.run,
        )
        return rows[0] if rows else None

    def _rows(self, statement: str, *parameters: str) -> list[sqlite3.Row]:
        uri = f"file:{self.stack.database}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2)) as database:
            database.row_factory = sqlite3.Row
            return database.execute(statement, parameters).fetchall()
