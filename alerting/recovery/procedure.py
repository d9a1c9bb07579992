"""The recovery from request to answer, in an order in which a crash at any point does no harm."""

from __future__ import annotations

import dataclasses
import logging
from typing import NoReturn

from alerting.control import Request, Result
from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.exit_codes import RESTART
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.chronicle import Chronicle
from alerting.recovery.detector import Detector
from alerting.recovery.ledger import LedgerFile, Recovery
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.mailbox import Mailbox
from alerting.recovery.position import Position
from alerting.recovery.ranks import Ranks
from alerting.recovery.rollback import Rollback
from alerting.recovery.saver import Saver
from alerting.recovery.step_times import StepTimes

log = logging.getLogger(__name__)


class RecoveryProcedure:
    """Decides whether to recover, and carries it through.

    1. the intent, and the budget's payment, into the ledger
    2. the save in flight, then the emergency checkpoint (its failure is logged, not fatal)
    3. verdicts on the checkpoints since the onset
    4. the new generation and its origin into the ledger, then the load
    5. status and answers
    6. the intent out of the ledger

    A process that dies after 1 is followed by one that goes through 3 to 6 before it trains.

    Attributes:
        rollbacks: how many were carried through in this process.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        saver: Saver,
        rollback: Rollback,
        mailbox: Mailbox,
        ledger: LedgerFile,
        detector: Detector,
        ranks: Ranks,
        step_times: StepTimes,
        position: Position,
        watched: bool,
        restart: bool,
        detection_lag_seconds: float,
        chronicle: Chronicle,
    ) -> None:
        self._chronicle = chronicle
        self._restart = restart
        self._step_times = step_times
        self._lag = detection_lag_seconds
        self._ranks = ranks
        self._store = store
        self._saver = saver
        self._rollback = rollback
        self._mailbox = mailbox
        self._ledger = ledger
        self._detector = detector
        self._position = position
        self._watched = watched
        self.rollbacks = 0

    def recover(self, step: int) -> Checkpoint | None:
        """Roll back, after step `step`, as the open request asks; called by all ranks.

        Returns:
            The checkpoint that is loaded now, or None where the request was refused.

        Raises:
            RecoveryHaltedError: the budget is spent, or there is no healthy checkpoint.
            OSError: the ledger could not be written.
            SystemExit: a new process is to carry it through.
        """
        seen = [onset for onset in self._ranks.gather(self._detector.onset()) if onset is not None]
        recovery = self._ranks.lead(lambda: self._take(step, min(seen, default=None)))
        if recovery is None:
            return None
        try:
            self._saver.save_now(step, "emergency")
        except CheckpointError as error:
            log.warning("step %d: going on without an emergency checkpoint: %s", step, error)
        if not recovery.paid:
            self._ranks.lead(lambda: self._give_up(recovery))
        if self._restart:
            log.warning("step %d: ending, for the next process to roll back", step)
            self._ranks.lead(lambda: self._mailbox.tell("stopped", step))
            raise SystemExit(RESTART)
        return self._go_back(recovery, starting=False)

    def _take(self, step: int, onset: int | None) -> Recovery | None:
        """Take the request, and put the intent and the payment into the ledger."""
        request = self._mailbox.take("recover", step)
        if request is None:
            return None
        if self._watched and onset is None:
            self._mailbox.answer(
                request,
                "refused",
                "the trainer's own detector has seen no bad step since it resumed",
                step=step,
            )
            return None
        if onset is None:
            onset = self._step_times.onset(request.created_at, self._lag)
        log.warning("step %d: recovery begins; the first bad step was %s", step, onset)
        recovery = self._intent(request, step, onset)
        self._mailbox.tell("recovering", step)
        self._ledger.update(
            recovery=recovery,
            rollbacks_used=self._ledger.now.rollbacks_used + recovery.paid,
            phase="running" if recovery.paid else "halted",
        )
        return recovery

    def _give_up(self, recovery: Recovery) -> NoReturn:
        self._rollback.mark_suspects(recovery)
        raise self._halt(recovery, self._spent())

    def drill(self, step: int, onset: int | None) -> None:
        """Answer an open drill with what `recover` would do after step `step`; do none of it.

        Args:
            step: the run's.
            onset: the first bad step that any rank has seen.
        """
        request = self._mailbox.take("drill", step)
        if request is None or self._mailbox.find("recover") is not None:
            # A real one goes first, and is what the drill would have told of.
            return
        recovery = self._intent(request, step, onset)
        target = self._rollback.target(recovery)
        left = self._mailbox.rollbacks_left
        result: Result = "done" if recovery.paid and target is not None else "failed"
        if not recovery.paid:
            detail = f"a recovery would halt the run: {self._spent()}"
        elif target is None:
            detail = "a recovery would halt the run: no healthy checkpoint is old enough"
        else:
            number = self._ledger.now.rollbacks_used + 1
            remedies = self._rollback.remedies(recovery, target, number)
            detail = (
                f"a recovery would roll back from step {step} to {target.name}, which is "
                f"{target.health.health}, once its files are found whole; rollbacks left: {left}"
                + "".join(f"; {remedy}" for remedy in remedies)
            )
        if self._watched and onset is None:
            detail += "; at this step it would be refused, since no bad step was seen"
        self._mailbox.answer(request, result, detail, step=step, onset=onset)

    def take_up(self, recovery: Recovery) -> Checkpoint:
        """Carry through, in a new process, what a former one began.

        Raises:
            RecoveryHaltedError: as `recover`; also where the former process halted and nobody
                has raised the budget since.
            CheckpointError: the checkpoint does not fit the model.
        """
        return self._go_back(self._ranks.lead(lambda: self._paid(recovery)), starting=True)

    def _paid(self, recovery: Recovery) -> Recovery:
        if not recovery.paid:
            if self._mailbox.rollbacks_left == 0:
                raise self._halt(recovery, self._spent())
            recovery = dataclasses.replace(recovery, paid=True)
            used = self._ledger.now.rollbacks_used + 1
            self._ledger.update(recovery=recovery, rollbacks_used=used)
        log.warning("step %d: taking up the recovery that began there", recovery.step)
        return recovery

    def stand_at(self, checkpoint: Checkpoint) -> None:
        """The live state is that of `checkpoint` now: let everybody know."""
        generation = self._ranks.lead(lambda: self._set_out_from(checkpoint))
        self._detector.reset(generation)
        self._detector.step(checkpoint.step)
        self._ranks.lead(lambda: self._mailbox.tell("running", checkpoint.step))

    def _set_out_from(self, checkpoint: Checkpoint) -> int:
        self._saver.descent = tuple(c.name for c in self._rollback.descent(checkpoint))
        generation = self._ledger.update(phase="running").generation
        self._step_times.stand_at(generation, checkpoint.step)
        log.info(
            "step %d: going on from checkpoint %s in generation %d",
            checkpoint.step,
            checkpoint.name,
            generation,
        )
        return generation

    def _intent(self, request: Request, step: int, onset: int | None) -> Recovery:
        since = 0 if onset is None else step - onset
        return Recovery(
            request_id=request.id,
            step=step,
            onset=onset,
            generation=self._ledger.now.generation,
            paid=self._mailbox.rollbacks_left > 0,
            target=None,
            bad_until=max(0, self._position.taken - since * self._position.batches_a_step),
            batches_a_step=self._position.batches_a_step,
        )

    def _go_back(self, recovery: Recovery, *, starting: bool) -> Checkpoint:
        try:
            checkpoint = self._rollback.go_back(recovery, starting=starting)
        except RecoveryHaltedError as error:
            if self._ranks.rank == 0:
                self._halt(recovery, str(error))
            raise
        self.rollbacks += 1
        self.stand_at(checkpoint)
        self._ranks.lead(lambda: self._conclude(recovery, checkpoint))
        return checkpoint

    def _conclude(self, recovery: Recovery, checkpoint: Checkpoint) -> None:
        ledger = self._ledger.now
        way = "; ".join([checkpoint.name, *map(str, ledger.remedies)])
        detail = f"rolled back from step {recovery.step} to {way}"
        self._chronicle.tell("rollback", **self._rollback.account(recovery, checkpoint))
        self._answer(recovery, "done", detail, resumed=checkpoint)
        # Last, and before training goes on: until here all of it can be done again.
        self._ledger.update(recovery=None, tried=(*ledger.tried, detail))

    def _halt(self, recovery: Recovery, sentence: str) -> RecoveryHaltedError:
        self._ledger.update(phase="halted")
        self._mailbox.tell("halted", recovery.step)
        self._chronicle.tell("halted", step=recovery.step, onset=recovery.onset, why=sentence)
        self._answer(recovery, "failed", sentence, resumed=None)
        log.error("step %d: halted: %s", recovery.step, sentence)
        return RecoveryHaltedError(sentence)

    def _spent(self) -> str:
        ledger = self._ledger.now
        tried = "".join(f"; {sentence}" for sentence in ledger.tried)
        return (
            f"the rollback budget is spent ({ledger.rollbacks_used} used){tried}; look at the "
            "run, then raise max_rollbacks to let it go back once more"
        )

    def _answer(
        self, recovery: Recovery, result: Result, detail: str, *, resumed: Checkpoint | None
    ) -> None:
        emergency = self._emergency(recovery)
        request = self._mailbox.find("recover")
        if request is not None and request.id == recovery.request_id:
            self._mailbox.answer(
                request,
                result,
                detail,
                step=recovery.step,
                onset=recovery.onset,
                made=emergency,
                resumed=resumed,
            )
        # A backup asked for meanwhile has been made: it is the emergency checkpoint.
        request = self._mailbox.find("checkpoint")
        if request is None or request.generation != recovery.generation:
            return
        if emergency is None:
            self._mailbox.answer(
                request, "failed", "the emergency checkpoint failed", step=recovery.step
            )
            return
        # Before the answer: whoever reads it must find the time in the status.
        self._ledger.update(last_backup_at=emergency.manifest.created_at)
        self._mailbox.tell("running" if resumed else "halted", recovery.step)
        self._mailbox.answer(
            request,
            "done",
            f"the recovery made {emergency.name}",
            step=recovery.step,
            onset=recovery.onset,
            made=emergency,
        )

    def _emergency(self, recovery: Recovery) -> Checkpoint | None:
        made = [
            c
            for c in self._store.all()
            if c.manifest.kind == "emergency"
            and (c.step, c.manifest.generation) == (recovery.step, recovery.generation)
        ]
        return made[-1] if made else None
