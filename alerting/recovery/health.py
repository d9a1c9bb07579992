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
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from alerting.control import write_atomically
from alerting.exceptions import CheckpointError
from alerting.recovery.documents import Document

log = logging.getLogger(__name__)

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

    A file that is missing or mangled gives `suspect`: with the verdict lost, going further back
    costs some steps, and trusting it may cost the run.
    """
    try:
        document = Document.read(folder / FILE)
        return HealthRecord(
            health=cast(Health, document.choice("health", HEALTHS)),
            reason=document.get("reason", str),
            at=document.get("at", float),
        )
    except (FileNotFoundError, CheckpointError) as error:
        log.warning("checkpoint %s counts as suspect: %s", folder.name, error)
        return verdict("suspect", f"its health is unknown: {error}")
