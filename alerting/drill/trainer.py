"""The trainer's side of a drill: from Alertmanager to the receiver, and to the guard's answer."""

from __future__ import annotations

from collections.abc import Callable

from alerting.control import ControlDirectory
from alerting.drill.alertmanager import Count
from alerting.drill.record import Record
from alerting.drill.report import Report
from alerting.exceptions import ControlError


def look_for_delivery(record: Record, webhooks: Callable[[], Count], report: Report) -> int | None:
    """The delivery that brought the alert, or None where none did.

    Args:
        record: of the receiver.
        webhooks: what Alertmanager has posted since the drill began.
        report: gets a line.
    """
    delivery = report.wait("delivery", record.delivery, "for Alertmanager to post to /alerts")
    if delivery is not None:
        report.tell("ok", "delivery", "Alertmanager posted it to the receiver, at /alerts")
    elif failed := webhooks().failed:
        report.fail(
            "delivery",
            f"nothing came to /alerts, and {failed:.0f} posts of Alertmanager's failed: look at "
            "the url and the copy of the token of its receiver `trainer`, and into its log",
        )
    else:
        report.fail(
            "delivery",
            "Alertmanager posted nothing to /alerts: it needs the route with "
            'action=~"checkpoint|recover" of the shipped alertmanager.yml',
        )
    return delivery


def look_for_answer(
    control: ControlDirectory, run: str, record: Record, delivery: int, report: Report
) -> None:
    """Whether the guard answered, and what it would have done."""
    decision = report.wait(
        "guard", lambda: record.decision(delivery, run), "for the receiver's decision"
    )
    if decision is None:
        report.fail("guard", "the receiver decided nothing about it: restart it in this version")
        return
    outcome, reason, request = decision
    if outcome not in ("requested", "open") or request is None:
        report.fail("guard", f"it was not asked ({outcome}): {reason}")
        return
    try:
        answer = report.wait(
            "guard", lambda: control.read_answer(request), "for the end of the trainer's step"
        )
    except (ControlError, OSError) as error:
        report.fail("guard", f"its answer cannot be read: {error}")
        return
    if answer is None:
        report.fail(
            "guard",
            "it did not answer: its process has ended or hangs, its step is longer than --wait, "
            "or it is of a version without drills",
        )
    elif answer.result == "done":
        report.tell("ok", "guard", f"at step {answer.step}: {answer.detail}")
    else:
        report.fail("guard", f"{answer.result} at step {answer.step}: {answer.detail}")
