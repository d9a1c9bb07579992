"""A backup from request to answer."""

from __future__ import annotations

from collections.abc import Callable

from alerting.control import Request
from alerting.exceptions import CheckpointError
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.mailbox import Mailbox
from alerting.recovery.ranks import Ranks
from alerting.recovery.saver import Saver


class BackupProcedure:
    """Makes the checkpoint that a request asks for; called by all ranks.

    Args:
        saver: makes it.
        mailbox: has the request.
        ledger: remembers when.
        ranks: who trains.
        onset: the first bad step that any rank has seen.
    """

    def __init__(
        self,
        *,
        saver: Saver,
        mailbox: Mailbox,
        ledger: LedgerFile,
        ranks: Ranks,
        onset: Callable[[], int | None],
    ) -> None:
        self._saver = saver
        self._mailbox = mailbox
        self._ledger = ledger
        self._ranks = ranks
        self._onset = onset

    def back_up(self, step: int) -> None:
        """Save the state after step `step`, as the open request asks, and answer it."""
        request = self._ranks.lead(lambda: self._mailbox.take("checkpoint", step))
        if request is None:
            return
        try:
            backup = self._saver.save_now(step, "backup")
        except CheckpointError as error:
            sentence = str(error)
            self._ranks.lead(lambda: self._mailbox.answer(request, "failed", sentence, step=step))
        else:
            self._ranks.lead(lambda: self._tell(request, backup, step))

    def _tell(self, request: Request, backup: Checkpoint, step: int) -> None:
        onset = self._onset()
        try:
            # Before the answer: whoever reads it must find the time in the status.
            self._ledger.update(last_backup_at=backup.manifest.created_at)
        except OSError as error:
            self._mailbox.answer(request, "failed", str(error), step=step, onset=onset)
            return
        self._mailbox.tell("running", step)
        detail = f"backed up step {step} as {backup.name}, which is {backup.health.health}"
        self._mailbox.answer(request, "done", detail, step=step, onset=onset, made=backup)
