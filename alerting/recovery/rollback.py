"""The way back: which checkpoint, and putting it into the live objects.

Each part may be cut short by a crash and done again: the intent stands in the ledger before
anything happens, verdicts only get worse, and the generation is computed from the intent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.detector import Detector
from alerting.recovery.health import verdict
from alerting.recovery.ledger import LedgerFile, Recovery
from alerting.recovery.lineage import Checkpoint, before_onset, line
from alerting.recovery.training_state import TrainingState

log = logging.getLogger(__name__)


class Rollback:
    """Chooses checkpoints and loads them."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        state: TrainingState,
        detector: Detector,
        ledger: LedgerFile,
        onset_margin_steps: int,
    ) -> None:
        self._store = store
        self._state = state
        self._detector = detector
        self._ledger = ledger
        self._margin = onset_margin_steps

    def line(self) -> list[Checkpoint]:
        """The checkpoints that the run descends from, newest first."""
        ledger = self._ledger.now
        return line(self._store.all(), generation=ledger.generation, base=ledger.base)

    def descent(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """`checkpoint` and what it descends from, newest first."""
        own = self.line()
        return own[[c.name for c in own].index(checkpoint.name) :]

    def resume(self) -> Checkpoint:
        """Load the newest healthy checkpoint of the line into a process that has just started.

        Raises:
            RecoveryHaltedError: none is healthy.
            CheckpointError: it is whole, yet does not load. The code has changed, not the
                checkpoint, so going further back would not help and could lose good steps.
        """
        own = self.line()
        for checkpoint in self._whole(c for c in own if c.healthy):
            self._load(checkpoint)
            return checkpoint
        raise RecoveryHaltedError(
            f"none of the {len(own)} checkpoints that this run descends from is healthy and whole; "
            f"look at {self._store.path}"
        )

    def mark_suspects(self, recovery: Recovery) -> None:
        """Record on disk which checkpoints were saved too late to be trusted."""
        onset = _onset(recovery)
        own = {c.name for c in self.line()}
        for checkpoint in self._store.all():
            concerned = (
                checkpoint.name in own or checkpoint.manifest.generation == recovery.generation
            )
            if concerned and not before_onset(checkpoint.step, onset, self._margin):
                reason = f"saved at or after step {onset - self._margin}; step {onset} was bad"
                self._store.mark(checkpoint, verdict("suspect", reason))

    def go_back(self, recovery: Recovery, *, starting: bool) -> Checkpoint:
        """Load the newest healthy checkpoint from before the onset, as a new generation.

        Args:
            recovery: the intent, as it stands in the ledger.
            starting: the process has just started, so a checkpoint that is whole and does not
                load is an error of the code, as in `resume`.

        Raises:
            RecoveryHaltedError: there is none.
            CheckpointError: see `starting`.
        """
        self.mark_suspects(recovery)
        onset = _onset(recovery)
        for checkpoint in self._whole(self._candidates(self.line(), recovery)):
            # On disk before training goes on: from here a crash resumes on the new line.
            self._ledger.update(
                generation=recovery.generation + 1,
                base=tuple(c.name for c in self.descent(checkpoint)),
                last_onset=onset,
                recovery=dataclasses.replace(recovery, target=checkpoint.name),
            )
            try:
                self._load(checkpoint)
            except CheckpointError as error:
                if starting:
                    raise
                # These very objects saved it, and half of it is in them now: try the next one.
                self._store.mark(checkpoint, verdict("corrupt", str(error)))
                continue
            return checkpoint
        raise RecoveryHaltedError(
            f"there is no healthy checkpoint from before step {onset} to roll back to"
        )

    def target(self, recovery: Recovery) -> Checkpoint | None:
        """What `go_back` would load now if its files are whole; changes nothing.

        They are not read for it: all of a large checkpoint takes minutes, and training would stand.
        """
        return next(iter(self._candidates(self.line(), recovery)), None)

    def _candidates(self, own: Sequence[Checkpoint], recovery: Recovery) -> list[Checkpoint]:
        onset = _onset(recovery)
        found = [c for c in own if c.healthy and before_onset(c.step, onset, self._margin)]
        repeated = recovery.target is None and self._ledger.now.resumed_from is not None
        if repeated and found and found[0].name == self._ledger.now.resumed_from:
            # The anomaly came again from the same place: one further back, if there is one.
            found = [*found[1:], found[0]]
        return found

    def _whole(self, checkpoints: Iterator[Checkpoint] | list[Checkpoint]) -> Iterator[Checkpoint]:
        return (c for c in checkpoints if self._store.verify(c))

    def _load(self, checkpoint: Checkpoint) -> None:
        with self._detector.paused():
            self._state.restore(checkpoint.folder)


def _onset(recovery: Recovery) -> int:
    # Without a detector nothing is known but when somebody asked.
    return recovery.step if recovery.onset is None else recovery.onset
