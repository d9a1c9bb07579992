"""The train steps of `model.fit`: where one ends, and what its loss is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from act_exporter.forwards import Forwards
from act_exporter.instrumentation import Listener
from act_exporter.integrations.keras.calls import Calls
from act_exporter.integrations.keras.matrix import Numbers
from act_exporter.integrations.keras.optimizers import Optimizers
from act_exporter.integrations.keras.patches import Patches


class TrainSteps:
    """Counts the steps that the optimizers make in `fit` and `train_on_batch`.

    One call of the train function runs `steps_per_execution` of them, and a step may be gathered
    over several: so the optimizers' iterations before and after it are compared. A model without
    an optimizer makes as many steps as an execution has.

    Args:
        model: its `make_train_function`, `train_step` and `compute_loss` are replaced.
        calls: told when a train step is being traced.
        optimizers: found anew for each train function.
        numbers: where the loss goes.
        listener: told of steps and errors.
        on_failure: called when a step has failed, out of memory perhaps.

    Attributes:
        explicit: whether the trainer counts the steps itself.
        paused: whether nothing counts.
    """

    def __init__(
        self,
        model: keras.Model,
        calls: Calls,
        optimizers: Optimizers,
        numbers: Numbers,
        listener: Listener,
        on_failure: Callable[[], None],
    ) -> None:
        self.explicit = False
        self.paused = False
        self._model = model
        self._calls = calls
        self._optimizers = optimizers
        self._numbers = numbers
        self._listener = listener
        self._on_failure = on_failure
        self._step = 0
        self._forwards = Forwards()
        self._closed = False
        self._patches = Patches()
        self._patches.put(model, "make_train_function", self._making(model.make_train_function))
        self._patches.put(model, "train_step", self._stepping(model.train_step))
        self._patches.put(model, "compute_loss", self._computing(model.compute_loss))
        optimizers.find()
        self.retrace()

    def restart(self, step: int) -> None:
        """Go on counting from `step`."""
        self._step = step

    def retrace(self) -> None:
        """Have the train function made anew, in which other calls are seen than before."""
        if self._model.train_function is not None:
            self._model.make_train_function(force=True)

    def close(self) -> None:
        """Give the model its own methods back."""
        self._closed = True
        self._patches.restore()
        self.retrace()

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_train_function(force: bool = False) -> Any:
            before = self._model.train_function
            made = original(force=force)
            function = self._model.train_function
            if function is not before and not self._closed:
                self._contained(self._optimizers.find)
                self._model.train_function = self._executing(function)
            return made

        return make_train_function

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute(iterator: Any) -> Any:
            before = self._iterations()
            try:
                outputs = original(iterator)
            except StopIteration:
                raise  # there was no batch left
            except BaseException:
                self._contained(self._on_failure)
                raise
            self._contained(lambda: self._end(before))
            return outputs

        return execute

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._calls.in_step = True
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.in_step = False

        return train_step

    def _computing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            if self._calls.in_step:
                self._contained(lambda: self._numbers.set("loss", loss), "record")
            return loss

        return compute_loss

    def _iterations(self) -> list[int] | None:
        try:
            return None if self.explicit or self._closed else self._optimizers.iterations()
        except Exception as error:
            self._failed(error)
            return None

    def _end(self, before: list[int] | None) -> None:
        """An execution has ended."""
        if self.paused or self.explicit or self._closed:
            return
        self._forwards.count += 1
        after = self._optimizers.iterations()
        if before is None or after is None or len(before) != len(after):
            made = self._model.steps_per_execution
        else:
            made = max(new - old for new, old in zip(after, before, strict=True))
        if made <= 0:
            if self._forwards.is_stuck():
                self._listener.sample_without_step()
            return
        self._step += made
        self._listener.finish_step(self._step)
        self._forwards.end_step()

    def _contained(self, run: Callable[[], None], stage: str = "step") -> None:
        try:
            run()
        except Exception as error:
            self._failed(error, stage)

    def _failed(self, error: Exception, stage: str = "step") -> None:
        with contextlib.suppress(Exception):
            self._listener.count_error(stage, error)
