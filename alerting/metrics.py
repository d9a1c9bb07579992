"""The receiver's own metrics; every series exists from the start, at 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from alerting.control import ACTIONS, Result
from alerting.policy import OUTCOMES

CODES = (202, 400, 401, 408, 413, 422, 503)
"""What `POST /alerts`, `POST /messages` and `POST /watchdog` answer."""
NO_ACTION = "none"
"""The `action` label's value for alerts whose own is missing or unknown: it is not ours to copy."""
ANSWERS = (*get_args(Result), "lost")
NOTIFICATIONS = ("sent", "retried", "failed", "other")
"""Of a message to one target: taken; not taken, to be sent again; given up; sent by the other
receiver."""


class Metrics:
    """Metrics on a registry that the caller owns.

    Args:
        registry: where they are registered.
        targets: names of those who get messages.

    Attributes:
        deliveries: act_webhook_deliveries_total{code}.
        alerts: act_webhook_alerts_total{status}, of deliveries to `/alerts` that were recorded.
        requests: act_recovery_requests_total{action, outcome}: what was decided.
        answers: act_recovery_answers_total{action, result}: what became of the requests.
        notifications: act_notifications_total{target, result}: what became of the messages.
        watchdog_age: act_watchdog_age_seconds, NaN before the first.
    """

    def __init__(self, registry: CollectorRegistry, targets: Iterable[str] = ()) -> None:
        self.registry = registry
        self.deliveries = Counter(
            "act_webhook_deliveries_total",
            "Notifications from Alertmanager, by the HTTP status they were answered with.",
            ["code"],
            registry=registry,
        )
        self.alerts = Counter(
            "act_webhook_alerts_total",
            "Alerts in the notifications that were recorded, by status.",
            ["status"],
            registry=registry,
        )
        self.requests = Counter(
            "act_recovery_requests_total",
            "Decisions about what alerts asked for; outcome `requested` is a request to the guard.",
            ["action", "outcome"],
            registry=registry,
        )
        self.answers = Counter(
            "act_recovery_answers_total",
            "Requests to the guard that ended, by what it answered; `lost` is without an answer.",
            ["action", "result"],
            registry=registry,
        )
        self.notifications = Counter(
            "act_notifications_total",
            "Messages to people: taken by the target, to be sent again, given up, or taken from"
            " another receiver.",
            ["target", "result"],
            registry=registry,
        )
        self.watchdog_age = Gauge(
            "act_watchdog_age_seconds",
            "Time since Alertmanager last posted the watchdog; NaN before the first.",
            registry=registry,
        )
        self.watchdog_age.set(math.nan)
        for target in targets:
            for result in NOTIFICATIONS:
                self.notifications.labels(target, result)
        for code in CODES:
            self.deliveries.labels(str(code))
        for status in ("firing", "resolved"):
            self.alerts.labels(status)
        for action in (*ACTIONS, NO_ACTION):
            for outcome in OUTCOMES:
                self.requests.labels(action, outcome)
        for action in ACTIONS:
            for result in ANSWERS:
                self.answers.labels(action, result)


class WithoutCreated(Collector):
    """A registry's metrics without the `_created` series that client_python adds to counters.

    They double the page and nothing here reads them; the library's own switch is process-wide.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The metrics, as the exposition functions take them."""
        for metric in self._registry.collect():
            metric.samples = [
                sample for sample in metric.samples if not sample.name.endswith("_created")
            ]
            yield metric
