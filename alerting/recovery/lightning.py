"""Guards a training by Lightning's Trainer.

```python
from alerting.recovery.lightning import LightningGuard
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
from pytorch_lightning.utilities.combined_loader import CombinedLoader

from alerting.exceptions import ConfigError
from alerting.recovery import rng
from alerting.recovery.manifest import DataPosition
from alerting.recovery.reentry import Entry, FrameworkGuard, FrameworkState
from alerting.recovery.run import GuardedRun

FILE = "lightning/trainer.ckpt"
"""Within a checkpoint."""


class LightningGuard(FrameworkGuard):
    """Guards a `pytorch_lightning.Trainer` of one process.

    ```python
    guard = LightningGuard("runs/gpt", exporter=exporter)
    guard.run(trainer, model, loader)  # instead of trainer.fit(model, loader)
    ```

    The loader must have a `state_dict`, as torchdata's StatefulDataLoader: Lightning begins any
    other one anew within an epoch. The arguments are those of `FrameworkGuard`.
    """

    def run(
        self,
        trainer: lightning.Trainer,
        model: lightning.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: lightning.LightningDataModule | None = None,
    ) -> None:
        """Train to the end, from the newest healthy checkpoint of the run folder or from step 0.

        Args:
            trainer: what fits.
            model: what is fitted.
            train_dataloaders: as of `trainer.fit`.
            val_dataloaders: as of `trainer.fit`.
            datamodule: as of `trainer.fit`.

        Raises:
            ConfigError: the trainer or its loader does not go together with a guard.
            CheckpointError: as `TrainingGuard.steps`.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: as `TrainingGuard.steps`.
            SystemExit: as `TrainingGuard.steps`.
        """
        _require_compatible(trainer)
        run, state = self._guarded(_Lightning(trainer))
        with run.entered():
            step = run.resume()
            with _boundaries(trainer, _Boundaries(run, state, begun=step is not None)) as callback:
                while True:
                    entry, state.entry = state.entry, None
                    callback.enter(entry)
                    checkpoint = entry.folder / FILE if entry else None
                    trainer.fit(model, train_dataloaders, val_dataloaders, datamodule, checkpoint)
                    if state.entry is None:
                        break
            run.end(trainer.global_step)


class _Lightning:
    """See `alerting.recovery.reentry.Framework`."""

    name = "Lightning"

    def __init__(self, trainer: lightning.Trainer) -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        return self._trainer.global_step

    @property
    def data(self) -> DataPosition:
        batch = self._trainer.fit_loop.batch_idx + 1
        return DataPosition(epoch=self._trainer.current_epoch, batch=batch)

    def save(self, folder: Path) -> None:
        self._trainer.save_checkpoint(folder / FILE)


class _Boundaries(lightning.Callback):
    """The run's boundaries, at the end of a batch that finished a step.

    None where validation or the epoch's end follows: both draw random numbers that a resumed run
    would not draw, so the boundary of such a step falls together with the next one's.
    """

    def __init__(self, run: GuardedRun, state: FrameworkState, *, begun: bool) -> None:
        self._run = run
        self._state = state
        self._begun = begun
        self._step = 0
        self._entry: Entry | None = None

    def enter(self, entry: Entry | None) -> None:
        """Training is about to be entered with `entry`."""
        self._entry = entry
        self._step = entry.step if entry else 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Save step 0 of a run that begins."""
        _require_loader(trainer)
        if not self._begun:
            self._run.begin_anew()
            self._begun = True

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on with the random numbers of the checkpoint."""
        if self._entry is not None:
            # Only now: making the iterators has drawn some.
            rng.restore(self._entry.random)
        self._entry = None

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """See the class."""
        # It would raise a SIGTERMException before the boundary that saves.
        trainer._signal_connector.received_sigterm = False
        step, loop = trainer.global_step, trainer.fit_loop.epoch_loop
        if step == self._step:
            return
        last = loop._is_training_done and _is_last_epoch(trainer)
        fetcher: Any = trainer.fit_loop._data_fetcher
        follows = loop._num_ready_batches_reached() or loop._should_check_val_fx(fetcher)
        if follows and not last:
            return
        self._step = step
        self._run.boundary(step, last=last)
        if self._state.entry is not None:
            trainer.should_stop = True
            # What is left behind need not be validated.
            loop._skip_next_val = True


@contextlib.contextmanager
def _boundaries(trainer: lightning.Trainer, callback: _Boundaries) -> Iterator[_Boundaries]:
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    try:
        yield callback
    finally:
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]


def _is_last_epoch(trainer: lightning.Trainer) -> bool:
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs


def _require_compatible(trainer: lightning.Trainer) -> None:
    for refused, sentence in (
        (
            trainer.world_size > 1,
            "several ranks under Lightning are not supported; a TrainingGuard around a loop of "
            "your own guards DDP and FSDP2",
        ),
        (
            trainer.min_epochs or trainer.min_steps,
            "min_epochs and min_steps keep Lightning from stopping for a rollback: leave them",
        ),
    ):
        if refused:
            raise ConfigError(sentence)


def _require_loader(trainer: lightning.Trainer) -> None:
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise ConfigError(
                f"a {type(loader).__name__} has no state_dict, so Lightning would begin its epoch "
                "anew after a rollback: use torchdata's StatefulDataLoader"
            )
    if trainer.num_training_batches == 1:
        raise ConfigError("an epoch of one batch has no step boundary within it: make it longer")
