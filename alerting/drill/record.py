"""A drill's traces in the receiver's database."""

from __future__ import annotations

from typing import Any

from alerting.database import Reader


class Record:
    """Rows about one drill.

    Args:
        reader: open.
        drill: the drill's id, which is in the alert and so in what was received.
    """

    def __init__(self, reader: Reader, drill: str) -> None:
        self._reader = reader
        self._drill = drill
        # What was there before is not searched: a year's payloads are gigabytes.
        self._deliveries = self._last("deliveries")
        self._messages = self._last("messages")

    def delivery(self) -> int | None:
        """The first delivery to `/alerts` that has the alert."""
        found = self._row(
            "SELECT id FROM deliveries WHERE id > ? AND instr(payload, ?) ORDER BY id LIMIT 1",
            self._deliveries,
            self._drill,
        )
        return found[0] if found else None

    def decision(self, delivery: int, run: str) -> tuple[str, str, str | None] | None:
        """Outcome, reason and request of what was decided about the drill."""
        found: tuple[str, str, str | None] | None = self._row(
            "SELECT outcome, reason, request_id FROM decisions"
            " WHERE delivery_id = ? AND run = ? AND action = 'drill'",
            delivery,
            run,
        )
        return found

    def message(self) -> int | None:
        """The message to people that has the alert."""
        found = self._row(
            "SELECT id FROM messages WHERE id > ? AND instr(content, ?) ORDER BY id LIMIT 1",
            self._messages,
            self._drill,
        )
        return found[0] if found else None

    def sending(self, message: int, target: str) -> tuple[str | None, int, str | None] | None:
        """Result, attempts and detail of that message to one target."""
        found: tuple[str | None, int, str | None] | None = self._row(
            "SELECT result, attempts, detail FROM sendings WHERE message_id = ? AND target = ?",
            message,
            target,
        )
        return found

    def _last(self, table: str) -> int:
        (row,) = self._reader.read(f"SELECT coalesce(max(id), 0) FROM {table}")  # noqa: S608
        return int(row[0])

    def _row(self, statement: str, *values: object) -> Any:
        rows = self._reader.read(statement, *values)
        return rows[0] if rows else None
