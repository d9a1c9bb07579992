"""Messages to people that are still to be sent, in the receiver's database.

A message and what is to be sent of it, one row a target, are one write: what was acknowledged is
sent, whatever happens to the process. A sending that was under way when the process died is begun
again at the next start, so people may read it twice and never not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from alerting.control import DRILL_ALERT, Answer, Request
from alerting.database import Database
from alerting.message import (
    of_alerts,
    of_answer,
    of_notify_only,
    of_overdue,
    of_unreadable,
    of_watchdog,
)
from alerting.mode import Mode
from alerting.payload import Payload, PayloadError, parse
from alerting.phrases import Language
from alerting.policy import Decision
from alerting.text import Message

SCHEMA = """
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, received_at REAL NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    content TEXT NOT NULL
) STRICT;
CREATE INDEX messages_by_key ON messages (key, received_at);
CREATE TABLE sendings (
    message_id INTEGER NOT NULL REFERENCES messages (id), target TEXT NOT NULL,
    attempts INTEGER NOT NULL, next_at REAL NOT NULL, begun_at REAL, ended_at REAL, result TEXT,
    detail TEXT, PRIMARY KEY (message_id, target)
) STRICT;
CREATE INDEX sendings_open ON sendings (target, message_id) WHERE ended_at IS NULL;
"""
SINCE_SCHEMA = "ALTER TABLE messages ADD COLUMN since REAL;"
SKEW_SECONDS = 60.0
"""Of two copies that come at once the later one may be written first. A copy from further in the
future is a clock that was set back, and holds nothing back."""
_EVER = 0.0
"""For a key that one request alone has: a receiver that was down may learn its end a day later."""
REPEAT_SHARE = 0.9
"""Copies within this share of Alertmanager's repeat interval are one message. The next reminder
comes after all of it, measured from when the first was acknowledged, so a tenth is ample."""

Kind = Literal["alerts", "outcome", "overdue", "notify-only", "watchdog"]
Result = Literal["sent", "failed", "other"]
"""Taken by the target; given up; sent by another receiver (see `alerting.claims`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """A message as it is recorded: its source, from which each language's text is made.

    Attributes:
        kind: "alerts" (a notification of Alertmanager), "outcome" (of a request to a guard),
            "overdue" (a request that is not taken up), "notify-only" (one that was not made) or
            "watchdog" (it stays away, or is back).
        key: equal for what must be told once.
        content: JSON.
        at: when it came, Unix seconds.
        since: what came under the key after this is the same, Unix seconds; None for what came
            within the repeat interval.
    """

    kind: Kind
    key: str
    content: str
    at: float
    since: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """One message to one target, still to be sent; `attempts` were begun so far.

    `key`, `at` and `since` are those of the `News`. `mode` is what was switched to by now, None
    where the config's is in force.
    """

    message_id: int
    target: str
    kind: Kind
    content: str
    attempts: int
    key: str
    at: float
    since: float
    mode: Mode | None = None


def news_of_group(payload: Payload, content: str, at: float) -> News:
    """A notification as news: the same group with the same alerts in the same state is the same.

    Not part of it is what differs between two Alertmanagers: their address and `endsAt`. Nor is the
    state of a drill alone, whose end is no news to people.
    """
    drilling = all(alert.labels.get("alertname") == DRILL_ALERT for alert in payload.alerts)
    alerts = sorted(
        [
            "" if drilling else alert.status,
            alert.starts_at.timestamp() if alert.starts_at else 0.0,
            sorted(alert.labels.items()),
        ]
        for alert in payload.alerts
    )
    text = json.dumps([payload.group_key, "" if drilling else payload.status, alerts])
    key = hashlib.sha256(text.encode()).hexdigest()
    return News(kind="alerts", key=key, content=content, at=at)


def news_of_answer(
    request: Request,
    answer: Answer | None,
    at: float,
    *,
    detail: str = "",
    rollbacks_left: int | None = None,
) -> News:
    """What became of a request as news; see `message.of_answer`.

    Alertmanager repeats what asks for something every 5 minutes. A healthy trainer refuses each
    time, and one that is not well makes a backup each quarter of an hour: equal refusals are one,
    and so are backups of one incident. Each other end is told.
    """
    key = f"request {request.id}"
    since: float | None = _EVER
    incident = f"{request.action} {request.generation} {request.run}"
    if answer is not None and answer.result == "refused":
        key, since = f"refused {incident} {answer.detail}", None
    elif answer is not None and answer.result == "done" and request.action == "checkpoint":
        key, since = f"done {incident}", None
    content = {
        "request": dataclasses.asdict(request),
        "answer": dataclasses.asdict(answer) if answer is not None else None,
        "detail": detail,
        "rollbacks_left": rollbacks_left,
    }
    return News(kind="outcome", key=key, content=json.dumps(content), at=at, since=since)


def news_of_overdue(request: Request, seconds: float, at: float) -> News:
    """A request that was open for so long, once."""
    content = json.dumps({"request": dataclasses.asdict(request), "seconds": seconds})
    key = f"overdue {request.id}"
    return News(kind="overdue", key=key, content=content, at=at, since=_EVER)


def news_of_notify_only(decision: Decision, at: float) -> News:
    """A request that was not made: one message an incident and repeat interval."""
    content = {"run": decision.run, "action": decision.action, "alert": decision.alertname}
    return News(
        kind="notify-only",
        key=f"notify-only {decision.action} {decision.generation} {decision.run}",
        content=json.dumps(content),
        at=at,
    )


def news_of_watchdog(seconds: float, at: float, since: float, *, back: bool) -> News:
    """The watchdog as news, each time: how long it was away, and whether it is back.

    Two receivers have no name in common for one absence. What another one told after our own last
    beat (that it is back: after we missed it) was of this one.
    """
    content = json.dumps({"seconds": seconds, "back": back})
    key = f"watchdog {'back' if back else 'missed'}"
    return News(kind="watchdog", key=key, content=content, at=at, since=since)


def compose(
    sending: Sending, language: Language, dashboard_url: str | None, mode: Mode = "act"
) -> Message:
    """The text of a recorded message; `mode` is the config's."""
    acts = (sending.mode or mode) == "act"
    try:
        if sending.kind == "alerts":
            return of_alerts(parse(sending.content), language, dashboard_url, acts=acts)
        content = json.loads(sending.content)
        if sending.kind == "overdue":
            request = Request(**content["request"])
            return of_overdue(request, content["seconds"], language, dashboard_url)
        if sending.kind == "notify-only":
            return of_notify_only(**content, language=language, dashboard_url=dashboard_url)
        if sending.kind == "watchdog":
            return of_watchdog(language, content["seconds"], back=content["back"])
        answer = content["answer"]
        return of_answer(
            Request(**content["request"]),
            Answer(**answer) if answer is not None else None,
            language,
            detail=content["detail"],
            rollbacks_left=content["rollbacks_left"],
            dashboard_url=dashboard_url,
        )
    except (PayloadError, KeyError, TypeError, ValueError) as error:
        # It was accepted once, so by a version with other bounds or fields.
        return of_unreadable(language, str(error))


class Outbox:
    """The tables `messages` and `sendings`; all methods may be called from any thread.

    Args:
        database: open; has `SCHEMA` in it.
        targets: names of those who get each message.
        repeat_interval_seconds: Alertmanager's for people.

    Raises:
        StoreError: (every method, or the future) it could not be written or read just now.
    """

    def __init__(
        self, database: Database, targets: tuple[str, ...], repeat_interval_seconds: float
    ) -> None:
        self._database = database
        self._targets = targets
        self._once_in_seconds = repeat_interval_seconds * REPEAT_SHARE

    def add(self, news: News) -> Future[int]:
        """Record a message; the future holds its id, or that of the one that it repeats."""
        return self._database.submit(lambda connection: self.insert(connection, news))

    def insert(self, connection: sqlite3.Connection, news: News) -> int:
        """The same within a transaction of the caller."""
        known = connection.execute(
            "SELECT id FROM messages WHERE key = ? AND received_at > ? AND received_at < ?"
            " ORDER BY id DESC LIMIT 1",
            (
                news.key,
                news.at - self._once_in_seconds if news.since is None else news.since,
                news.at + SKEW_SECONDS,
            ),
        ).fetchone()
        if known is not None:
            return int(known[0])
        cursor = connection.execute(
            "INSERT INTO messages (received_at, kind, key, content, since) VALUES (?, ?, ?, ?, ?)",
            (news.at, news.kind, news.key, news.content, news.since),
        )
        identifier = int(cursor.lastrowid or 0)
        connection.executemany(
            "INSERT INTO sendings (message_id, target, attempts, next_at) VALUES (?, ?, 0, ?)",
            [(identifier, target, news.at) for target in self._targets],
        )
        return identifier

    def next_due(self, target: str, now: float, longest_wait: float) -> Sending | None:
        """The oldest message for that target whose time has come.

        Args:
            target: the target's name.
            now: Unix seconds.
            longest_wait: no message is put off for longer, so one that seems to be was put off
                before the clock was set back.
        """
        rows = self._database.read(
            "SELECT message_id, kind, content, attempts, key, received_at,"
            " coalesce(since, received_at - ?), (SELECT mode FROM mode) FROM sendings"
            " JOIN messages ON messages.id = message_id WHERE target = ? AND ended_at IS NULL"
            " AND (next_at <= ? OR next_at > ?) ORDER BY message_id LIMIT 1",
            self._once_in_seconds,
            target,
            now,
            now + longest_wait,
        )
        if not rows:
            return None
        identifier, kind, content, attempts, key, at, since, mode = rows[0]
        return Sending(
            message_id=identifier,
            target=target,
            kind=kind,
            content=content,
            attempts=attempts,
            key=key,
            at=at,
            since=since,
            mode=mode,
        )

    def begin(self, sending: Sending, now: float) -> None:
        """Record that it is being sent."""
        self._update(sending, "attempts = attempts + 1, begun_at = ?", now)

    def postpone(self, sending: Sending, until: float, detail: str) -> None:
        """Record that it was not taken and is to be sent again."""
        self._update(sending, "next_at = ?, detail = ?", until, detail)

    def end(self, sending: Sending, result: Result, detail: str, now: float) -> None:
        """Record that it was taken, or given up."""
        self._update(sending, "ended_at = ?, result = ?, detail = ?", now, result, detail)

    def abandon_others(self, now: float) -> int:
        """Give up what is for targets that there are no more; how many messages that were."""

        def work(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "UPDATE sendings SET ended_at = ?, result = 'failed',"
                " detail = 'the target is not configured any more'"
                " WHERE ended_at IS NULL AND target NOT IN (SELECT value FROM json_each(?))",
                (now, json.dumps(self._targets)),
            ).rowcount

        return self._database.submit(work).result()

    def _update(self, sending: Sending, change: str, *values: object) -> None:
        statement = f"UPDATE sendings SET {change} WHERE message_id = ? AND target = ?"  # noqa: S608
        self._database.submit(
            lambda connection: connection.execute(
                statement, (*values, sending.message_id, sending.target)
            )
        ).result()
