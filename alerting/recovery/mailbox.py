"""The guard's end of the control directory.

Nothing that goes wrong with these small files may stop training: it is logged, and tried again at
the next boundary.
"""

from __future__ import annotations

import logging
import time

from alerting.control import Action, Answer, ControlDirectory, Request, Result, Status
from alerting.exceptions import ControlError
from alerting.recovery.chronicle import Chronicle
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lineage import Checkpoint

log = logging.getLogger(__name__)


class Mailbox:
    """Takes requests and gives answers, on behalf of one run."""

    def __init__(
        self,
        control: ControlDirectory,
        ledger: LedgerFile,
        max_rollbacks: int,
        chronicle: Chronicle,
    ) -> None:
        self._chronicle = chronicle
        self._control = control
        self._ledger = ledger
        self._max_rollbacks = max_rollbacks
        self._unsent: dict[str, Answer] = {}

    @property
    def rollbacks_left(self) -> int:
        """How many more rollbacks the budget allows."""
        return max(0, self._max_rollbacks - self._ledger.now.rollbacks_used)

    def tell(self, state: str, step: int) -> None:
        """Publish the run's status: "running", "recovering", "finished" or "halted"."""
        ledger = self._ledger.now
        status = Status(
            run=ledger.run,
            generation=ledger.generation,
            state=state,
            step=step,
            rollbacks_left=self.rollbacks_left,
            last_backup_at=ledger.last_backup_at,
            updated_at=time.time(),
        )
        try:
            self._control.publish(status)
        except OSError as error:
            log.warning("step %d: the status could not be published: %s", step, error)

    def find(self, action: Action) -> Request | None:
        """The open request of that kind, whatever it is about; None where there is none."""
        try:
            request = self._control.take_up(action)
        except (ControlError, OSError) as error:
            log.warning("a request to %s cannot be read: %s", action, error)
            return None
        if request is not None and request.id in self._unsent:
            # Acted upon already, but the disk did not take the answer.
            self._send(self._unsent[request.id])
            return None
        return request

    def take(self, action: Action, step: int) -> Request | None:
        """The open request of that kind which is to be acted upon now, or None.

        One of another run or another generation is refused here: what it asks for was done, or was
        never meant for this run.
        """
        request = self.find(action)
        if request is None:
            return None
        ledger = self._ledger.now
        if request.run != ledger.run:
            self.answer(request, "refused", f"this is run {ledger.run!r}", step=step)
            return None
        if request.generation != ledger.generation:
            self.answer(
                request,
                "refused",
                f"stale: it is about generation {request.generation}, and the run is in "
                f"generation {ledger.generation}",
                step=step,
            )
            return None
        if action != "drill":
            self._chronicle.tell(
                "request",
                step=step,
                id=request.id,
                action=action,
                alert=request.alert,
                created_at=request.created_at,
            )
        return request

    def answer(
        self,
        request: Request,
        result: Result,
        detail: str,
        *,
        step: int,
        onset: int | None = None,
        made: Checkpoint | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """Answer and close the request.

        Args:
            request: the request.
            result: what became of it.
            detail: one sentence for people.
            step: at which the guard acted.
            onset: the first bad step, where one was seen.
            made: the backup or emergency checkpoint.
            resumed: the checkpoint rolled back to.
        """
        log.info(
            "step %d: request %s to %s: %s: %s", step, request.id, request.action, result, detail
        )
        if result == "refused":
            self._chronicle.tell(
                "refused", step=step, id=request.id, action=request.action, why=detail
            )
        self._send(
            Answer(
                id=request.id,
                action=request.action,
                result=result,
                detail=detail,
                step=step,
                onset=onset,
                checkpoint=made.name if made else None,
                resumed_from=resumed.name if resumed else None,
                resumed_step=resumed.step if resumed else None,
                generation=self._ledger.now.generation,
                answered_at=time.time(),
            )
        )

    def _send(self, answer: Answer) -> None:
        try:
            self._control.answer(answer)
        except OSError as error:
            log.warning("step %d: request %s has no answer yet: %s", answer.step, answer.id, error)
            self._unsent[answer.id] = answer
        else:
            self._unsent.pop(answer.id, None)
