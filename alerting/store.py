"""The receiver's memory: deliveries, decisions, requests and messages in one SQLite file.

What is in the file is public: open it read-only (`file:PATH?mode=ro`) while the receiver runs.
Times are Unix seconds; a field without a value is NULL.

    deliveries   id, received_at, handled_at (NULL until all of it is decided), payload (the JSON
                 text as Alertmanager sent it)
    decisions    id, delivery_id, run, generation, action, alertname, outcome (see
                 `policy.OUTCOMES`), reason, request_id, at
    requests     id, run, generation, action, alert, delivery_id, control (the control directory's
                 path), created_at, claimed_at (NULL: intended, not yet known to be claimed),
                 and from the guard's answer, NULL until it came: result ("done", "refused",
                 "failed", or the receiver's own word "lost"), detail, step, onset, checkpoint,
                 resumed_from, resumed_step, new_generation, answered_at; where it was open for too
                 long: overdue_at (when people were told), escalated_at (when the command of
                 `escalate:` was begun), escalation (what came of that); found (1 where another
                 receiver made it and this one, which has a folder in common with it, found it open)
    messages     id, received_at, kind (see `outbox.Kind`), key (equal for what is told once),
                 content (JSON: the payload, the request with its answer, or what else is told),
                 since (what came under the key after this is the same; NULL: what came within the
                 repeat interval)
    sendings     message_id, target, attempts (begun so far), next_at (when the next is due),
                 begun_at (of the last one), ended_at (NULL until it was taken or given up),
                 result ("sent", "failed", "other": another receiver sent it), detail (what the
                 target said last)
    watchdog     one row once it has come: came (how often), last_at, missed_at (when people were
                 told that it stays away, NULL while it does not)
    mode         one row once it was switched: mode (see `mode.MODES`), at

Every method that writes returns when the write is on the disk.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alerting.control import Answer, Request
from alerting.database import Database, Reader, StoreError
from alerting.mode import SCHEMA as MODE_SCHEMA
from alerting.outbox import SCHEMA as OUTBOX_SCHEMA
from alerting.outbox import SINCE_SCHEMA, News, Outbox
from alerting.policy import Decision
from alerting.watchdog import SCHEMA as WATCHDOG_SCHEMA
from alerting.watchdog import Beats

__all__ = ["Delivery", "Intent", "Store", "StoreError", "open_reader"]

APPLICATION_ID = 0x61637477
"""The letters "actw"; `file` and SQLite show it."""

_DELIVERIES_SCHEMA = """
CREATE TABLE deliveries (
    id INTEGER PRIMARY KEY, received_at REAL NOT NULL, handled_at REAL, payload TEXT NOT NULL
) STRICT;
CREATE INDEX deliveries_unhandled ON deliveries (id) WHERE handled_at IS NULL;
CREATE TABLE requests (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, generation INTEGER NOT NULL, action TEXT NOT NULL,
    alert TEXT NOT NULL, delivery_id INTEGER NOT NULL REFERENCES deliveries (id),
    control TEXT NOT NULL, created_at REAL NOT NULL, claimed_at REAL,
    result TEXT, detail TEXT, step INTEGER, onset INTEGER, checkpoint TEXT, resumed_from TEXT,
    resumed_step INTEGER, new_generation INTEGER, answered_at REAL
) STRICT;
CREATE INDEX requests_unanswered ON requests (id) WHERE answered_at IS NULL;
CREATE INDEX requests_of_delivery ON requests (delivery_id);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY, delivery_id INTEGER NOT NULL REFERENCES deliveries (id),
    run TEXT NOT NULL, generation INTEGER, action TEXT NOT NULL, alertname TEXT NOT NULL,
    outcome TEXT NOT NULL, reason TEXT NOT NULL, request_id TEXT, at REAL NOT NULL
) STRICT;
CREATE INDEX decisions_of_delivery ON decisions (delivery_id);
"""
_RUNS_SCHEMA = """
CREATE INDEX decisions_of_run ON decisions (run, id);
CREATE INDEX requests_of_run ON requests (run, id);
"""
_OVERDUE_SCHEMA = """
ALTER TABLE requests ADD COLUMN overdue_at REAL;
ALTER TABLE requests ADD COLUMN escalated_at REAL;
ALTER TABLE requests ADD COLUMN escalation TEXT;
"""
_FOUND_SCHEMA = "ALTER TABLE requests ADD COLUMN found INTEGER NOT NULL DEFAULT 0;"
SCHEMAS = (
    _DELIVERIES_SCHEMA,
    OUTBOX_SCHEMA,
    _RUNS_SCHEMA,
    WATCHDOG_SCHEMA,
    _OVERDUE_SCHEMA,
    MODE_SCHEMA,
    SINCE_SCHEMA + _FOUND_SCHEMA,
)
"""Versions 1 to 7. What was shipped once stays as it is; a change is one more of them."""

_INTENT = (
    "SELECT id, run, generation, action, alert, created_at, delivery_id, control, overdue_at,"
    " escalated_at, found FROM requests"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A recorded notification: `payload` is the JSON text as it was received."""

    id: int
    received_at: float
    payload: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """A request as it is recorded before it is claimed.

    Attributes:
        request: what will be, or was, claimed.
        delivery_id: the delivery that asked for it.
        control: path of the control directory that it goes to.
        overdue_at: when it was found to be open for too long, None so far.
        escalated_at: when it was handed to the command for that, None so far.
        found: whether another receiver made it.
    """

    request: Request
    delivery_id: int
    control: Path
    overdue_at: float | None = None
    escalated_at: float | None = None
    found: bool = False


