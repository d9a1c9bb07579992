"""Guards a training by the Trainer of Hugging Face's transformers.

```python
from alerting.recovery.huggingface import HuggingFaceGuard
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from alerting.exceptions import ConfigError
from alerting.recovery.manifest import DataPosition
from alerting.recovery.reentry import FrameworkGuard, FrameworkState
from alerting.recovery.run import GuardedRun


class HuggingFaceGuard(FrameworkGuard):
    """Guards a `transformers.Trainer`, of one process or of all ranks of DDP.

    ```python
    guard = HuggingFaceGuard("runs/gpt", exporter=exporter)
    output = guard.run(trainer)  # instead of trainer.train()
    ```

    The arguments are those of `FrameworkGuard`.
    """

    def run(self, trainer: Trainer) -> TrainOutput | None:
        """Train to the end, from the newest healthy checkpoint of the run folder or from step 0.

        Returns:
            What `trainer.train()` returned when it was entered last; None where the run had
            finished already.

        Raises:
            ConfigError: the trainer's arguments do not go together with a guard.
            CheckpointError: as `TrainingGuard.steps`.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: as `TrainingGuard.steps`.
            SystemExit: as `TrainingGuard.steps`.
        """
        _require_compatible(trainer)
        run, state = self._guarded(_HuggingFace(trainer))
        with run.entered():
            step = run.resume()
            if step is not None and step >= _total_steps(trainer):
                # Entered with it, the Trainer would take one step more.
                run.end(step)
                return None
            with _boundaries(trainer, _Boundaries(trainer, run, state, begun=step is not None)):
                while True:
                    entry, state.entry = state.entry, None
                    folder = str(_own_folder(entry.folder, entry.step)) if entry else None
                    output: TrainOutput = trainer.train(resume_from_checkpoint=folder)
                    if state.entry is None:
                        break
            run.end(trainer.state.global_step)
        return output


class _HuggingFace:
    """See `alerting.recovery.reentry.Framework`."""

    name = "Hugging Face"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        return self._trainer.state.global_step

    @property
    def data(self) -> DataPosition | None:
        loader = self._trainer.callback_handler.train_dataloader
        try:
            batches = len(loader) if loader is not None else 0
        except TypeError:
            # A stream has no length.
            return None
        epoch, share = divmod(self._trainer.state.epoch, 1)
        return DataPosition(epoch=int(epoch), batch=round(share * batches))

    def save(self, folder: Path) -> None:
        args = self._trainer.args
        usual = args.output_dir
        args.output_dir = str(folder)
        try:
            # All that the Trainer resumes from, also what a subclass adds to it.
            self._trainer._save_checkpoint(self._trainer.model, trial=None)  # type: ignore[arg-type]
        finally:
            args.output_dir = usual


class _Boundaries(TrainerCallback):
    """The run's boundaries, where the Trainer is done with a step.

    That is behind its logging and evaluation: the former belongs to the checkpoint's history, the
    latter draws random numbers. No event comes there, so `after` is called behind the Trainer's
    method that does both. It does both again at an epoch's end, which is waited for.
    """

    def __init__(
        self, trainer: Trainer, run: GuardedRun, state: FrameworkState, *, begun: bool
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._state = state
        self._begun = begun
        self._in_epoch = False
        self._ended_step = False

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save step 0 of a run that begins."""
        # Not at the training's begin: behind that comes `eval_on_start`.
        if not self._begun:
            self._run.begin_anew()
            self._begun = True
        self._in_epoch = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step has a boundary to come."""
        self._ended_step = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Spare an epoch that is left for a rollback its evaluation."""
        self._in_epoch = False
        if self._state.entry is not None:
            control.should_log = control.should_evaluate = False

    def after(self) -> None:
        """The Trainer has logged and evaluated."""
        state, control = self._trainer.state, self._trainer.control
        leaving = control.should_epoch_stop or control.should_training_stop
        if not self._ended_step or (self._in_epoch and (leaving or state.epoch % 1 == 0)):
            return
        self._ended_step = False
        self._run.boundary(state.global_step, last=control.should_training_stop)
        if self._state.entry is not None:
            control.should_training_stop = True


@contextlib.contextmanager
def _boundaries(trainer: Trainer, callback: _Boundaries) -> Iterator[None]:
    original = trainer._maybe_log_save_evaluate

    def followed(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        callback.after()

    trainer.add_callback(callback)
    trainer._maybe_log_save_evaluate = followed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer._maybe_log_save_evaluate
        trainer.remove_callback(callback)


def _own_folder(checkpoint: Path, step: int) -> Path:
    return checkpoint / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _total_steps(trainer: Trainer) -> int:
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps
    *_, total = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return int(total)


def _require_compatible(trainer: Trainer) -> None:
    args = trainer.args
    for refused, sentence in (
        (
            args.save_strategy != "no",
            'save_strategy must be "no": the guard writes the checkpoints',
        ),
        (args.ignore_data_skip, "with ignore_data_skip=True the data would begin anew: leave it"),
        (
            trainer.model_init is not None,
            "model_init makes another model each time that training is entered: pass model=",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True changes what a step is: set the batch size",
        ),
        (
            args.push_to_hub and args.hub_strategy != "end",
            'with push_to_hub each checkpoint would be uploaded: set hub_strategy="end"',
        ),
        (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
            "FSDP and DeepSpeed under the Trainer are not supported; a TrainingGuard around a loop "
            "of your own guards FSDP2",
        ),
    ):
        if refused:
            raise ConfigError(sentence)
