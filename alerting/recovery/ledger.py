"""RUN_FOLDER/guard.json: what must survive the process, replaced whole at each change.

It is written before training goes on from a rollback, so a crash at any moment finds either the
old line or the new one, and an unfinished recovery is finished at the next start. It is first
written once the first checkpoint is published, so where it is there must be a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from alerting.exceptions import CheckpointError
from alerting.files import write_atomically
from alerting.recovery.documents import Document
from alerting.recovery.remedies import Applied, read_applied

FORMAT = "act-guard"
VERSION = 1

Phase = Literal["running", "finished", "halted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A recovery that has begun and is not over.

    Attributes:
        request_id: the request to answer when it is.
        step: the step at which it began.
        onset: the first bad step: what the detector saw, else what the request's time leads to, or
            None where that is not known either.
        generation: of the run when it began.
        paid: whether the budget has paid for it; not where it halted the run instead.
        target: name of the checkpoint chosen, or None so far.
        bad_until: batches that a rank had taken once the first bad step's were among them.
        batches_a_step: of the loader, that each step took.
    """

    request_id: str
    step: int
    onset: int | None
    generation: int
    paid: bool
    target: str | None
    bad_until: int = 0
    batches_a_step: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The guard's memory.

    Attributes:
        run: the run's name.
        generation: 0, and one more with each rollback.
        phase: whether the run goes on, has ended, or was halted.
        base: names of the checkpoints that this generation descends from, newest first; the first
            is the one rolled back to.
        rollbacks_used: of the budget.
        last_onset: the step that the last rollback was about, until the budget is given back.
        last_backup_at: when a checkpoint was last made on request, Unix seconds.
        recovery: the one that is under way.
        remedies: what the rollback that this generation began with has changed.
        tried: a sentence about each rollback since the budget was whole.
    """

    run: str
    generation: int = 0
    phase: Phase = "running"
    base: tuple[str, ...] = ()
    rollbacks_used: int = 0
    last_onset: int | None = None
    last_backup_at: float | None = None
    recovery: Recovery | None = None
    remedies: tuple[Applied, ...] = ()
    tried: tuple[str, ...] = ()

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that this generation was rolled back to, or None in the first one."""
        return self.base[0] if self.base else None


class LedgerFile:
    """The ledger of a run folder: what is remembered, and never more than what is on disk."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self.now = Ledger(run=run)

    def load(self) -> bool:
        """Take up what a former process left; False where there is nothing.

        Raises:
            CheckpointError: it is mangled, of another version or of another run.
        """
        found = read_ledger(self._path)
        if found is None:
            return False
        if found.run != self.now.run:
            raise CheckpointError(
                f"{self._path} belongs to run {found.run!r}, and this is run {self.now.run!r}; "
                "choose another run folder, or give the run its former name"
            )
        self.now = found
        return True

    def update(self, **changes: Any) -> Ledger:
        """Replace these fields, on disk first.

        Raises:
            OSError: it could not be written; nothing has changed.
        """
        ledger = dataclasses.replace(self.now, **changes)
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(ledger)}
        write_atomically(self._path, json.dumps(content, indent=1) + "\n")
        self.now = ledger
        return ledger


def read_ledger(path: Path) -> Ledger | None:
    """The ledger in `path`, or None where there is none.

    Raises:
        CheckpointError: it is mangled or of another version.
    """
    try:
        document = Document.read(path)
        document.require_format(FORMAT, VERSION)
        open_recovery = document.optional("recovery", dict) is not None
        return Ledger(
            run=document.get("run", str),
            generation=document.get("generation", int),
            phase=cast(Phase, document.choice("phase", get_args(Phase))),
            base=document.names("base"),
            rollbacks_used=document.get("rollbacks_used", int),
            last_onset=document.optional("last_onset", int),
            last_backup_at=document.optional("last_backup_at", float),
            recovery=_read_recovery(document.part("recovery")) if open_recovery else None,
            remedies=read_applied(document),
            tried=document.names("tried") if document.optional("tried", list) else (),
        )
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; restore the file, or remove it and lose count of the rollbacks"
        ) from error


def _read_recovery(part: Document) -> Recovery:
    return Recovery(
        request_id=part.get("request_id", str),
        step=part.get("step", int),
        onset=part.optional("onset", int),
        generation=part.get("generation", int),
        paid=part.get("paid", bool),
        target=part.optional("target", str),
        bad_until=part.optional("bad_until", int) or 0,
        batches_a_step=part.optional("batches_a_step", int) or 1,
    )
