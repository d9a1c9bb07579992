"""From pending to confirmed: a checkpoint proves itself by the steps that were taken from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.health import verdict
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lineage import Checkpoint

log = logging.getLogger(__name__)


class Confirmations:
    """The checkpoints of the line that wait for their clean stretch, oldest first."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        onset: Callable[[], int | None],
        ledger: LedgerFile,
        confirm_after_steps: int,
    ) -> None:
        self._store = store
        self._onset = onset
        self._ledger = ledger
        self._after = confirm_after_steps
        self._waiting: list[Checkpoint] = []

    def start(self, descent: Iterable[Checkpoint]) -> None:
        """Training goes on from the newest of `descent` (newest first)."""
        self._waiting = [c for c in descent if c.health.health == "pending"][::-1]

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint has been published."""
        if checkpoint.resumable and checkpoint.health.health == "pending":
            self._waiting.append(checkpoint)

    def check(self, step: int) -> bool:
        """Confirm those whose clean stretch is over at step `step`; whether there was one."""
        if not self._waiting or step < self._waiting[0].step + self._after:
            return False
        if self._onset() is not None:
            return False
        checkpoint = self._waiting.pop(0)
        reason = f"no bad step in the {self._after} steps after it"
        ledger = self._ledger.now
        try:
            # Deleted meanwhile, where saves are closer together than the clean stretch is long.
            if checkpoint.folder.exists():
                stands = self._store.mark(checkpoint, verdict("confirmed", reason))
                if stands.health != "confirmed":
                    # A person has judged it meanwhile, and knows more than the detector.
                    return True
            if ledger.last_onset is not None and checkpoint.step >= ledger.last_onset:
                # The place of the last anomaly is passed with weights that are proven good: the
                # next one is another incident. Until then a run that fails again and again at one
                # place can't loop for ever.
                self._ledger.update(rollbacks_used=0, last_onset=None, tried=())
                log.info("step %d: the rollback budget is given back", step)
        except OSError as error:
            log.warning("step %d: %s stays pending: %s", step, checkpoint.name, error)
        return True