def open_reader(path: Path) -> Reader:
    """The tables for somebody who only looks, whether or not a receiver runs.

    Raises:
        StoreError: it is not there, or of another version.
    """
    if not path.exists():
        raise StoreError(f"No receiver has run yet: there is no database {path}.")
    return Reader(path, APPLICATION_ID, len(SCHEMAS))


class Store:
    """The tables; all methods may be called from any thread.

    Args:
        path: the database file; made when it does not exist.
        targets: names of those who get messages.
        repeat_interval_seconds: Alertmanager's for people.

    Attributes:
        outbox: the messages.
        beats: the watchdog's.

    Raises:
        ConfigError: the file cannot serve as this database (see `alerting.database`).
        StoreError: (every method) it could not be written or read just now.
    """

    def __init__(
        self, path: Path, targets: tuple[str, ...] = (), repeat_interval_seconds: float = 0.0
    ) -> None:
        self._database = Database(path, application_id=APPLICATION_ID, schemas=SCHEMAS)
        self.outbox = Outbox(self._database, targets, repeat_interval_seconds)
        self.beats = Beats(self._database, self.outbox if targets else None)

    def close(self) -> None:
        """Finish the writes that wait, and close the file."""
        self._database.close()

    def check_writable(self) -> Future[None]:
        """A future that ends well once a changeless write was committed to the disk."""
        return self._database.check()

    def add_delivery(self, payload: str, received_at: float) -> Future[int]:
        """Record a notification; the future holds its id once it is on the disk."""

        def work(connection: sqlite3.Connection) -> int:
            cursor = connection.execute(
                "INSERT INTO deliveries (received_at, payload) VALUES (?, ?)",
                (received_at, payload),
            )
            return int(cursor.lastrowid or 0)

        return self._database.submit(work)

    def next_unhandled(self, after: int = 0) -> Delivery | None:
        """The oldest delivery with an id above `after` that is not yet handled."""
        rows = self._database.read(
            "SELECT id, received_at, payload FROM deliveries"
            " WHERE handled_at IS NULL AND id > ? ORDER BY id LIMIT 1",
            after,
        )
        return Delivery(id=rows[0][0], received_at=rows[0][1], payload=rows[0][2]) if rows else None

    def finish_delivery(self, delivery_id: int, decisions: Iterable[Decision], at: float) -> None:
        """Mark a delivery as handled, together with the decisions that needed no request."""

        def work(connection: sqlite3.Connection) -> None:
            for decision in decisions:
                _insert_decision(connection, delivery_id, decision, at)
            connection.execute(
                "UPDATE deliveries SET handled_at = ? WHERE id = ?", (at, delivery_id)
            )

        self._database.submit(work).result()

    def decided(self, delivery_id: int) -> set[tuple[str, str]]:
        """(run, action) of what was decided already in a delivery whose handling broke off."""
        return set(
            self._database.read(
                "SELECT run, action FROM decisions WHERE delivery_id = ?", delivery_id
            )
        )

    def intend(self, intent: Intent) -> None:
        """Record a request before it is claimed: after a crash it is known by its id."""
        self._database.submit(lambda connection: _insert_intent(connection, intent)).result()

    def intended(self, delivery_id: int, run: str, action: str) -> Intent | None:
        """The request that a broken-off handling left behind, claimed or not, undecided."""
        rows = self._database.read(
            f"{_INTENT} WHERE delivery_id = ? AND run = ? AND action = ? AND claimed_at IS NULL",
            delivery_id,
            run,
            action,
        )
        return _intent(rows[0]) if rows else None

    def forget(self, intent: Intent) -> None:
        """Drop a request that was never claimed."""
        self._write("DELETE FROM requests WHERE id = ?", intent.request.id)

    def decide(
        self,
        delivery_id: int,
        decision: Decision,
        at: float,
        intent: Intent | None = None,
        news: News | None = None,
        found: Intent | None = None,
    ) -> None:
        """Record a decision, what became of its intended request, and the message that tells of it.

        The request was claimed or never made. `found` is another receiver's that is open instead.
        """

        def work(connection: sqlite3.Connection) -> None:
            _insert_decision(connection, delivery_id, decision, at)
            if intent is not None:
                statement = (
                    "UPDATE requests SET claimed_at = :at WHERE id = :id"
                    if decision.outcome == "requested"
                    else "DELETE FROM requests WHERE id = :id"
                )
                connection.execute(statement, {"at": at, "id": intent.request.id})
            if found is not None:
                # One of our own is there already, and so is one that was found before.
                _insert_intent(connection, found, at)
            if news is not None:
                self.outbox.insert(connection, news)

        self._database.submit(work).result()

    def unanswered(self) -> list[Intent]:
        """The claimed requests whose answer is not recorded yet, oldest first."""
        rows = self._database.read(
            f"{_INTENT} WHERE answered_at IS NULL AND claimed_at IS NOT NULL ORDER BY id"
        )
        return [_intent(row) for row in rows]

    def record_answer(self, answer: Answer, news: News | None = None) -> None:
        """Record what the guard did with a request, and with it the message that tells of it."""
        fields = dataclasses.asdict(answer)

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE requests SET result = :result, detail = :detail, step = :step,"
                " onset = :onset, checkpoint = :checkpoint, resumed_from = :resumed_from,"
                " resumed_step = :resumed_step, new_generation = :generation,"
                " answered_at = :answered_at WHERE id = :id",
                fields,
            )
            if news is not None:
                self.outbox.insert(connection, news)

        self._database.submit(work).result()

    def record_lost(
        self, request_id: str, detail: str, at: float, news: News | None = None
    ) -> None:
        """Record that a request vanished without an answer, and the message that tells of it."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE requests SET result = 'lost', detail = ?, answered_at = ? WHERE id = ?",
                (detail, at, request_id),
            )
            if news is not None:
                self.outbox.insert(connection, news)

        self._database.submit(work).result()

    def record_overdue(self, request_id: str, at: float, news: News | None) -> None:
        """Record that a request is open for too long, with the message that tells of it."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE requests SET overdue_at = ? WHERE id = ?", (at, request_id))
            if news is not None:
                self.outbox.insert(connection, news)

        self._database.submit(work).result()

    def begin_escalation(self, request_id: str, at: float) -> None:
        """Record that the command is about to be run; after a crash it is not run again."""
        self._write("UPDATE requests SET escalated_at = ? WHERE id = ?", at, request_id)

    def end_escalation(self, request_id: str, said: str) -> None:
        """Record what came of the command."""
        self._write("UPDATE requests SET escalation = ? WHERE id = ?", said, request_id)

    def read(self, statement: str, *values: object) -> list[Any]:
        """All rows of a SELECT over what is committed."""
        return self._database.read(statement, *values)

    def _write(self, statement: str, *values: object) -> None:
        self._database.submit(lambda connection: connection.execute(statement, values)).result()


