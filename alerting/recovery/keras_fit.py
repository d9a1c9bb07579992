"""A guarded `model.fit`, which after a rollback is left and entered again.

Its loop cannot go back, so the epoch of the checkpoint is entered anew and gone through without a
step up to the checkpoint's batch; from there on steps are taken, from an iterator that was put
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from alerting.exceptions import ConfigError
from alerting.recovery.keras_position import KerasPosition
from alerting.recovery.keras_state import KerasState
from alerting.recovery.run import GuardedRun


class Fit:
    """What `model.fit` is to be called with.

    Args:
        model: compiled.
        dataset: the batches of an epoch.
        epochs: how many.
        arguments: the others of `model.fit`.

    Raises:
        ConfigError: they do not go together with a guard.
    """

    def __init__(self, model: Any, dataset: Any, epochs: int, arguments: dict[str, Any]) -> None:
        _require_compatible(model, arguments)
        self._model = model
        self._dataset = dataset
        self._epochs = epochs
        self._arguments = arguments

    def run(
        self,
        run: GuardedRun,
        state: KerasState,
        position: KerasPosition,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> keras.callbacks.History:
        """Train to the end; see `KerasGuard.fit`."""
        history = _History()
        boundaries = _Boundaries(run, state, position, history)
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise ConfigError("BackupAndRestore would load what the guard did not choose")
        with run.entered(), _followed(self._model, boundaries.take):
            try:
                while not self._enter([*callbacks, history, boundaries]):
                    pass
            finally:
                self._model._initial_epoch = None
            run.end(boundaries.step)
        return history

    def _enter(self, callbacks: list[keras.callbacks.Callback]) -> bool:
        """Whether it came to its end."""
        try:
            self._model.fit(
                self._dataset,
                epochs=self._epochs,
                callbacks=callbacks,
                shuffle=False,
                **self._arguments,
            )
        except _RolledBack:
            return False
        return True


class _RolledBack(Exception):  # noqa: N818 (it tells of no error)
    """Leaves the loop, past validation and the end of an epoch that is abandoned."""


class _Boundaries(keras.callbacks.Callback):  # type: ignore[misc]
    """The run's boundaries, when all other callbacks are done with a batch."""

    def __init__(
        self, run: GuardedRun, state: KerasState, position: KerasPosition, history: _History
    ) -> None:
        super().__init__()
        self._run = run
        self._state = state
        self._position = position
        self._history = history
        self._begun = False
        self._entering = False
        self._gone_through = 0
        self._stepped = False
        self.step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on from a checkpoint, where there is one."""
        if not self._begun:
            step = self._run.resume()
            if step is None:
                return
            self.step = step
            self._begun = self._entering = True
        epoch = self._position.epoch
        # Nothing is left of an epoch whose end is behind it, where it is the last one.
        over = self._position.over and epoch + 1 >= self.params["epochs"]
        self.model._initial_epoch = epoch + over

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins, or that of the checkpoint anew."""
        self._gone_through = 0
        if self._entering:
            self._state.put_metrics_back()
        else:
            self._position.begin_epoch(epoch)
        self._entering = False

    def take(self, iterator: Any, function: Callable[[Any], Any]) -> Any:
        """In place of `model.train_function`, which is `function`: a step, where one is due.

        Raises:
            StopIteration: the data have ended.
        """
        position = self._position
        position.follow(iterator)
        if not self._begun:
            self._run.begin_anew()
            self._begun = True
        self._gone_through += 1
        if self._gone_through <= position.batch:
            return self.model.get_metrics_result()
        if position.taken < position.skipping_to:
            next(iterator)
            position.count()
            return self.model.get_metrics_result()
        logs = function(iterator)
        position.count()
        self._stepped = True
        return logs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See the class."""
        if not self._stepped:
            return
        self._stepped = False
        of_epoch, epochs = self.params["steps"], self.params["epochs"]
        last = self._position.epoch + 1 == epochs and batch + 1 == of_epoch
        step = self.step + 1
        self.step = self._run.boundary(step, last=last)
        if self.step != step:
            self._entering = True
            self._history.go_back(self._position.epoch)
            raise _RolledBack

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All that belongs to the epoch is done."""
        self._position.over = True


class _History(keras.callbacks.History):  # type: ignore[misc]
    """One for all times that the loop is entered, with each epoch as it was at its last time."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras would begin anew."""

    def go_back(self, epoch: int) -> None:
        """Forget `epoch` and those after it."""
        kept = sum(1 for known in self.epoch if known < epoch)
        self.epoch = self.epoch[:kept]
        self.history = {name: values[:kept] for name, values in self.history.items()}


@contextlib.contextmanager
def _followed(model: Any, take: Callable[[Any, Callable[[Any], Any]], Any]) -> Iterator[None]:
    """While inside, `take` is called in place of the model's train function, with it."""
    make, own = model.make_train_function, "make_train_function" in vars(model)

    def unfollow() -> None:
        if isinstance(model.train_function, _Followed):
            model.train_function = model.train_function.function

    def made(force: bool = False) -> None:
        # An exporter may have put itself into `make`, and must find its own function here.
        unfollow()
        make(force=force)
        model.train_function = _Followed(model.train_function, take)

    model.make_train_function = made
    try:
        yield
    finally:
        if own:
            model.make_train_function = make
        else:
            del model.make_train_function
        unfollow()


class _Followed:
    def __init__(
        self,
        function: Callable[[Any], Any],
        take: Callable[[Any, Callable[[Any], Any]], Any],
    ) -> None:
        self.function = function
        self._take = take

    def __call__(self, iterator: Any) -> Any:
        return self._take(iterator, self.function)


def _require_compatible(model: Any, arguments: dict[str, Any]) -> None:
    for refused, sentence in (
        (
            not model.compiled,
            "the model must be compiled",
        ),
        (
            arguments.get("validation_split"),
            "validation_split is not supported: split the arrays, and pass validation_data",
        ),
        (
            arguments.get("initial_epoch"),
            "initial_epoch is not supported: the guard knows the epoch",
        ),
        (
            model.compiled and model.steps_per_execution != 1,
            "steps_per_execution must be 1: the guard acts between two steps",
        ),
    ):
        if refused:
            raise ConfigError(sentence)
