"""Panels of the receiver: what alerts asked for, what was answered, and whom messages reached."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries

from grafana.panels import lines, query


def panels() -> list[timeseries.Panel]:
    """All of them; the receiver's counts know no run."""
    by = {
        "Decisions about what alerts ask for": (
            "act_recovery_requests_total",
            "action, outcome",
            "`requested` is a request to a guard; `open`, `limited` and `covered` join one that "
            "there is; `refused` is not for us. What people should see here after an anomaly is "
            "one `requested`.",
        ),
        "Requests that ended": (
            "act_recovery_answers_total",
            "action, result",
            "`done` is good; `refused`: the trainer has seen no bad step; `failed` or `lost`: act.",
        ),
        "Notifications from Alertmanager": (
            "act_webhook_deliveries_total",
            "code",
            "By the answer's HTTP code. 202 is good; 401 is a wrong token; 503 means that the "
            "receiver could not write them down, and they come again.",
        ),
        "Messages to people": (
            "act_notifications_total",
            "target, result",
            "`sent` is good, `retried` comes again, `failed` was given up: somebody heard nothing.",
        ),
    }
    by_counter = [
        lines(
            f"{title}, a minute",
            text,
            query(
                f"60 * sum by ({labels}) (rate({metric}[$__rate_interval])) > 0",
                " ".join(f"{{{{{label}}}}}" for label in labels.split(", ")),
            ),
            unit="short",
        )
        for title, (metric, labels, text) in by.items()
    ]
    return [
        *by_counter,
        lines(
            "Since Alertmanager last posted the watchdog",
            "Under two minutes is good. One that grows means that alerts do not get through: the "
            "receiver then tells people itself.",
            query("act_watchdog_age_seconds", "{{instance}}"),
            unit="s",
            alerts=["ActWatchdog"],
        ),
        lines(
            "Messages given up, of the last six minutes",
            "By Alertmanager and by the receiver. No lines is good. By webhook go the requests to "
            "the trainer; all else goes to people.",
            query(
                "sum by (integration) (increase(alertmanager_notifications_failed_total[6m])) > 0",
                "Alertmanager: {{integration}}",
            ),
            query(
                'sum by (target) (increase(act_notifications_total{result="failed"}[6m])) > 0',
                "receiver: {{target}}",
            ),
            unit="short",
            alerts=["ActNotificationsFailing", "ActMessagesFailing"],
        ),
    ]
