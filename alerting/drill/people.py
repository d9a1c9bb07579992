"""The people's side of a drill: what Alertmanager sends itself, and what the receiver sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alerting.drill.alertmanager import Count
from alerting.drill.record import Record
from alerting.drill.report import Report
from alerting.targets import Target

_NOTE = "Alertmanager counts by kind, so others' messages of this kind are among them"


def look_for_native(kind: str, count: Callable[[], Count], report: Report) -> None:
    """Whether Alertmanager's own integration ("slack", "email") had its message taken."""
    hop = f"people by {kind}"

    def taken() -> Count | None:
        now = count()
        return now if now.tried > now.failed else None

    found = report.wait(hop, taken, "for Alertmanager to send it")
    if found is not None and not found.failed:
        report.tell("ok", hop, f"{found.tried:.0f} taken, none failed ({_NOTE})")
        return
    now = found or count()
    if now.tried:
        report.fail(
            hop,
            f"{now.failed:.0f} of {now.tried:.0f} attempts failed: look into Alertmanager's log "
            f"({_NOTE})",
        )
    else:
        report.fail(
            hop,
            "Alertmanager sent nothing: without the shipped route for ActDrill it may wait for "
            "group_wait, or for group_interval after another alert of the run; see --wait",
        )


def look_for_messages(record: Record, targets: Iterable[Target], report: Report) -> None:
    """Whether each of the receiver's targets took the message."""
    message = report.wait("people", record.message, "for Alertmanager to post to /messages")
    if message is None:
        report.fail(
            "people",
            "nothing came to /messages, so `notify:` is not told of alerts: uncomment "
            "webhook_configs of the receiver `people` in alertmanager.yml",
        )
        return
    for target in targets:
        hop = f"people by {target.name}"

        def ended(name: str = target.name) -> str | None:
            sending = record.sending(message, name)
            return sending[0] if sending else None

        result = report.wait(hop, ended, f"for {target.kind} to take the message")
        _, attempts, detail = record.sending(message, target.name) or (None, 0, None)
        if result == "sent":
            report.tell("ok", hop, f"{target.kind} took the message ({detail})")
        elif result == "other":
            report.tell("ok", hop, f"another receiver sent the message ({detail})")
        elif attempts:
            report.fail(hop, f"{target.kind} has not taken the message: {detail}")
        else:
            report.fail(hop, "it was not sent in time: its queue is long, or it was added later")
