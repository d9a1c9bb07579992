"""A drill from its first hop to its last.

The alert is `ActDrill`, which asks for a recovery like a real one and so takes the same routes. The
receiver makes a request "drill" of it, which the guard answers with what it would do. What became
of it is read where it is recorded: Alertmanager's API, the receiver's database, the control
directory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TextIO

from alerting.control import DRILL_ALERT, ControlDirectory, new_request_id
from alerting.drill.alertmanager import Alertmanager, AlertmanagerError, Count, Taken
from alerting.drill.deployment import find_live_run, receiver_answers
from alerting.drill.people import look_for_messages, look_for_native
from alerting.drill.record import Record
from alerting.drill.report import Report
from alerting.drill.trainer import look_for_answer, look_for_delivery
from alerting.exceptions import ConfigError
from alerting.settings import Settings
from alerting.store import StoreError, open_reader

MARGIN_SECONDS = 60.0
"""A drill that is killed before it ends its alert leaves one that ends by itself so much later."""
_LABEL = "drill"
_OWN_LABELS = {"alertname", "severity", "action", "run", _LABEL}
_LABEL_NAME = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")  # Prometheus' data model
_RUNBOOK = "https://github.com/act-exporter/act-exporter/blob/main/README.md#a-drill"


def perform(
    settings: Settings,
    alertmanager: str,
    run: str,
    *,
    people: bool,
    labels: Sequence[str] = (),
    wait_seconds: float,
    out: TextIO,
) -> bool:
    """Go through all hops and tell of each; whether every one is fine.

    Args:
        settings: the receiver's.
        alertmanager: Alertmanager's address.
        run: the run's name.
        people: whether people are told.
        labels: further ones of the alert, each NAME=VALUE: what routes ask for that are not the
            shipped ones.
        wait_seconds: how long to wait for all of it.
        out: where each hop is told as it comes.

    Raises:
        ConfigError: an address or a label is none, or the receiver's port is known to itself alone.
        StoreError: the receiver's database could not be read.
    """
    if settings.port == 0:
        raise ConfigError("listen: a drill needs the port that the receiver listens on, not 0.")
    api = Alertmanager(alertmanager)
    more = dict(map(_label, labels))
    report = Report(out, wait_seconds)
    control = find_live_run(settings.runs, run, report)
    answers = receiver_answers(settings, run, report)
    if control is None:
        report.tell("skipped", "alertmanager", "nothing is sent about a run that is not live")
        return False
    identifier = new_request_id()
    with contextlib.ExitStack() as opened:
        record = None
        if answers:
            try:
                reader = opened.enter_context(contextlib.closing(open_reader(settings.database)))
                record = Record(reader, identifier)
            except StoreError as error:
                report.fail("receiver", f"its database: {error}")
        alert = _Alert(api, run, identifier, people=people, labels=more)
        report.start()
        try:
            before = api.counts()
            alert.begin(wait_seconds + MARGIN_SECONDS)
        except AlertmanagerError as error:
            report.fail("alertmanager", f"{error}: see --alertmanager")
            return False
        try:
            _follow(settings, alert, control, record, before, report)
        except AlertmanagerError as error:
            report.fail("alertmanager", str(error))
        finally:
            alert.end(report)
    return not report.is_broken


def _label(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not (equals and value and _LABEL_NAME.fullmatch(name)):
        raise ConfigError(f"--label {given}: expected NAME=VALUE, such as namespace=training.")
    if name in _OWN_LABELS:
        raise ConfigError(f"--label {given}: the drill sets {name} itself.")
    return name, value


class _Alert:
    """The synthetic alert, from its beginning to its end."""

    def __init__(
        self,
        api: Alertmanager,
        run: str,
        identifier: str,
        *,
        people: bool,
        labels: dict[str, str],
    ) -> None:
        self.api = api
        self.run = run
        self.people = people
        self._identifier = identifier
        self._labels = labels
        self._starts_at = datetime.now(UTC)

    def begin(self, seconds: float) -> None:
        self._give(self._starts_at + timedelta(seconds=seconds))

    def end(self, report: Report) -> None:
        try:
            self._give(datetime.now(UTC))
        except AlertmanagerError as error:
            report.fail("end", f"{error}; the alert ends by itself, {MARGIN_SECONDS:g} s from now")
        else:
            report.tell("ok", "end", "the alert was ended")

    def look(self, report: Report) -> Taken | None:
        """Whether Alertmanager has it, and for which of its receivers."""
        find = partial(self.api.find, _LABEL, self._identifier)
        taken = report.wait("alertmanager", find, "for its routes")
        if taken is None:
            report.fail("alertmanager", "it took the alert and does not show it")
            return None
        names = ", ".join(taken.receivers)
        if taken.suppressed:
            report.fail(
                "alertmanager",
                f"a silence or an inhibit rule keeps the alert from {names}; see its page",
            )
            return None
        report.tell("ok", "alertmanager", f"{self.api.shown} took the alert, for {names}")
        return taken

    def _give(self, ends_at: datetime) -> None:
        self.api.give(
            {
                "labels": {
                    **self._labels,
                    "alertname": DRILL_ALERT,
                    # What is an info is told to nobody; the trainer's route looks at `action`.
                    "severity": "critical" if self.people else "info",
                    "action": "recover",
                    "run": self.run,
                    _LABEL: self._identifier,
                },
                "annotations": {
                    "summary": f"DRILL, nothing is wrong with run {self.run} (演练，并无故障)",
                    "description": (
                        "Somebody tries with `act-alerting drill` whether alerts arrive here. "
                        "There is nothing to do. 有人在检查告警能否送达这里，无需处理。"
                    ),
                    "runbook_url": _RUNBOOK,
                },
                "startsAt": self._starts_at.isoformat(),
                "endsAt": ends_at.isoformat(),
            }
        )


def _follow(
    settings: Settings,
    alert: _Alert,
    control: ControlDirectory,
    record: Record | None,
    before: dict[str, Count],
    report: Report,
) -> None:
    def since(kind: str) -> Count:
        return alert.api.counts().get(kind, Count()).since(before.get(kind, Count()))

    taken = alert.look(report)
    if taken is None:
        return
    if record is None:
        report.tell("skipped", "delivery and guard", "the receiver does not answer")
    elif (delivery := look_for_delivery(record, partial(since, "webhook"), report)) is None:
        report.tell("skipped", "guard", "it was not asked")
    else:
        look_for_answer(control, alert.run, record, delivery, report)
    if not alert.people:
        report.tell("skipped", "people", "they are left out, as asked")
        return
    kinds = alert.api.integrations(taken.receivers)
    native = [kind for kind in kinds if kind != "webhook"]
    for kind in native:
        look_for_native(kind, partial(since, kind), report)
    if settings.notify and record is not None:
        look_for_messages(record, settings.notify, report)
    elif settings.notify:
        report.tell("skipped", "people of `notify:`", "the receiver does not answer")
    elif not native:
        report.fail("people", "nobody is told: there is neither chat, nor email, nor `notify:`")
