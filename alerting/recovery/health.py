"""A checkpoint's health: may training go on from it?

    pending    nothing bad is known, and not enough steps have passed to be sure
    confirmed  training went on from it for a clean stretch
    suspect    saved at or after the first bad step, less a margin
    corrupt    a file is missing, altered or cannot be loaded

It lies beside the manifest in a file of its own, which is replaced whole, because it changes after
the checkpoint is published. An operator's verdict lies in a second file, with the guard's verdict
that it was given over: each file has one writer, so neither can lose what the other says at the
same moment. Once the guard has said something new, the worse of the two counts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from alerting.exceptions import CheckpointError
from alerting.files import write_atomically
from alerting.recovery.documents import Document

FILE = "health.json"
OPERATOR_FILE = "health-operator.json"

Health = Literal["pending", "confirmed", "suspect", "corrupt"]
HEALTHS: tuple[Health, ...] = get_args(Health)
HEALTHY: tuple[Health, ...] = ("pending", "confirmed")
Author = Literal["guard", "operator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRecord:
    """A verdict, its reason (a sentence for people), when it was given (Unix seconds), by whom."""

    health: Health
    reason: str
    at: float
    by: Author = "guard"

    def replaces(self, former: HealthRecord) -> bool:
        """Whether this verdict may take the former one's place.

        Only what is pending can be confirmed, and nothing heals by itself: a checkpoint that was
        once suspect stays so across restarts, until a person says otherwise.
        """
        return HEALTHS.index(self.health) > HEALTHS.index(former.health)

    def write(self, folder: Path) -> None:
        """Write the guard's verdict into `folder`, in place of the former one."""
        write_atomically(folder / FILE, json.dumps(_content(self), indent=1) + "\n")

    def write_over(self, folder: Path, former: HealthRecord | None) -> None:
        """Write the operator's verdict into `folder`; it holds as long as `former` is the guard's.

        Args:
            folder: the checkpoint's.
            former: the guard's verdict that the operator has seen; None where it is unreadable.
        """
        over = None if former is None else _content(former)
        content = {**_content(self), "over": over}
        write_atomically(folder / OPERATOR_FILE, json.dumps(content, indent=1) + "\n")


def verdict(health: Health, reason: str) -> HealthRecord:
    """A verdict given now."""
    return HealthRecord(health=health, reason=reason, at=time.time())


def read_health(folder: Path) -> HealthRecord:
    """The health of the checkpoint in `folder`: the guard's verdict, or the operator's over it.

    Raises:
        CheckpointError: a file is missing or mangled.
    """
    operator = _read_operator(folder)
    if operator is None:
        return read_guard_health(folder)
    said, over = operator
    if over is None:
        # Given over a verdict that could not be read, which the guard may have written anew since.
        return _worse(said, readable_health(folder) or said)
    own = read_guard_health(folder)
    return said if own == over else _worse(said, own)


def read_guard_health(folder: Path) -> HealthRecord:
    """The guard's own verdict, whatever the operator says.

    Raises:
        CheckpointError: the file is missing or mangled.
    """
    try:
        return _record(Document.read(folder / FILE), "guard")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder / FILE} is missing") from error


def readable_health(folder: Path) -> HealthRecord | None:
    """The guard's own verdict, or None where it cannot be read."""
    try:
        return read_guard_health(folder)
    except CheckpointError:
        return None


def _read_operator(folder: Path) -> tuple[HealthRecord, HealthRecord | None] | None:
    try:
        document = Document.read(folder / OPERATOR_FILE)
    except FileNotFoundError:
        return None
    over = None
    if document.optional("over", dict) is not None:
        over = _record(document.part("over"), "guard")
    return _record(document, "operator"), over


def _worse(said: HealthRecord, own: HealthRecord) -> HealthRecord:
    return own if own.replaces(said) else said


def _record(document: Document, by: Author) -> HealthRecord:
    return HealthRecord(
        health=cast(Health, document.choice("health", HEALTHS)),
        reason=document.get("reason", str),
        at=document.get("at", float),
        by=by,
    )


def _content(record: HealthRecord) -> dict[str, object]:
    # The author is told by the file.
    return {"health": record.health, "reason": record.reason, "at": record.at}
