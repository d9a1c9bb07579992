"""The training loop's guard: saves, backs up, rolls back, and knows when to stop.

Everything happens in the training thread between two steps, but for the writing of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alerting.exceptions import ConfigError
from alerting.recovery.batches import FOLDER, Batches
from alerting.recovery.detector import Detector, Unwatched
from alerting.recovery.loader_position import LoaderPosition
from alerting.recovery.remedies import DEFAULT, Remedies, Remedy
from alerting.recovery.run import GuardedRun
from alerting.recovery.settings import RecoverBy, Settings, require_whole, run_name
from alerting.recovery.torch_ranks import ranks, require_ranks
from alerting.recovery.torch_steps import TorchSteps
from alerting.recovery.training_state import Stateful, TrainingState
from alerting.recovery.treatment import Treatment


class TrainingGuard:
    """Guards a training loop, of one process or of all ranks.

    ```python
    guard = TrainingGuard("runs/gpt", model=model, optimizer=optimizer, loader=loader)
    for step, batch in guard.steps(total_steps):
        ...  # forward, backward, optimizer.step(), scheduler.step(), zero_grad()
    ```

    Of several ranks each makes one, after `torch.distributed.init_process_group` and with the same
    arguments, and takes the same steps. `run_folder` is one for all, on a file system that all see.

    Args:
        run_folder: holds the run's checkpoints, its control directory and guard.json.
        model: the module that is trained.
        optimizer: its optimizer; a second one can go into `state`.
        scheduler: learning rate scheduler, if there is one.
        scaler: gradient scaler, if there is one.
        loader: gives the batches, epoch after epoch; None gives None as each batch.
        state: other objects to save, by name, each with `state_dict` and `load_state_dict`.
        exporter: the detector of bad steps. Without one every request to recover is honoured, and
            when the bad steps began is told by the request's time alone.
        run: the run's name; the exporter's where there is one, else by default the folder's.
        save_every_steps: a checkpoint is due after so many steps,
        save_every_seconds: or after so many seconds, whichever comes first.
        keep: how many healthy checkpoints are kept, at least 2; as many of those made on request.
        onset_margin_steps: a checkpoint is trusted if it is older than the first bad step by more.
        confirm_after_steps: steps without a bad one after which a checkpoint is confirmed.
        max_rollbacks: rollbacks until the run is halted for people.
        remedies: what a rollback changes, by its number since the budget was whole; by default the
            second one skips the data up to 100 steps behind the first bad step.
        check_every: several ranks agree each so many steps on what to do; they act a step later.
        recover_by: "rollback" in the process, or "restart": end with exit code
            `alerting.exit_codes.RESTART`, for the next process to go back. For trainers whose
            process can't go on, such as one that holds state which nothing brings back.
        detection_lag_seconds: without an exporter, the first bad step is taken to be one that ended
            so long before a recovery was asked for.
        save_batch_bytes: the batch of the first bad step is saved where it has no more bytes,
            into RUN_FOLDER/batches, a file a rank that only its user can read; 0 saves none. The
            batches of the last four steps are held for it. Needs an exporter and a
            loader.

    Raises:
        ConfigError: a setting makes no sense, or `run` is not the exporter's.
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
        # Going back alone helps where it was chance; the same place again is the data's or ours.
        remedies: Mapping[int, Sequence[Remedy]] = DEFAULT,
        # A vote a step costs less than a file's look-up on most networks; see the benchmark.
        check_every: int = 1,
        # In the same process a rollback is over before a new one has imported torch.
        recover_by: RecoverBy = "rollback",
        # Two scrapes of 15 s, one of them failed, an evaluation of 15 s and a group's 10 s: 55 s.
        detection_lag_seconds: float = 60,
        # Batches may be private, and large.
        save_batch_bytes: int = 0,
    ) -> None:
        require_whole("save_batch_bytes", save_batch_bytes, 0)
        if save_batch_bytes and (exporter is None or loader is None):
            raise ConfigError(
                "save_batch_bytes needs an exporter, which sees the first bad step, and a loader"
            )
        settings = Settings(
            save_every_steps=save_every_steps,
            save_every_seconds=save_every_seconds,
            keep=keep,
            onset_margin_steps=onset_margin_steps,
            confirm_after_steps=confirm_after_steps,
            max_rollbacks=max_rollbacks,
            check_every=check_every,
            recover_by=recover_by,
            detection_lag_seconds=detection_lag_seconds,
        )
        folder = Path(run_folder)
        name = run_name(run, exporter, folder)
        detector: Detector = exporter if exporter is not None else Unwatched(name)
        self._position = LoaderPosition(loader)
        self._ranks = ranks()
        self._batches = Batches(folder / FOLDER, save_batch_bytes, detector, self._ranks.rank)
        planned = Remedies(remedies, has_loader=loader is not None)
        self._run = GuardedRun(
            folder,
            name,
            state=TrainingState(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                scaler=scaler,
                extra=state or {},
                position=self._position,
                detector=detector,
                ranks=self._ranks,
            ),
            detector=detector,
            watched=exporter is not None,
            ranks=self._ranks,
            settings=settings,
            remedies=planned,
            treatment=Treatment(
                TorchSteps(optimizer), self._position, planned.functions, self._ranks.size
            ),
            on_look=self._batches.look,
        )

    def steps(self, total_steps: int, *, micro_batches: int = 1) -> Iterator[tuple[int, Any]]:
        """The steps still to be taken, each with its batch; the body of the loop takes it.

        Begins after the newest healthy checkpoint of the run folder, or at step 1. After a
        rollback the numbers go back. A run that has finished yields nothing.

        Args:
            total_steps: number of the last step.
            micro_batches: batches a step, where gradients are accumulated; with more than one the
                body gets a list of them. The last list of an epoch may go over into the next one.

        Returns:
            (step, batch) for each step; steps count from 1.

        Raises:
            ConfigError: `total_steps` or `micro_batches` is no positive whole number, the loader
                is empty, or other ranks train than when the guard was made.
            CheckpointError: the run folder is something else's or in use, a file in it is
                mangled, its checkpoints are gone, the first checkpoint cannot be written, or one
                does not fit the model; or another rank has failed.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: guard.json or a verdict could not be written in a recovery; the next process
                takes it up.
            SystemExit: with `alerting.exit_codes.RESTART`, when the state is saved: SIGTERM or
                SIGUSR1 told a rank to end, or `recover_by="restart"` a recovery.
        """
        require_whole("total_steps", total_steps, 1)
        require_whole("micro_batches", micro_batches, 1)
        require_ranks(self._ranks.size)
        return self._guarded_steps(total_steps, micro_batches)

    def _guarded_steps(self, total_steps: int, micro_batches: int) -> Iterator[tuple[int, Any]]:
        with self._run.entered(), contextlib.closing(self._batches):
            self._position.batches_a_step = micro_batches
            step = self._run.begin()
            while step < total_steps:
                batches = [self._position.next() for _ in range(micro_batches)]
                self._batches.hold(step + 1, batches)
                yield step + 1, batches if micro_batches > 1 else batches[0]
                step = self._run.boundary(step + 1, last=step + 1 == total_steps)
            self._run.end(step)
