"""What the receiver knows of each run, for people who look: its guard's words and our records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from alerting.control import ACTIONS, ControlDirectory, Request, Status
from alerting.exceptions import ControlError

FAILED_SECONDS = 86_400.0
"""Messages that were given up are shown for a day: people look at the start of a shift."""

_DECISION = ("action", "alertname", "outcome", "reason", "generation", "request_id", "at")
_ANSWER = (
    "id",
    "action",
    "result",
    "detail",
    "step",
    "resumed_from",
    "resumed_step",
    "answered_at",
)
_RUN_OF_MESSAGE = (
    "coalesce(json_extract(content, '$.request.run'), json_extract(content, '$.groupLabels.run'),"
    " json_extract(content, '$.commonLabels.run'), '')"
)


class Read(Protocol):
    """Reads the receiver's database: `Reader.read`."""

    def __call__(self, statement: str, *values: object) -> list[Any]:
        """All rows of a SELECT."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """A run as it is now.

    Attributes:
        status: what its guard published last.
        requests: the open ones.
        decision: the last one about it (columns of `decisions`), or None.
        answer: the last of its guard (columns of `requests`), or None.
        waiting: messages about it that are still to be sent, one a target.
        failed: messages about it that were given up in the last `FAILED_SECONDS`.
    """

    status: Status
    requests: tuple[Request, ...]
    decision: dict[str, Any] | None
    answer: dict[str, Any] | None
    waiting: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        """All of it as what JSON has; times are Unix seconds."""
        return {
            **dataclasses.asdict(self.status),
            "open_requests": [dataclasses.asdict(request) for request in self.requests],
            "last_decision": self.decision,
            "last_answer": self.answer,
            "messages": {"waiting": self.waiting, "failed": self.failed},
        }


def find_run(runs: Path, run: str, read: Read, now: float) -> Overview | None:
    """The run of that name, or None where no guard has registered it.

    Raises:
        ControlError: two of its folders are live, or a file of it is mangled.
        StoreError: the database could not be read.
    """
    control = ControlDirectory.find(runs, run)
    status = control.status() if control is not None else None
    if control is None or status is None:
        return None
    requests = (control.open_request(action) for action in ACTIONS)
    waiting, failed = count_messages(read, now).get(run, (0, 0))
    return Overview(
        status=status,
        requests=tuple(request for request in requests if request is not None),
        decision=_last(read, "decisions", _DECISION, run),
        answer=_last(read, "requests", _ANSWER, run, " AND answered_at IS NOT NULL"),
        waiting=waiting,
        failed=failed,
    )


def all_runs(runs: Path, read: Read, now: float) -> Iterator[Overview | ControlError]:
    """Each registered run, by name; or what is wrong with one.

    Raises:
        StoreError: the database could not be read.
    """
    names = set()
    for _, status in ControlDirectory.registered(runs):
        if isinstance(status, ControlError):
            yield status
        else:
            names.add(status.run)
    for name in sorted(names):
        try:
            found = find_run(runs, name, read, now)
        except ControlError as error:
            yield error
        else:
            if found is not None:
                yield found


def count_messages(read: Read, now: float) -> dict[str, tuple[int, int]]:
    """By run ("" for none): messages still to be sent, and those given up of late."""
    rows = read(
        f"SELECT {_RUN_OF_MESSAGE}, sum(ended_at IS NULL), sum(ended_at IS NOT NULL) FROM sendings"  # noqa: S608
        " JOIN messages ON messages.id = message_id"
        " WHERE ended_at IS NULL OR (result = 'failed' AND ended_at > ?) GROUP BY 1",
        now - FAILED_SECONDS,
    )
    return {run: (waiting, failed) for run, waiting, failed in rows}


def _last(
    read: Read, table: str, columns: tuple[str, ...], run: str, condition: str = ""
) -> dict[str, Any] | None:
    rows = read(
        f"SELECT {', '.join(columns)} FROM {table} WHERE run = ?{condition}"  # noqa: S608
        " ORDER BY id DESC LIMIT 1",
        run,
    )
    return dict(zip(columns, rows[0], strict=True)) if rows else None
