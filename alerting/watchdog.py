"""The dead man's switch inside of the receiver: people hear of it when the watchdog stays away.

ActWatchdog always fires, and Alertmanager posts it again and again. Where it comes no more,
Prometheus, Alertmanager or the way from them is down, of which no alert can tell. It is counted
from the first one that ever came, so who does not route it here hears nothing; and after a start
from that start, for the receiver cannot have heard what came before.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from alerting.database import Database
from alerting.metrics import Metrics
from alerting.outbox import Outbox, news_of_watchdog
from alerting.payload import Payload

log = logging.getLogger(__name__)

ALERTNAME = "ActWatchdog"
SCHEMA = """
CREATE TABLE watchdog (
    id INTEGER PRIMARY KEY CHECK (id = 1), came INTEGER NOT NULL, last_at REAL NOT NULL,
    missed_at REAL
) STRICT;
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The last watchdog: when it came, and when it was said that none came after it, if it was."""

    last_at: float
    missed_at: float | None


def is_watchdog(payload: Payload) -> bool:
    """Whether it is the watchdog, firing: another alert that is sent here proves nothing of it."""
    return any(
        alert.status == "firing" and alert.labels.get("alertname") == ALERTNAME
        for alert in payload.alerts
    )


class Beats:
    """The table `watchdog`; all methods may be called from any thread.

    Args:
        database: open; has `SCHEMA` in it.
        outbox: where messages about it go, None where nobody is told.

    Raises:
        StoreError: (every method, or the future) it could not be written or read just now.
    """

    def __init__(self, database: Database, outbox: Outbox | None) -> None:
        self._database = database
        self._outbox = outbox

    def add(self, at: float) -> Future[int]:
        """Record that one came, with the message that it is back; how many have come so far."""

        def work(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT last_at, missed_at FROM watchdog").fetchone()
            if row is not None and row[1] is not None and self._outbox is not None:
                self._outbox.insert(
                    connection, news_of_watchdog(max(0.0, at - row[0]), at, row[1], back=True)
                )
            connection.execute(
                "INSERT INTO watchdog (id, came, last_at) VALUES (1, 1, ?) ON CONFLICT (id)"
                " DO UPDATE SET came = came + 1, last_at = excluded.last_at, missed_at = NULL",
                (at,),
            )
            return int(connection.execute("SELECT came FROM watchdog").fetchone()[0])

        return self._database.submit(work)

    def last(self) -> Beat | None:
        """The last one, or None before the first."""
        rows = self._database.read("SELECT last_at, missed_at FROM watchdog")
        return Beat(last_at=rows[0][0], missed_at=rows[0][1]) if rows else None

    def miss(self, beat: Beat, now: float) -> bool:
        """Record that none came after `beat`, with the message; False where one did just now."""

        def work(connection: sqlite3.Connection) -> bool:
            missed = connection.execute(
                "UPDATE watchdog SET missed_at = ? WHERE last_at = ? AND missed_at IS NULL",
                (now, beat.last_at),
            ).rowcount
            if missed and self._outbox is not None:
                away = max(0.0, now - beat.last_at)
                news = news_of_watchdog(away, now, beat.last_at, back=False)
                self._outbox.insert(connection, news)
            return bool(missed)

        return self._database.submit(work).result()


class DeadMansSwitch:
    """Says once that the watchdog stays away; whoever owns it calls `look` again and again.

    Args:
        beats: what came.
        watchdog_seconds: how long it may stay away.
        metrics: has its age.
        clock: Unix seconds.
    """

    def __init__(
        self, beats: Beats, watchdog_seconds: float, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._beats = beats
        self._watchdog_seconds = watchdog_seconds
        self._metrics = metrics
        self._clock = clock
        self._seen: Beat | None = None
        self._since = 0.0

    def look(self) -> None:
        """Tell people where it is time to.

        Raises:
            StoreError: the database could not be read or written just now.
        """
        beat, now = self._beats.last(), self._clock()
        if beat is None:
            return
        self._metrics.watchdog_age.set(max(0.0, now - beat.last_at))
        seen, self._seen = self._seen, beat
        if seen is None or seen.last_at != beat.last_at:
            if seen is not None and seen.missed_at is not None:
                log.warning("The watchdog is back: alerts get through again.")
            self._since = now
        # A clock that was set back starts the wait anew.
        self._since = min(self._since, now)
        away = now - self._since
        is_due = beat.missed_at is None and away >= self._watchdog_seconds
        if is_due and self._beats.miss(beat, now):
            log.error("No watchdog for %.0f s: alerts do not get through.", away)
