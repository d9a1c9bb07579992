"""The calls of watched layers, in place of Keras' own `layer.call`.

Whether a call counts is known while a graph is made of it: training, not building, not recomputing.
Whether the step is sampled is a variable in the graph, so that nothing is ever traced anew for it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import in_stateless_scope
from keras.src.backend.common import global_state

from act_exporter.integrations.keras.fault import LayerFault
from act_exporter.integrations.keras.layers import LayerTap
from act_exporter.integrations.keras.matrix import Rows, keep
from act_exporter.integrations.keras.patches import Patches
from act_exporter.rows import Array

# The function in which tf.recompute_grad runs a forward a second time, by its name there.
_RECOMPUTING = "inner_recompute_grad"


class Calls:
    """Wrapped calls of one model's watched layers.

    Args:
        model: the model; a call of it, or of a watched layer by itself, is a forward.
        taps: what is watched.
        rows: where its numbers go.
        on_error: told of anything that went wrong.

    Attributes:
        active: whether the step under way is looked at, as far as the host knows.
        in_step: whether a `train_step` is under way, in which a model that takes no `training` is
            in training too.
        depth: (taps,) position in the order in which the taps first ran.
        largest: (taps,) largest finite number of the tensor's dtype.
        seconds: spent on the host: while graphs are made and in eager mode.
    """

    def __init__(
        self,
        model: keras.Model,
        taps: Sequence[LayerTap],
        rows: Rows,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.active = True
        self.in_step = False
        self.depth: Array = np.full(len(taps), np.nan)
        self.largest: Array = np.full(len(taps), np.nan)
        self.seconds = 0.0
        self._next_depth = 0
        self._nesting = 0
        self._rows = rows
        self._on_error = on_error
        self._faults: dict[int, LayerFault] = {}  # by the layer's identity
        with tf.init_scope():
            self._forwards = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._patches = Patches()
        watched: dict[int, tuple[keras.Layer, dict[str, int]]] = {id(model): (model, {})}
        for index, tap in enumerate(taps):
            watched.setdefault(id(tap.watched), (tap.watched, {}))[1][tap.tensor] = index
        for layer, sides in watched.values():
            self._patches.put(layer, "call", self._wrapped(layer, sides))

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last step; waits for the device."""
        return not float(self._forwards.numpy())

    def end_step(self) -> None:
        """A step has ended."""
        self._forwards.assign(0.0)

    def fault(self, layer: keras.Layer, retrace: Callable[[], None]) -> LayerFault:
        """Have the output of `layer` multiplied in what is traced from now on."""

        def removed() -> None:
            self._faults.pop(id(layer), None)
            retrace()

        fault = self._faults[id(layer)] = LayerFault(removed)
        retrace()
        return fault

    def close(self) -> None:
        """Give the layers their own calls back; those in graphs see nothing any more."""
        self.active = False
        self._patches.restore()

    def _wrapped(self, layer: keras.Layer, sides: dict[str, int]) -> Callable[..., Any]:
        original = layer.call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            training, counts = self._decide(kwargs)
            if counts:
                self._begin(sides.get("input"), (args, kwargs))
            try:
                outputs = original(*args, **kwargs)
            finally:
                self._nesting -= counts
            if not training:
                return outputs
            outputs = self._spoilt(layer, outputs)
            if counts:
                self._observe(sides.get("output"), outputs)
            return outputs

        return call

    def _decide(self, kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Whether this call is one of training, and whether it counts."""
        try:
            training = self._is_training(kwargs)
            return training, training and not _recomputing()
        except Exception as error:
            self._failed(error)
            return False, False

    def _is_training(self, kwargs: dict[str, Any]) -> bool:
        if in_stateless_scope():
            return False  # only shapes are being found out
        if self._nesting:
            return True  # the call around it decides, also of a frozen part that it calls otherwise
        training = kwargs.get("training")
        context = global_state.get_global_attribute("current_call_ctx")
        if training is None and context is not None:
            # A layer that takes none: as the call around it was told.
            training = context.get_value("training")
        return self.in_step if training is None else bool(training)

    def _begin(self, index: int | None, values: Any) -> None:
        self._nesting += 1
        try:
            if self._nesting == 1:
                keep(self._forwards)
                self._forwards.assign_add(1.0)
        except Exception as error:
            self._failed(error)
        self._observe(index, values)

    def _observe(self, index: int | None, values: Any) -> None:
        if index is None or (tf.executing_eagerly() and not self.active):
            return
        started = time.perf_counter()
        try:
            x = next((leaf for leaf in tf.nest.flatten(values) if tf.is_tensor(leaf)), None)
            dtype = self._rows.add(index, x)
            if np.isnan(self.depth[index]):
                self.depth[index] = self._next_depth
                self._next_depth += 1
            self.largest[index] = np.nan if dtype is None else float(dtype.max)
        except Exception as error:
            self._failed(error)
        self.seconds += time.perf_counter() - started

    def _spoilt(self, layer: keras.Layer, outputs: Any) -> Any:
        fault = self._faults.get(id(layer))
        if fault is None:
            return outputs
        try:
            return fault.multiplied(outputs)
        except Exception as error:
            self._failed(error)
            return outputs

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._on_error("hook", error)


def _recomputing() -> bool:
    """Whether a forward is run a second time, inside backward."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _RECOMPUTING:
            return True
        frame = frame.f_back
    return False
