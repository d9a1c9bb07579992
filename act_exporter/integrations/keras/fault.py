"""A fault on purpose: the output of a layer times a variable, which is 1 until it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from act_exporter.integrations.keras.matrix import keep


class LayerFault:
    """The multiplier of one layer; it is in the graphs that are made while it is there.

    Args:
        on_remove: called when it is to be removed.

    Attributes:
        found: whether the last output that was traced, or that ran in eager mode, had a tensor of
            floats; None before the first.
    """

    def __init__(self, on_remove: Callable[[], None]) -> None:
        self.found: bool | None = None
        self._on_remove = on_remove
        with tf.init_scope():
            self._factor = tf.Variable(1.0, trainable=False, dtype=tf.float32)

    def set(self, factor: float) -> None:
        """Multiply by `factor` from the next output on."""
        self._factor.assign(factor)

    def remove(self) -> None:
        """Leave nothing of it in the model; a graph of the user's own goes on with 1."""
        self.set(1.0)
        self._on_remove()

    def multiplied(self, outputs: Any) -> Any:
        """`outputs` with its first tensor of floats multiplied, in its own dtype."""
        leaves = tf.nest.flatten(outputs)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
                keep(self._factor)
                # In float16 a factor of 1e6 would be infinite, and infinity times 0 NaN.
                wide = leaf if leaf.dtype == tf.float64 else tf.cast(leaf, tf.float32)
                leaves[index] = tf.cast(wide * tf.cast(self._factor, wide.dtype), leaf.dtype)
                self.found = True
                return tf.nest.pack_sequence_as(outputs, leaves)
        self.found = False
        return outputs