def _insert_decision(
    connection: sqlite3.Connection, delivery_id: int, decision: Decision, at: float
) -> None:
    connection.execute(
        "INSERT INTO decisions (delivery_id, run, generation, action, alertname, outcome, reason,"
        " request_id, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            delivery_id,
            decision.run,
            decision.generation,
            decision.action,
            decision.alertname,
            decision.outcome,
            decision.reason,
            decision.request_id,
            at,
        ),
    )


def _insert_intent(
    connection: sqlite3.Connection, intent: Intent, claimed_at: float | None = None
) -> None:
    request = intent.request
    connection.execute(
        "INSERT OR IGNORE INTO requests (id, run, generation, action, alert, delivery_id, control,"
        " created_at, claimed_at, found) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            request.id,
            request.run,
            request.generation,
            request.action,
            request.alert,
            intent.delivery_id,
            str(intent.control),
            request.created_at,
            claimed_at,
            intent.found,
        ),
    )


def _intent(row: tuple[Any, ...]) -> Intent:
    identifier, run, generation, action, alert, created_at, delivery_id, control, *times = row
    return Intent(
        request=Request(
            id=identifier,
            run=run,
            generation=generation,
            action=action,
            alert=alert,
            created_at=created_at,
        ),
        delivery_id=delivery_id,
        control=Path(control),
        overdue_at=times[0],
        escalated_at=times[1],
        found=bool(times[2]),
    )
