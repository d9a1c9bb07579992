"""A checkpoint's health: may training go on from it?

    pending    nothing bad is known, and not enough steps have passed to be sure
    confirmed  training went on from it for a clean stretch
    suspect    saved at or after the first bad step, less a margin
    corrupt    a file is missing, altered or cannot be loaded

It lies beside the manifest in a file of its own, which is replaced whole, because it changes after
the checkpoint is published.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from alerting.exceptions import CheckpointError
from alerting.files import write_atomically
from alerting.recovery.documents import Document

FILE = "health.json"

Health = Literal["pending", "confirmed", "suspect", "corrupt"]
HEALTHS: tuple[Health, ...] = get_args(Health)
HEALTHY: tuple[Health, ...] = ("pending", "confirmed")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRecord:
    """A verdict, its reason (one sentence for people), and when it was given (Unix seconds)."""

    health: Health
    reason: str
    at: float

    def replaces(self, former: HealthRecord) -> bool:
        """Whether this verdict may take the former one's place.

        Only what is pending can be confirmed, and nothing heals by itself: a checkpoint that was
        once suspect stays so across restarts, until a person says otherwise.
        """
        return HEALTHS.index(self.health) > HEALTHS.index(former.health)

    def write(self, folder: Path) -> None:
        """Write it into `folder`, in place of the former one."""
        write_atomically(folder / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def verdict(health: Health, reason: str) -> HealthRecord:
    """A verdict given now."""
    return HealthRecord(health=health, reason=reason, at=time.time())


def read_health(folder: Path) -> HealthRecord:
    """The health of the checkpoint in `folder`.

    Raises:
        CheckpointError: the file is missing or mangled.
    """
    try:
        document = Document.read(folder / FILE)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder / FILE} is missing") from error
    return HealthRecord(
        health=cast(Health, document.choice("health", HEALTHS)),
        reason=document.get("reason", str),
        at=document.get("at", float),
    )
