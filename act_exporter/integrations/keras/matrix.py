"""Matrices of numbers that a graph writes and the host reads once a sampled step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from act_exporter.integrations.keras.layers import LayerTap
from act_exporter.integrations.keras.reductions import log_partition, merged, row_norm, row_of
from act_exporter.rows import Array, empty

# A graph knows its variables weakly, and one that has lost one fails. So each is kept for as long
# as a graph that has it, which may outlive the exporter.
_KEPT: weakref.WeakKeyDictionary[Any, list[tf.Variable]] = weakref.WeakKeyDictionary()


def keep(*variables: tf.Variable) -> None:
    """Keep variables alive while the graph that is being made is."""
    if not tf.executing_eagerly():
        _KEPT.setdefault(tf.compat.v1.get_default_graph(), []).extend(variables)


class Matrix:
    """One variable (rows, columns) of float64, and what it is made of at first.

    Attributes:
        variable: the variable.
    """

    def __init__(self, initial: Array) -> None:
        self._initial = initial
        with tf.init_scope():
            self.variable = tf.Variable(initial, trainable=False, dtype=tf.float64)

    def put(self, row: int, values: Any) -> None:
        """Overwrite a row with `values` (columns,), in the graph that is being made or at once."""
        keep(self.variable)
        self.variable.scatter_update(tf.IndexedSlices(tf.cast(values, tf.float64)[None], [row]))

    def clear(self) -> None:
        """Begin anew."""
        self.variable.assign(self._initial)


class Rows(Matrix):
    """The rows of the taps.

    Args:
        taps: a row each.
        threshold: for the share of elements with |x| above it.
        active: variable that says whether the step under way is looked at.
    """

    def __init__(self, taps: Sequence[LayerTap], threshold: float, active: tf.Variable) -> None:
        super().__init__(empty(len(taps)))
        self._taps = taps
        self._threshold = threshold
        self._active = active
        # One function a dtype for all taps: to trace the reductions anew for each would take as
        # long as to trace the model.
        self._functions: dict[tf.DType, Any] = {}

    def add(self, index: int, x: Any) -> tf.DType | None:
        """Count a call of the tap number `index` and add the elements of `x` to its row.

        Returns:
            The dtype of `x`, where it is a tensor of floats; else only the call is counted.
        """
        keep(self.variable, self._active)
        if not (isinstance(x, tf.Tensor) and x.dtype.is_floating):
            self._function(tf.float32)(tf.zeros((0,)), index, False, 0.0, float("-inf"))
            return None
        tap = self._taps[index]
        x = tf.stop_gradient(x)
        norm: Any = 0.0
        partition: Any = float("-inf")
        read: Any = True
        if tap.limit is not None:
            read = tf.size(x, tf.int64) <= tap.limit
        if tap.heads is not None and x.shape[-1] is not None and x.shape[-1] % tap.heads.dim == 0:
            norm = self._when_active(lambda: row_norm(x, tap.heads.dim), 0.0)
        if tap.is_logits and x.shape.rank:
            partition = self._when_active(lambda: log_partition(x), float("-inf"))
        self._function(x.dtype)(tf.reshape(x, [-1]), index, read, norm, partition)
        return x.dtype

    def _when_active(self, value: Any, otherwise: float) -> tf.Tensor:
        return tf.cond(self._active, value, lambda: tf.constant(otherwise, tf.float64))

    def _function(self, dtype: tf.DType) -> Any:
        function = self._functions.get(dtype)
        if function is None:
            number = tf.TensorSpec((), tf.float64)
            signature = [
                tf.TensorSpec((None,), dtype),
                tf.TensorSpec((), tf.int32),
                tf.TensorSpec((), tf.bool),
                number,
                number,
            ]
            function = tf.function(self._add, input_signature=signature, autograph=False)
            self._functions[dtype] = function
        return function

    def _add(
        self, x: tf.Tensor, index: tf.Tensor, read: tf.Tensor, norm: tf.Tensor, part: tf.Tensor
    ) -> None:
        def add() -> tf.Operation:
            nothing = tf.constant(_CALL, tf.float64)
            row = tf.cond(read, lambda: row_of(x, self._threshold), lambda: nothing)
            row = tf.concat([row[:-2], [norm, part]], 0)
            both = merged(tf.gather(self.variable, index), row)
            self.variable.scatter_update(tf.IndexedSlices(both[None], index[None]))
            return tf.no_op()

        tf.cond(self._active, add, tf.no_op)


_CALL = empty(1)[0]
_CALL[0] = 1


class Numbers(Matrix):
    """Scalars by name: whether there is one, and its value.

    Args:
        names: of the scalars.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(np.zeros((len(names), 2)))
        self._names = list(names)

    def set(self, name: str, value: Any) -> None:
        """Keep a number, Python's or a tensor of one element.

        Raises:
            ValueError: it has more elements.
        """
        number = tf.cast(tf.convert_to_tensor(value), tf.float64)
        if number.shape.num_elements() not in (1, None):
            raise ValueError(f"{name} has {number.shape.num_elements()} elements, not one")
        self.put(
            self._names.index(name),
            tf.stack([tf.constant(1.0, tf.float64), tf.reshape(number, ())]),
        )

    def values(self, matrix: Array) -> dict[str, float]:
        """Those that were kept, of the matrix on the host."""
        kept = zip(self._names, matrix.tolist(), strict=True)
        return {name: value for name, (there, value) in kept if there}
