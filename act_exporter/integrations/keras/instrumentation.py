"""What takes the tensors of a Keras model: wrapped calls, its optimizers, its train steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from act_exporter.instrumentation import Instrumentation, Listener, Multiplier
from act_exporter.integrations.keras.calls import Calls
from act_exporter.integrations.keras.gradients import Gradients
from act_exporter.integrations.keras.layers import LayerTap
from act_exporter.integrations.keras.matrix import Matrix, Numbers, Rows
from act_exporter.integrations.keras.optimizers import Optimizers
from act_exporter.integrations.keras.training import TrainSteps
from act_exporter.rows import Array
from act_exporter.sample import Norms, Sample

log = logging.getLogger(__name__)

_NUMBERS = ("loss", "grad_norm", "loss_scale", "learning_rate")


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one sampled step left behind, on its device."""

    step: int
    stepped: bool
    time: float
    depth: Array
    largest: Array
    packed: tf.Tensor


class KerasInstrumentation(Instrumentation):
    """Takes the tensors of one Keras model on TensorFlow.

    Args:
        model: a built model.
        taps: what is watched of it.
        listener: told of steps and errors.
        exceed_threshold: for the share of elements with |x| above it.
        gradients: whether their norms are taken.
        optimizer: that of a custom loop; None for the model's own.
    """

    def __init__(
        self,
        model: keras.Model,
        taps: Sequence[LayerTap],
        listener: Listener,
        *,
        exceed_threshold: float,
        gradients: bool,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        self._sampling = True
        self._paused = False
        self._rate: float | None = None
        self._seconds = 0.0
        self._watched = {tap.layer: tap.watched for tap in taps}
        with tf.init_scope():
            self._active = tf.Variable(True, trainable=False)
        self._rows = Rows(taps, exceed_threshold, self._active)
        self._numbers = Numbers(_NUMBERS)
        self._gradients = Gradients(model, taps, self._active) if gradients else None
        self._matrices: list[Matrix] = [self._rows, self._numbers]
        if self._gradients is not None:
            self._matrices.append(self._gradients.squares)
        self._collect = tf.function(self._collected, autograph=False)
        self._taken: deque[_Taken] = deque()
        self._norms: list[Norms] = []
        # On an accelerator what was just taken is still being made: it is read a step later.
        self._waits = "CPU" not in self._rows.variable.device.upper()
        self._calls = Calls(model, taps, self._rows, listener.count_error)
        self._optimizers = Optimizers(
            model, optimizer, self._gradients, self._numbers, listener.count_error
        )
        self._steps = TrainSteps(
            model, self._calls, self._optimizers, self._numbers, listener, self._clear
        )

    @property
    def sampling(self) -> bool:
        """Whether the step under way is sampled."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: bool) -> None:
        self._sampling = sampling
        self._activate()

    @property
    def paused(self) -> bool:
        """Whether nothing counts."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = self._steps.paused = paused
        self._activate()

    def _activate(self) -> None:
        active = self._sampling and not self._paused
        if active != self._calls.active:
            self._calls.active = active
            self._active.assign(active)

    @property
    def learning_rate(self) -> float | None:
        """Of the last sampled step; at first, or after a state was restored, that of now."""
        if self._rate is None:
            self._rate = self._optimizers.learning_rate()
        return self._rate

    @property
    def seconds(self) -> float:
        """Spent while graphs were made, in eager mode and on reading."""
        return self._seconds + self._calls.seconds

    @property
    def series(self) -> int:
        """Layers that have a norm."""
        return len(self._gradients.layers) if self._gradients is not None else 0

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last step."""
        return self._calls.idle

    def take(self, step: int, *, stepped: bool = True) -> None:
        """Have the numbers of `step` copied, and begin anew."""
        started = time.perf_counter()
        depth, largest = self._calls.depth.copy(), self._calls.largest.copy()
        taken = _Taken(step, stepped, time.time(), depth, largest, self._collect())
        self._taken.append(taken)
        self._seconds += time.perf_counter() - started

    def samples(self) -> list[Sample]:
        """Those that can be read without waiting."""
        started = time.perf_counter()
        samples = []
        while len(self._taken) > self._waits:
            samples.append(self._sample(self._taken.popleft()))
        self._seconds += time.perf_counter() - started
        return samples

    def _sample(self, taken: _Taken) -> Sample:
        packed: Array = taken.packed.numpy()
        shapes = [matrix.variable.shape for matrix in self._matrices]
        cuts = np.cumsum([shape.num_elements() for shape in shapes])[:-1]
        rows, numbers, *squares = (
            part.reshape(shape) for part, shape in zip(np.split(packed, cuts), shapes, strict=True)
        )
        values = self._numbers.values(numbers)
        self._rate = values.pop("learning_rate", self._rate)
        if self._gradients is not None and taken.stepped:
            norms = self._gradients.norms(taken.step, squares[0])
            self._norms += [norms] if norms is not None else []
        return Sample(taken.step, taken.time, rows, values, taken.depth, taken.largest)

    def norms(self, loss_scale: float | None) -> list[Norms]:
        """Those of the steps whose samples were handed out; no scale is in them."""
        norms, self._norms = self._norms, []
        return norms

    def end_step(self) -> None:
        """A step has ended."""
        self._calls.end_step()

    def record(self, values: Mapping[str, Any]) -> None:
        """Keep numbers for the next sample; in a graph that is being made, at each of its runs."""
        for name, value in values.items():
            self._numbers.set(name, value)

    def set_step(self, step: int) -> None:
        """The trainer counts the steps itself."""
        if not self._steps.explicit and self._optimizers.iterations() is None:
            log.warning(
                "no optimizer of the model is known, so there will be no gradient norms and no"
                " learning rate: give start_exporter that of your loop, as optimizer="
            )
        self._steps.explicit = True

    def restart(self, step: int) -> None:
        """Go on counting from `step`."""
        self._steps.restart(step)
        self._rate = None

    def forget(self) -> None:
        """Drop what was taken and not handed out."""
        self._taken.clear()
        self._norms.clear()
        self._rate = None
        self._clear()

    def drop(self) -> None:
        """A pause is over: what gradients were written down meanwhile do not count."""
        if self._gradients is not None:
            self._gradients.squares.clear()

    def fault(self, layer: str) -> Multiplier:
        """Have the output of a watched layer multiplied; the train function is traced anew."""
        return self._calls.fault(self._watched[layer], self._steps.retrace)

    def close(self) -> None:
        """Leave nothing in the model."""
        self._active.assign(False)
        self._steps.close()
        self._optimizers.close()
        self._calls.close()

    def _clear(self) -> None:
        self._calls.end_step()
        for matrix in self._matrices:
            matrix.clear()

    def _collected(self) -> tf.Tensor:
        packed = tf.concat([tf.reshape(own.variable, [-1]) for own in self._matrices], 0)
        for matrix in self._matrices:
            matrix.clear()
        return packed
