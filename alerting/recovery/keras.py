"""Guards a training by Keras on TensorFlow, in `fit` or in a loop of one's own.

```python
from alerting.recovery.keras import KerasGuard
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import keras
import tensorflow as tf

from alerting.exceptions import ConfigError
from alerting.recovery.detector import Detector, Unwatched
from alerting.recovery.keras_data import as_dataset, require_exact
from alerting.recovery.keras_fit import Fit
from alerting.recovery.keras_position import KerasPosition
from alerting.recovery.keras_state import KerasState, build
from alerting.recovery.keras_steps import KerasSteps
from alerting.recovery.ranks import Alone
from alerting.recovery.remedies import DEFAULT, Remedies, Remedy
from alerting.recovery.run import GuardedRun
from alerting.recovery.settings import GivenSettings, Settings, require_whole, run_name
from alerting.recovery.treatment import Treatment


class KerasGuard:
    """Guards the training of a Keras model by one process.

    ```python
    guard = KerasGuard("runs/gpt", model=model, exporter=exporter)
    history = guard.fit(dataset, epochs=3)  # instead of model.fit(dataset, epochs=3)
    ```

    or, in a loop of one's own:

    ```python
    guard = KerasGuard("runs/gpt", model=model, optimizer=optimizer, exporter=exporter)
    for step, (x, y) in guard.steps(total_steps, dataset):
        train_step(x, y)  # with tf.GradientTape, in a tf.function or not
    ```

    A step is a batch, also where the optimizer accumulates the gradients of several.

    Args:
        run_folder: holds the run's checkpoints, its control directory and guard.json.
        model: the model that is trained.
        optimizer: its optimizer; by default the one that it was compiled with. To be given before
            a function of one's own that uses it is traced.
        state: what else to save, by name: variables, or objects with `variables`, such as a second
            optimizer, built, or a metric.
        exporter: the detector of bad steps. Without one every request to recover is honoured, and
            when the bad steps began is told by the request's time alone.
        run: the run's name; the exporter's where there is one, else by default the folder's.
        remedies: as of `TrainingGuard`.
        settings: as of `TrainingGuard`: `save_every_steps`, `keep`, `max_rollbacks`, `recover_by`
            and so on.

    Raises:
        ConfigError: a setting makes no sense, `run` is not the exporter's, Keras does not run on
            TensorFlow, several workers train, or there is no optimizer.
    """

    def __init__(
        self,
        run_folder: str | Path,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        state: Mapping[str, Any] | None = None,
        exporter: Detector | None = None,
        run: str | None = None,
        remedies: Mapping[int, Sequence[Remedy]] = DEFAULT,
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._settings = Settings(**settings)
        self._folder = Path(run_folder)
        self._name = run_name(run, exporter, self._folder)
        self._exporter = exporter
        self._model = model
        self._optimizer: Any = optimizer or getattr(model, "optimizer", None)
        _require_compatible(model, self._optimizer)
        self._state = dict(state or {})
        self._remedies = remedies
        self._steps = KerasSteps(
            getattr(self._optimizer, "inner_optimizer", self._optimizer),
            [remedy for planned in remedies.values() for remedy in planned],
        )

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        sample_weight: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        **arguments: Any,
    ) -> keras.callbacks.History:
        """`model.fit`, from the newest healthy checkpoint of the run folder or from step 0.

        After a rollback or a restart the epoch of the checkpoint is entered anew and gone through
        up to its batch: callbacks see these batches without a step. They see `on_train_begin`
        anew too, and what they keep in Python is not brought back.

        Args:
            x: a tf.data.Dataset, a keras.utils.PyDataset, or arrays.
            y: as of `model.fit`.
            epochs: as of `model.fit`.
            batch_size: of arrays, and of validation by arrays.
            sample_weight: as of `model.fit`.
            shuffle: of arrays and of a PyDataset; a dataset has its own.
            seed: of that shuffling; the order is the same in each run with the same one.
            callbacks: as of `model.fit`.
            arguments: what else `model.fit` takes, but `initial_epoch` and `validation_split`.

        Returns:
            What `model.fit` returns: of this process, with each epoch as it was at its last time.

        Raises:
            ConfigError: the arguments do not go together with a guard, something that training
                changes is not saved, or the position in the data cannot be saved.
            CheckpointError: as `TrainingGuard.steps`.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: as `TrainingGuard.steps`.
            SystemExit: as `TrainingGuard.steps`.
        """
        require_whole("epochs", epochs, 1)
        require_whole("batch_size", batch_size, 1)
        dataset = as_dataset(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=seed)
        if self._model.optimizer is not self._optimizer:
            raise ConfigError("the model was not compiled with the optimizer that is guarded")
        fit = Fit(self._model, dataset, epochs, {"batch_size": batch_size, **arguments})
        build(self._model, self._optimizer, dataset)
        if self._steps.in_use:
            self._model.train_function = None
        position = KerasPosition(dataset)
        state = self._live(position)
        return fit.run(self._guarded(position, state), state, position, callbacks or ())

    def steps(
        self, total_steps: int, dataset: tf.data.Dataset | None = None
    ) -> Iterator[tuple[int, Any]]:
        """The steps still to be taken, each with its batch; the body of the loop takes it.

        Begins after the newest healthy checkpoint of the run folder, or at step 1. After a
        rollback the numbers go back. A run that has finished yields nothing.

        Args:
            total_steps: number of the last step.
            dataset: gives the batches, epoch after epoch; None gives None as each batch.

        Returns:
            (step, batch) for each step; steps count from 1.

        Raises:
            ConfigError: `total_steps` is no positive whole number, the model was never called,
                something that training changes is not saved, the dataset is empty or its position
                cannot be saved.
            CheckpointError: as `TrainingGuard.steps`.
            RecoveryHaltedError: no healthy checkpoint is left, or the rollbacks are spent.
            OSError: as `TrainingGuard.steps`.
            SystemExit: as `TrainingGuard.steps`.
        """
        require_whole("total_steps", total_steps, 1)
        if dataset is not None and not isinstance(dataset, tf.data.Dataset):
            raise ConfigError(
                f"the position in a {type(dataset).__name__} cannot be saved: pass a "
                "tf.data.Dataset, or none and draw batches by the step's number"
            )
        if dataset is not None:
            require_exact(dataset)
        build(self._model, self._optimizer)
        position = KerasPosition(dataset)
        return self._guarded_steps(total_steps, position, self._live(position))

    def _guarded_steps(
        self, total_steps: int, position: KerasPosition, state: KerasState
    ) -> Iterator[tuple[int, Any]]:
        run = self._guarded(position, state)
        with run.entered():
            found = run.resume()
            if found is None:
                position.start()
                found = run.begin_anew()
            step = found
            while step < total_steps:
                position.resume()
                yield step + 1, position.next()
                step = run.boundary(step + 1, last=step + 1 == total_steps)
            run.end(step)

    def _live(self, position: KerasPosition) -> KerasState:
        return KerasState(
            model=self._model,
            optimizer=self._optimizer,
            extra=self._state,
            position=position,
            detector=self._detector,
        )

    def _guarded(self, position: KerasPosition, state: KerasState) -> GuardedRun:
        planned = Remedies(self._remedies, has_loader=position.dataset is not None)
        self._run = GuardedRun(
            self._folder,
            self._name,
            state=state,
            detector=self._detector,
            watched=self._exporter is not None,
            ranks=Alone(),
            settings=self._settings,
            remedies=planned,
            treatment=Treatment(self._steps, position, planned.functions, 1),
        )
        return self._run

    @property
    def _detector(self) -> Detector:
        return self._exporter if self._exporter is not None else Unwatched(self._name)


def _require_compatible(model: Any, optimizer: Any) -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigError(f"Keras runs on {backend}; only on tensorflow can this guard go back")
    if (
        model.distribute_strategy.num_replicas_in_sync > 1
        or tf.distribute.has_strategy()
        or keras.distribution.distribution() is not None
    ):
        raise ConfigError(
            "several workers or replicas (tf.distribute, keras.distribution) are not supported"
        )
    if optimizer is None:
        raise ConfigError("there is no optimizer: compile the model with one, or pass optimizer=")
