"""A run folder as people look at it from outside, while its trainer runs or is dead.

Reading changes nothing, and nothing here needs torch or the trainer's objects.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alerting.exceptions import CheckpointError, ConfigError
from alerting.recovery.checkpoints import CheckpointStore, difference
from alerting.recovery.health import Health, readable_health, verdict
from alerting.recovery.ledger import Ledger, read_ledger
from alerting.recovery.lineage import Checkpoint, choose, line

_SUGGESTIONS = 3
"""Names that are offered for an unknown one: a step has at most a few checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a rollback would take.

    Attributes:
        target: the checkpoint, or None where the run would be halted.
        passed_over: those that are newer, or all of them without a target, the newest first, each
            with why it would not be taken.
    """

    target: Checkpoint | None
    passed_over: tuple[tuple[Checkpoint, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """What a run folder held when it was read.

    Attributes:
        path: the folder.
        ledger: the guard's memory; a new one where there is none.
        checkpoints: all, the newest first.
        line: those that the run descends from, the newest first.
    """

    path: Path
    ledger: Ledger
    checkpoints: tuple[Checkpoint, ...]
    line: tuple[Checkpoint, ...]

    @property
    def next_start(self) -> Checkpoint | None:
        """The one that the next process begins with if it is whole; None in an open recovery."""
        if self.ledger.recovery is not None:
            return None
        return next(iter(choose(self.line, line=self.line).candidates), None)

    def find(self, name: str) -> Checkpoint:
        """The checkpoint of that name.

        Raises:
            ConfigError: there is none; names those that may be meant.
        """
        known = {c.name: c for c in self.checkpoints}
        if name in known:
            return known[name]
        close = difflib.get_close_matches(name, known, n=_SUGGESTIONS)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there is {', '.join(known)}."
        raise ConfigError(f"{self.path} has no checkpoint {name!r}; {hint}")

    def plan(
        self, onset: int, margin: int, examine: Callable[[Checkpoint], str | None] = difference
    ) -> Plan:
        """What the guard would choose if it were asked now to roll back for a bad step `onset`.

        Args:
            onset: the first bad step.
            margin: the guard's `onset_margin_steps`.
            examine: what is wrong with a checkpoint's files, or None; called for one after the
                other until one is whole.
        """
        recovery = self.ledger.recovery
        chosen = recovery is not None and recovery.target is not None
        choice = choose(
            self.checkpoints,
            line=self.line,
            onset=onset,
            margin=margin,
            resumed_from=None if chosen else self.ledger.resumed_from,
        )
        reasons = choice.reasons
        target = None
        for candidate in choice.candidates:
            problem = examine(candidate)
            if problem is None:
                target = candidate
                break
            reasons[candidate.name] = f"corrupt: {problem}"
        number = -1 if target is None else target.manifest.number
        passed_over = (c for c in self.checkpoints if c.manifest.number > number)
        return Plan(target=target, passed_over=tuple((c, reasons[c.name]) for c in passed_over))


def read_run_folder(path: Path) -> RunFolder:
    """Read the run folder `path`, without changing anything.

    Raises:
        ConfigError: it is no run folder.
        CheckpointError: it has no checkpoint, or guard.json is mangled.
    """
    store = CheckpointStore(path / "checkpoints")
    if not path.is_dir():
        raise ConfigError(f"{path} is not there, or no folder; a guard makes it when it trains.")
    # The ledger first: of a rollback in between, the checkpoints are those of the old line too.
    ledger = read_ledger(path / "guard.json")
    if ledger is None and not store.path.is_dir():
        raise ConfigError(
            f"{path} is no run folder: it has neither guard.json nor checkpoints; give the folder "
            "that the TrainingGuard was given."
        )
    found = store.all() if store.path.is_dir() else []
    if not found:
        raise CheckpointError(f"{store.path} holds no checkpoint yet, or none that can be read.")
    if ledger is None:
        # As the guard goes on where its file was lost.
        generation = max(c.manifest.generation for c in found)
        ledger = Ledger(run=path.resolve().name, generation=generation)
    own = line(found, generation=ledger.generation, base=ledger.base)
    return RunFolder(path=path, ledger=ledger, checkpoints=tuple(reversed(found)), line=tuple(own))


def overrule(
    checkpoint: Checkpoint,
    health: Health,
    reason: str,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Record an operator's verdict, which may also be a better one than the guard's.

    Safe while a guard is training: what the guard says from now on, or has said while this
    looked, counts beside it, and the worse of the two holds.

    Args:
        checkpoint: which.
        health: the verdict.
        reason: a sentence for people.
        progress: told of the bytes that were read, where the files must be.

    Raises:
        CheckpointError: it is corrupt, and still not whole.
        OSError: it could not be written, or the checkpoint was deleted meanwhile.
    """
    # Before the files are read, which takes minutes.
    former = readable_health(checkpoint.folder)
    if former is not None and former.health == "corrupt":
        problem = difference(checkpoint, progress)
        if problem is not None:
            raise CheckpointError(f"{checkpoint.name} stays corrupt: {problem}.")
    verdict(health, reason).write_over(checkpoint.folder, former)
