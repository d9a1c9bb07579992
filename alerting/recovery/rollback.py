"""The way back: which checkpoint, and putting it into the live objects.

Each part may be cut short by a crash and done again: the intent stands in the ledger before
anything happens, verdicts only get worse, and the generation is computed from the intent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial

from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.health import verdict
from alerting.recovery.ledger import LedgerFile, Recovery
from alerting.recovery.lineage import Checkpoint, before_onset, choose, line, too_late
from alerting.recovery.ranks import Ranks
from alerting.recovery.state import State

log = logging.getLogger(__name__)


class Rollback:
    """Chooses checkpoints (rank 0) and loads them (all ranks)."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        state: State,
        ledger: LedgerFile,
        ranks: Ranks,
        onset_margin_steps: int,
    ) -> None:
        self._ranks = ranks
        self._store = store
        self._state = state
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
        checkpoint = self._ranks.lead(self._newest_healthy)
        self._load(checkpoint)
        return checkpoint

    def mark_suspects(self, recovery: Recovery) -> None:
        """Record on disk which checkpoints were saved too late to be trusted."""
        onset = _onset(recovery)
        own = {c.name for c in self.line()}
        for checkpoint in self._store.all():
            concerned = (
                checkpoint.name in own or checkpoint.manifest.generation == recovery.generation
            )
            if concerned and not before_onset(checkpoint.step, onset, self._margin):
                reason = too_late(onset, self._margin)
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
        for way in self._ranks.lead(lambda: self._ways_back(recovery)):
            if not self._ranks.lead(partial(self._settle_on, way, recovery)):
                continue
            checkpoint = way[0]
            try:
                self._load(checkpoint)
            except CheckpointError as error:
                if starting:
                    raise
                # These very objects saved it, and half of it is in them now: try the next one.
                corrupt = verdict("corrupt", str(error))
                self._ranks.lead(partial(self._store.mark, checkpoint, corrupt))
                continue
            return checkpoint
        raise RecoveryHaltedError(
            f"there is no healthy checkpoint from before step {_onset(recovery)} to roll back to"
        )

    def _newest_healthy(self) -> Checkpoint:
        own = self.line()
        for checkpoint in choose(own, line=own).candidates:
            if self._store.verify(checkpoint):
                return checkpoint
        raise RecoveryHaltedError(
            f"none of the {len(own)} checkpoints that this run descends from is healthy and whole; "
            f"look at {self._store.path}"
        )

    def target(self, recovery: Recovery) -> Checkpoint | None:
        """What `go_back` would load now if its files are whole; changes nothing.

        They are not read for it: all of a large checkpoint takes minutes, and training would stand.
        """
        return next(iter(self._candidates(self.line(), recovery)), None)

    def _ways_back(self, recovery: Recovery) -> list[list[Checkpoint]]:
        """The checkpoints to try, the best first, each with what it descends from."""
        self.mark_suspects(recovery)
        own = self.line()
        return [own[own.index(c) :] for c in self._candidates(own, recovery)]

    def _settle_on(self, way: Sequence[Checkpoint], recovery: Recovery) -> bool:
        """Go back to the first of `way` if it is whole: on disk before training goes on.

        From here a crash resumes on the new line.
        """
        if not self._store.verify(way[0]):
            return False
        self._ledger.update(
            generation=recovery.generation + 1,
            base=tuple(c.name for c in way),
            last_onset=_onset(recovery),
            recovery=dataclasses.replace(recovery, target=way[0].name),
        )
        return True

    def _candidates(self, own: Sequence[Checkpoint], recovery: Recovery) -> Sequence[Checkpoint]:
        return choose(
            own,
            line=own,
            onset=_onset(recovery),
            margin=self._margin,
            # Of a recovery that has its target already, this is the target.
            resumed_from=self._ledger.now.resumed_from if recovery.target is None else None,
        ).candidates

    def _load(self, checkpoint: Checkpoint) -> None:
        self._state.restore(checkpoint.folder, checkpoint.manifest.world_size)


def _onset(recovery: Recovery) -> int:
    # Without a detector nothing is known but when somebody asked.
    return recovery.step if recovery.onset is None else recovery.onset
