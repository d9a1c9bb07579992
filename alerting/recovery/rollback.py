"""The way back: which checkpoint, and putting it into the live objects.

Each part may be cut short by a crash and done again: the intent stands in the ledger before
anything happens, verdicts only get worse, and the generation is computed from the intent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.recovery.checkpoints import CheckpointStore, difference
from alerting.recovery.health import verdict
from alerting.recovery.ledger import LedgerFile, Recovery
from alerting.recovery.lineage import Checkpoint, Choice, before_onset, choose, line, too_late
from alerting.recovery.ranks import Ranks
from alerting.recovery.remedies import Applied, Remedies
from alerting.recovery.state import State
from alerting.recovery.treatment import Treatment, Untreated

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
        remedies: Remedies,
        treatment: Treatment | Untreated,
    ) -> None:
        self._ranks = ranks
        self._store = store
        self._state = state
        self._ledger = ledger
        self._margin = onset_margin_steps
        self._remedies = remedies
        self._treatment = treatment
        self._reasons: dict[str, str] = {}  # not to take a checkpoint, by its name
        self._passed_over: list[str] = []

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
        own, candidates = self._ranks.lead(self._healthy)
        for checkpoint in candidates:
            if self._is_whole(checkpoint):
                self._load(checkpoint)
                self._treat(checkpoint)
                return checkpoint
        raise RecoveryHaltedError(
            f"none of the {own} checkpoints that this run descends from is healthy and whole; "
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
            checkpoint = way[0]
            if not self._is_whole(checkpoint):
                continue
            self._ranks.lead(partial(self._settle_on, way, recovery))
            try:
                self._load(checkpoint)
            except CheckpointError as error:
                if starting:
                    raise
                # A rank that died fails the load on all, which says nothing against the
                # checkpoint; it fails this too.
                self._ranks.gather(None)
                # These very objects saved it, and half of it is in them now: try the next one.
                self._ranks.lead(partial(self._mark_corrupt, checkpoint, str(error)))
                continue
            self._treat(checkpoint)
            return checkpoint
        raise RecoveryHaltedError(
            f"there is no healthy checkpoint from before step {_onset(recovery)} to roll back to"
        )

    def account(self, recovery: Recovery, checkpoint: Checkpoint) -> dict[str, Any]:
        """What there is to tell of it, after `go_back` went to `checkpoint`: see `Notes`."""
        return {
            "onset": recovery.onset,
            "from_step": recovery.step,
            "resumed_from": checkpoint.name,
            "resumed_step": checkpoint.step,
            "why": self._passed_over,
            "remedies": [str(remedy) for remedy in self._ledger.now.remedies],
        }

    def _healthy(self) -> tuple[int, tuple[Checkpoint, ...]]:
        """How many the run descends from, and those to try, the newest first."""
        own = self.line()
        return len(own), choose(own, line=own).candidates

    def target(self, recovery: Recovery) -> Checkpoint | None:
        """What `go_back` would load now if its files are whole; changes nothing.

        They are not read for it: all of a large checkpoint takes minutes, and training would stand.
        """
        own = self.line()
        return next(iter(self._choice(own, own, recovery).candidates), None)

    def remedies(
        self, recovery: Recovery, checkpoint: Checkpoint, number: int
    ) -> tuple[Applied, ...]:
        """What holds after going back to `checkpoint` at the rollback of that number."""
        manifest = checkpoint.manifest
        ranks = self._ranks.size
        new = self._remedies.at(
            number,
            step=checkpoint.step,
            taken=manifest.data.taken * manifest.world_size // ranks if manifest.data else 0,
            bad_until=recovery.bad_until,
            batches_a_step=recovery.batches_a_step,
            ranks=ranks,
        )
        # What held when it was saved goes on, as with any other state of it.
        places = {remedy.place for remedy in new}
        held = (r for r in manifest.remedies if r.until > checkpoint.step)
        return (*new, *(r for r in held if r.place not in places))

    def _ways_back(self, recovery: Recovery) -> list[list[Checkpoint]]:
        """The checkpoints to try, the best first, each with what it descends from."""
        self.mark_suspects(recovery)
        own = self.line()
        choice = self._choice(self._store.all(), own, recovery)
        self._reasons = choice.reasons
        return [own[own.index(c) :] for c in choice.candidates]

    def _settle_on(self, way: Sequence[Checkpoint], recovery: Recovery) -> None:
        """Go back to the first of `way`: on disk before training goes on.

        From here a crash resumes on the new line.
        """
        newer = (
            c for c in reversed(self._store.all()) if c.manifest.number > way[0].manifest.number
        )
        self._passed_over = [
            f"{c.name}: {self._reasons[c.name]}" for c in newer if c.name in self._reasons
        ]
        self._ledger.update(
            generation=recovery.generation + 1,
            base=tuple(c.name for c in way),
            last_onset=_onset(recovery),
            remedies=self.remedies(recovery, way[0], self._ledger.now.rollbacks_used),
            recovery=dataclasses.replace(recovery, target=way[0].name),
        )

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        """Compare its files with the manifest, each rank a share of them; if not, it is corrupt."""
        ranks = self._ranks
        with ranks.united():
            mine = difference(checkpoint, first=ranks.rank, every=ranks.size)
        problem = next((p for p in ranks.gather(mine) if p is not None), None)
        if problem is not None:
            ranks.lead(lambda: self._mark_corrupt(checkpoint, problem))
        return problem is None

    def _mark_corrupt(self, checkpoint: Checkpoint, problem: str) -> None:
        self._reasons[checkpoint.name] = f"corrupt: {problem}"
        self._store.mark(checkpoint, verdict("corrupt", problem))

    def _choice(
        self, checkpoints: Sequence[Checkpoint], own: Sequence[Checkpoint], recovery: Recovery
    ) -> Choice:
        return choose(
            checkpoints,
            line=own,
            onset=_onset(recovery),
            margin=self._margin,
            # Of a recovery that has its target already, this is the target.
            resumed_from=self._ledger.now.resumed_from if recovery.target is None else None,
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        self._state.restore(checkpoint.folder, checkpoint.manifest.world_size)

    def _treat(self, checkpoint: Checkpoint) -> None:
        remedies = self._ranks.lead(lambda: self._ledger.now.remedies)
        # Outside the loading: a loader or a callback that fails here says nothing of a checkpoint.
        with self._ranks.united():
            self._treatment.begin(remedies, checkpoint.step)


def _onset(recovery: Recovery) -> int:
    # Without a detector, in a run that is younger than an alert: all that is known is who asked.
    return recovery.step if recovery.onset is None else recovery.onset
