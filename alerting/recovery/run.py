"""A guarded run: how it begins, what happens at each step boundary, and how it ends.

All ranks call the same methods at the same steps. What there is only one of (guard.json, requests,
the choice of a checkpoint) is rank 0's; what the ranks do together they agree on first.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from alerting.control import ControlDirectory
from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.exit_codes import RESTART
from alerting.heartbeat import HeartbeatFile
from alerting.recovery.agreement import Agreement, Vote
from alerting.recovery.backup import BackupProcedure
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.chronicle import Chronicle
from alerting.recovery.confirmations import Confirmations
from alerting.recovery.detector import Detector
from alerting.recovery.ledger import LedgerFile, Recovery
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.lock import exclusive
from alerting.recovery.mailbox import Mailbox
from alerting.recovery.metrics import GuardMetrics, GuardSnapshot
from alerting.recovery.procedure import RecoveryProcedure
from alerting.recovery.ranks import Ranks
from alerting.recovery.remedies import Remedies
from alerting.recovery.rollback import Rollback
from alerting.recovery.saver import Saver
from alerting.recovery.schedule import Schedule
from alerting.recovery.settings import Settings
from alerting.recovery.signals import Signals
from alerting.recovery.state import State
from alerting.recovery.step_times import FILE as STEPS_FILE
from alerting.recovery.step_times import StepTimes
from alerting.recovery.treatment import Treatment, Untreated

log = logging.getLogger(__name__)


class GuardedRun:
    """One run in its folder.

    Args:
        folder: the run folder.
        name: the run's name.
        state: what is saved and loaded.
        detector: of bad steps.
        watched: whether a detector was given, so that its silence means something.
        ranks: who trains.
        settings: checked already.
        remedies: by rollback.
        treatment: carries them out.
        on_look: called after each step, when the detector knows of it; raises nothing.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        state: State,
        detector: Detector,
        watched: bool,
        ranks: Ranks,
        settings: Settings,
        remedies: Remedies,
        treatment: Treatment | Untreated,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._on_look = on_look
        self._state = state
        self._treatment = treatment
        self._detector = detector
        self._ranks = ranks
        self._schedule = Schedule(
            steps=settings.save_every_steps, seconds=settings.save_every_seconds
        )
        self._control = ControlDirectory(folder / "control")
        self._heartbeat = HeartbeatFile(self._control.path)
        self._step_times = StepTimes(folder / STEPS_FILE)
        self._ledger = LedgerFile(folder / "guard.json", name)
        chronicle = Chronicle(detector, ranks)
        self._mailbox = Mailbox(self._control, self._ledger, settings.max_rollbacks, chronicle)
        self._store = CheckpointStore(
            folder / "checkpoints",
            lambda checkpoint, said: chronicle.tell(
                "health", name=checkpoint.name, health=said.health, why=said.reason
            ),
        )
        self.saver = Saver(
            store=self._store,
            state=state,
            onset=self._onset,
            ledger=self._ledger,
            ranks=ranks,
            keep=settings.keep,
            onset_margin_steps=settings.onset_margin_steps,
            chronicle=chronicle,
        )
        self._rollback = Rollback(
            store=self._store,
            state=state,
            ledger=self._ledger,
            ranks=ranks,
            onset_margin_steps=settings.onset_margin_steps,
            remedies=remedies,
            treatment=treatment,
        )
        self._procedure = RecoveryProcedure(
            store=self._store,
            saver=self.saver,
            rollback=self._rollback,
            mailbox=self._mailbox,
            ledger=self._ledger,
            detector=detector,
            ranks=ranks,
            step_times=self._step_times,
            position=treatment.position,
            watched=watched,
            restart=settings.recover_by == "restart",
            detection_lag_seconds=settings.detection_lag_seconds,
            chronicle=chronicle,
        )
        self._backup = BackupProcedure(
            saver=self.saver,
            mailbox=self._mailbox,
            ledger=self._ledger,
            ranks=ranks,
            onset=self._onset,
        )
        self._confirmations = Confirmations(
            store=self._store,
            onset=self._onset,
            ledger=self._ledger,
            confirm_after_steps=settings.confirm_after_steps,
        )
        self._agreement = Agreement(ranks, settings.check_every)
        self._signals = Signals()
        self._metrics = GuardMetrics(name)
        self._failure: Exception | None = None
        self._others_onset: int | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While inside, this process trains in the run folder, and no other does."""
        with contextlib.ExitStack() as stack:
            self._ranks.lead(lambda: self._enter(stack))
            stack.enter_context(self._signals.listening())
            # Also when the body raised or left the loop: what is saved is worth publishing.
            stack.callback(self.saver.close)
            stack.callback(self._treatment.end)
            self._close_groups_at_exit(False)
            try:
                yield
            except SystemExit:
                self._close_groups_at_exit(True)  # raised at an agreed step: all leave
                raise
            self._close_groups_at_exit(True)

    def begin(self) -> int:
        """Stand at the step to go on from: 0, or that of a checkpoint."""
        step = self.resume()
        return self.begin_anew() if step is None else step

    def resume(self) -> int | None:
        """Stand at the step of a checkpoint; None where there is none and the run is to begin."""
        found = self._ranks.lead(self._find)
        if found == "nothing":
            return None
        checkpoint = self._newest() if found == "checkpoints" else self._procedure.take_up(found)
        step = self._go_on_from(checkpoint)
        self._agreement.propose(step, lambda: self._vote(step))
        return step

    def begin_anew(self) -> int:
        """Save step 0, after `resume` found nothing, and stand there."""
        self._state.start()
        self._detector.reset(0)
        self._detector.step(0)
        # Waited for: so there is always one to go back to, and a disk or an object that cannot be
        # saved shows now and not in the night.
        self._confirmations.add(self.saver.save_now(0, "periodic"))
        self._ranks.lead(self._set_out)
        self._agreement.propose(0, lambda: self._vote(0))
        return 0

    def boundary(self, step: int, *, last: bool) -> int:
        """What there is to do after step `step`; the step that the run stands at afterwards.

        Raises:
            SystemExit: a signal told the run to end, or a recovery to restart it.
        """
        self._look(step)
        agreed = self._agreement.settle(lambda: self._vote(step), last=last)
        now = step if agreed is None else self._act(agreed, step, last=last)
        if not last or now != step:
            self._agreement.propose(now, lambda: self._vote(now))
        return now

    def end(self, step: int) -> None:
        """The last step is done."""
        if not self._ranks.lead(lambda: self._has_final(step)):
            try:
                self.saver.save_now(step, "final")
            except CheckpointError as error:
                log.warning("step %d: the run ends without a final checkpoint: %s", step, error)
        self._ranks.lead(lambda: self._finish(step))

    def _close_groups_at_exit(self, wanted: bool) -> None:
        for ranks in (self._ranks, self.saver.writers):
            ranks.close_at_exit(wanted)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be made: {error}") from error
        stack.enter_context(exclusive(self._folder / "guard.lock"))
        self._metrics.register(self._detector.registry)
        stack.callback(self._metrics.unregister, self._detector.registry)

    def _find(self) -> Literal["nothing", "checkpoints"] | Recovery:
        """What a former process has left to begin with."""
        begun = self._ledger.load()
        self._store.open(begun=begun)
        self._control.create()
        checkpoints = self._store.all()
        if not begun and checkpoints:
            newest = max(checkpoints, key=lambda c: (c.manifest.generation, c.manifest.number))
            generation, remedies = newest.manifest.generation, newest.manifest.remedies
            log.warning("guard.json is missing: going on in generation %d", generation)
            self._ledger.update(generation=generation, remedies=remedies)
        if self._ledger.now.recovery is not None:
            return self._ledger.now.recovery
        return "checkpoints" if checkpoints else "nothing"

    def _set_out(self) -> None:
        # Only now: a run that guard.json tells of is never begun anew.
        self._ledger.update(phase="running")
        self._schedule.restart(0)
        self._step_times.stand_at(0, 0)
        self._show()
        self._mailbox.tell("running", 0)

    def _newest(self) -> Checkpoint:
        try:
            checkpoint = self._rollback.resume()
        except RecoveryHaltedError:
            if self._ranks.rank == 0:
                self._ledger.update(phase="halted")
                self._mailbox.tell("halted", 0)
            raise
        self._procedure.stand_at(checkpoint)
        return checkpoint

    def _go_on_from(self, checkpoint: Checkpoint) -> int:
        self._others_onset = None
        if self._ranks.rank == 0:
            self._confirmations.start(self._rollback.descent(checkpoint))
            self._schedule.restart(checkpoint.step)
            self._show()
        return checkpoint.step

    def _look(self, step: int) -> None:
        """What each rank does by itself; what it raises is raised on all, once all have voted."""
        try:
            self._treatment.step(step)
            self._detector.step(step)
            self._on_look()
            if self._ranks.rank == 0:
                self._heartbeat.beat(self._ledger.now.generation, step)
                self._step_times.note(step)
                if self._confirmations.check(step):
                    # The budget may be whole again.
                    self._mailbox.tell("running", step)
                    self._show()
        except Exception as error:
            self._failure = error

    def _vote(self, step: int) -> Vote:
        leads = self._ranks.rank == 0
        try:
            if leads:
                # Here, as files are looked for no more often than votes are cast.
                self._procedure.drill(step, self._onset())
            return Vote(
                recover=leads and self._mailbox.find("recover") is not None,
                back_up=leads and self._mailbox.find("checkpoint") is not None,
                save=leads and self._schedule.due(step + self._agreement.ahead),
                stop=self._signals.received,
                writing=self.saver.writing,
                failed=self._failure is not None,
                onset=self._detector.onset(),
            )
        except Exception as error:
            self._failure = error
            return Vote(failed=True)

    def _raise_failure(self) -> None:
        with self._ranks.united():
            if self._failure is not None:
                raise self._failure

    def _act(self, agreed: Vote, step: int, *, last: bool) -> int:
        if agreed.failed:
            self._raise_failure()
        self._others_onset = agreed.onset
        if self.saver.busy and not agreed.writing:
            published = self.saver.settle()
            if published is not None:
                self._confirmations.add(published)
            # Published or failed: a disk that stays full must be seen by those who are away.
            self._show()
        if agreed.recover:
            checkpoint = self._procedure.recover(step)
            if checkpoint is not None:
                return self._go_on_from(checkpoint)
        if agreed.back_up:
            self._backup.back_up(step)
            self._show()
        if agreed.stop:
            self._stop(step, agreed.stop)
        # A save that is still being written is not waited for: the next boundary will do.
        if agreed.save and not last and not self.saver.busy:
            self._save(step)
        return step

    def _save(self, step: int) -> None:
        self._schedule.restart(step)
        try:
            self.saver.begin(step, "periodic")
        except CheckpointError:
            # Logged and counted by the saver; the next one is due as ever.
            self._show()

    def _stop(self, step: int, number: int) -> None:
        """Save and leave, as a signal has told one of the ranks."""
        log.warning(
            "step %d: signal %d: saving, to go on from here when started again", step, number
        )
        try:
            self.saver.save_now(step, "periodic")
        except CheckpointError as error:
            log.warning("step %d: the run stops without a checkpoint: %s", step, error)
        self._ranks.lead(lambda: self._mailbox.tell("stopped", step))
        raise SystemExit(RESTART)

    def _has_final(self, step: int) -> bool:
        return any(
            c.manifest.kind == "final" and c.step == step and c.healthy
            for c in self._rollback.line()[:1]
        )

    def _finish(self, step: int) -> None:
        try:
            self._ledger.update(phase="finished")
        except OSError as error:
            log.warning("step %d: guard.json does not know of the end: %s", step, error)
        self._mailbox.tell("finished", step)
        self._show()

    def _onset(self) -> int | None:
        """The first bad step that any rank has seen, of the others as of the last vote."""
        seen = (self._others_onset, self._detector.onset())
        return min((onset for onset in seen if onset is not None), default=None)

    def _show(self) -> None:
        """Hand rank 0's scrape thread what there is to see now."""
        if self._ranks.rank != 0:
            return
        self._metrics.snapshot = GuardSnapshot.of(
            self._store.all(),
            save_seconds=self.saver.last_seconds,
            failures=self.saver.failures,
            rollbacks=self._procedure.rollbacks,
            budget_remaining=self._mailbox.rollbacks_left,
        )
