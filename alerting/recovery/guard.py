"""The training loop's guard: saves, backs up, rolls back, and knows when to stop.

Everything happens in the training thread between two steps, but for the writing of files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alerting.control import ControlDirectory, Request
from alerting.exceptions import CheckpointError, RecoveryHaltedError
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.confirmations import Confirmations
from alerting.recovery.detector import Detector, Unwatched
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.lock import exclusive
from alerting.recovery.mailbox import Mailbox
from alerting.recovery.metrics import GuardMetrics, GuardSnapshot
from alerting.recovery.position import LoaderPosition
from alerting.recovery.procedure import RecoveryProcedure
from alerting.recovery.rollback import Rollback
from alerting.recovery.saver import Saver
from alerting.recovery.schedule import Schedule
from alerting.recovery.settings import require_seconds, require_whole, run_name
from alerting.recovery.training_state import Stateful, TrainingState, require_one_rank

log = logging.getLogger(__name__)


class TrainingGuard:
    """Guards a training loop of one process.

    ```python
    guard = TrainingGuard("runs/gpt", model=model, optimizer=optimizer, loader=loader)
    for step, batch in guard.steps(total_steps):
        ...  # forward, backward, optimizer.step(), scheduler.step(), zero_grad()
    ```

    Args:
        run_folder: holds the run's checkpoints, its control directory and guard.json.
        model: the module that is trained.
        optimizer: its optimizer; a second one can go into `state`.
        scheduler: learning rate scheduler, if there is one.
        scaler: gradient scaler, if there is one.
        loader: gives the batches, epoch after epoch; None gives None as each batch.
        state: other objects to save, by name, each with `state_dict` and `load_state_dict`.
        exporter: the detector of bad steps. Without one every request to recover is honoured.
        run: the run's name; the exporter's where there is one, else by default the folder's.
        save_every_steps: a checkpoint is due after so many steps,
        save_every_seconds: or after so many seconds, whichever comes first.
        keep: how many healthy checkpoints are kept, at least 2; as many of those made on request.
        onset_margin_steps: a checkpoint is trusted if it is older than the first bad step by more.
        confirm_after_steps: steps without a bad one after which a checkpoint is confirmed.
        max_rollbacks: rollbacks until the run is halted for people.

    Raises:
        ConfigError: a setting makes no sense, `run` is not the exporter's, or several ranks train.
    """

    def __init__(
        self,
        run_folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Iterable[Any] | None = None,
        state: Mapping[str, Stateful] | None = None,
        exporter: Detector | None = None,
        run: str | None = None,
        # What a crash may cost, against what a save costs; 15 minutes bound it for slow steps.
        save_every_steps: int = 500,
        save_every_seconds: float = 900,
        # Two to go back to where the newest turns out to be bad, and one more.
        keep: int = 3,
        # The weights of the first bad step s are those after s - 1 steps, and a detector that
        # samples every 10th step sees it up to 9 steps late.
        onset_margin_steps: int = 10,
        # A runaway shows in 3 sampled steps, 30 steps at one in 10; runs that were restarted about
        # 100 steps before a spike went well (PaLM), so 100 clean ones are taken as proof.
        confirm_after_steps: int = 100,
        # The same anomaly a third time is no accident of the data: people must look.
        max_rollbacks: int = 2,
    ) -> None:
        require_one_rank()
        require_whole("save_every_steps", save_every_steps, 1)
        require_seconds("save_every_seconds", save_every_seconds)
        require_whole("keep", keep, 2)
        require_whole("onset_margin_steps", onset_margin_steps, 0)
        require_whole("confirm_after_steps", confirm_after_steps, 1)
        require_whole("max_rollbacks", max_rollbacks, 0)
        self._folder = Path(run_folder)
        self._schedule = Schedule(steps=save_every_steps, seconds=save_every_seconds)
        name = run_name(run, exporter, self._folder)
        self._detector: Detector = exporter if exporter is not None else Unwatched(name)
        self._position = LoaderPosition(loader)
        training = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            extra=state or {},
            position=self._position,
            detector=self._detector,
        )
        self._control = ControlDirectory(self._folder / "control")
        self._ledger = LedgerFile(self._folder / "guard.json", name)
        self._mailbox = Mailbox(self._control, self._ledger, max_rollbacks)
        self._store = CheckpointStore(self._folder / "checkpoints")
        self._saver = Saver(
            store=self._store,
            state=training,
            detector=self._detector,
            ledger=self._ledger,
            keep=keep,
            onset_margin_steps=onset_margin_steps,
        )
        self._rollback = Rollback(
            store=self._store,
            state=training,
            detector=self._detector,
            ledger=self._ledger,
            onset_margin_steps=onset_margin_steps,
        )
        self._procedure = RecoveryProcedure(
            store=self._store,
            saver=self._saver,
            rollback=self._rollback,
            mailbox=self._mailbox,
            ledger=self._ledger,
            detector=self._detector,
            watched=exporter is not None,
        )
        self._confirmations = Confirmations(
            store=self._store,
            detector=self._detector,
            ledger=self._ledger,
            confirm_after_steps=confirm_after_steps,
        )
        self._metrics = GuardMetrics(name)

    def steps(self, total_steps: int) -> Iterator[tuple[int, Any]]:
        """The steps still to be taken, each with its batch; the body of the loop takes it.

        Begins after the newest healthy checkpoint of the run folder, or at step 1. After a
        rollback the numbers go back. A run that has finished yields nothing.

        Args:
            total_steps: number of the last step.

        Returns:
            (step, batch) for each step; steps count from 1.

        Raises:
            ConfigError: `total_steps` is no positive whole number, the loader is empty, or several
                ranks train.
            CheckpointError: the run folder is something else's or in use, a file in it is
                mangled, its checkpoints are gone, the first checkpoint cannot be written, or one
                does not fit the model.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: guard.json or a verdict could not be written in a recovery; the next process
                takes it up.
        """
        require_whole("total_steps", total_steps, 1)
        require_one_rank()
        return self._guarded_steps(total_steps)

    def _guarded_steps(self, total_steps: int) -> Iterator[tuple[int, Any]]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be made: {error}") from error
        with exclusive(self._folder / "guard.lock"):
            self._metrics.register(self._detector.registry)
            try:
                step = self._begin()
                while step < total_steps:
                    batch = self._position.next()
                    yield step + 1, batch
                    step = self._boundary(step + 1, total_steps)
                self._end(step)
            finally:
                # Also when the body raised or left the loop: what is saved is worth publishing.
                self._saver.close()
                self._metrics.unregister(self._detector.registry)

    def _begin(self) -> int:
        """Stand at the step to go on from: 0, or that of a checkpoint."""
        begun = self._ledger.load()
        self._store.open(begun=begun)
        self._control.create()
        checkpoints = self._store.all()
        if not begun and checkpoints:
            generation = max(c.manifest.generation for c in checkpoints)
            log.warning("guard.json is missing: going on in generation %d", generation)
            self._ledger.update(generation=generation)
        ledger = self._ledger.now
        if ledger.recovery is not None:
            checkpoint = self._procedure.take_up(ledger.recovery)
        elif checkpoints:
            checkpoint = self._resume()
        else:
            return self._begin_anew()
        return self._go_on_from(checkpoint)

    def _begin_anew(self) -> int:
        self._position.start()
        self._detector.reset(0)
        self._detector.step(0)
        # Waited for: so there is always one to go back to, and a disk or an object that cannot be
        # saved shows now and not in the night.
        self._confirmations.add(self._saver.save_now(0, "periodic"))
        # Only now: a run that guard.json tells of is never begun anew.
        self._ledger.update(phase="running")
        self._schedule.restart(0)
        self._show()
        self._mailbox.tell("running", 0)
        return 0

    def _resume(self) -> Checkpoint:
        try:
            checkpoint = self._rollback.resume()
        except RecoveryHaltedError:
            self._ledger.update(phase="halted")
            self._mailbox.tell("halted", 0)
            raise
        self._procedure.stand_at(checkpoint)
        return checkpoint

    def _go_on_from(self, checkpoint: Checkpoint) -> int:
        self._confirmations.start(self._rollback.descent(checkpoint))
        self._schedule.restart(checkpoint.step)
        self._show()
        return checkpoint.step

    def _boundary(self, step: int, total_steps: int) -> int:
        """What there is to do after step `step`; the step that the run stands at afterwards."""
        self._detector.step(step)
        saving = self._saver.busy
        published = self._saver.publish_if_done()
        if published is not None:
            self._confirmations.add(published)
        if self._confirmations.check(step):
            # The budget may be whole again.
            self._mailbox.tell("running", step)
            self._show()
        elif saving and not self._saver.busy:
            # Published or failed: a disk that stays full must be seen by those who are away.
            self._show()
        request = self._mailbox.take("recover", step)
        if request is not None:
            checkpoint = self._procedure.recover(request, step)
            if checkpoint is not None:
                return self._go_on_from(checkpoint)
        request = self._mailbox.take("checkpoint", step)
        if request is not None:
            self._back_up(request, step)
        request = self._mailbox.take("drill", step)
        if request is not None:
            self._procedure.drill(request, step)
        if step < total_steps:
            self._save_if_due(step)
        return step

    def _save_if_due(self, step: int) -> None:
        # One that is still being written is not waited for: the next boundary will do.
        if self._saver.busy or not self._schedule.due(step):
            return
        self._schedule.restart(step)
        try:
            self._saver.begin(step, "periodic")
        except CheckpointError:
            # Logged and counted by the saver; the next one is due as ever.
            self._show()

    def _back_up(self, request: Request, step: int) -> None:
        onset = self._detector.onset()
        try:
            backup = self._saver.save_now(step, "backup")
            # Before the answer: whoever reads it must find the time in the status.
            self._ledger.update(last_backup_at=backup.manifest.created_at)
        except (CheckpointError, OSError) as error:
            self._mailbox.answer(request, "failed", str(error), step=step, onset=onset)
            self._show()
            return
        self._mailbox.tell("running", step)
        detail = f"backed up step {step} as {backup.name}, which is {backup.health.health}"
        self._mailbox.answer(request, "done", detail, step=step, onset=onset, made=backup)
        self._show()

    def _end(self, step: int) -> None:
        if not any(
            c.manifest.kind == "final" and c.step == step and c.healthy
            for c in self._rollback.line()[:1]
        ):
            try:
                self._saver.save_now(step, "final")
            except CheckpointError as error:
                log.warning("step %d: the run ends without a final checkpoint: %s", step, error)
        try:
            self._ledger.update(phase="finished")
        except OSError as error:
            log.warning("step %d: guard.json does not know of the end: %s", step, error)
        self._mailbox.tell("finished", step)
        self._show()

    def _show(self) -> None:
        """Hand the scrape thread what there is to see now."""
        self._metrics.snapshot = GuardSnapshot.of(
            self._store.all(),
            save_seconds=self._saver.last_seconds,
            failures=self._saver.failures,
            rollbacks=self._procedure.rollbacks,
            budget_remaining=self._mailbox.rollbacks_left,
        )
