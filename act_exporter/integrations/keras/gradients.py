"""The gradients' norms, taken where an optimizer has unscaled them and not yet clipped them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from act_exporter.integrations.keras.layers import LayerTap
from act_exporter.integrations.keras.matrix import Matrix, keep
from act_exporter.rows import Array
from act_exporter.sample import Norms

# In place of a sum of squares: there was no gradient.
_NONE = -1.0


class Gradients:
    """Sums of squares of one model's gradients, a row a variable.

    Args:
        model: whose variables are meant; others that an optimizer steps count in the total.
        taps: whose layers have a norm of their own, where there are variables in them.
        active: variable that says whether the step under way is looked at.

    Attributes:
        squares: (variables + 1, 1) the last one of all others.
        layers: watched layer to the rows of its variables.
    """

    def __init__(self, model: keras.Model, taps: Sequence[LayerTap], active: tf.Variable) -> None:
        self._places = {id(variable): place for place, variable in enumerate(model.variables)}
        self._active = active
        self.layers: dict[str, list[int]] = {}
        for tap in taps:
            own = {self._places[id(own)] for own in _weights(tap.watched)}
            if own:
                self.layers[tap.layer] = sorted(own)
        self.squares = Matrix(np.full((len(self._places) + 1, 1), _NONE))

    def see(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Have the norms of these taken in the graph that is being made, or now."""
        keep(self.squares.variable, self._active)
        places: dict[int, list[tuple[Any, Any]]] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                place = self._places.get(id(variable), len(self._places))
                places.setdefault(place, []).append((gradient, variable))

        def write() -> tf.Operation:
            sums = [tf.add_n([_squares(*pair) for pair in pairs]) for pairs in places.values()]
            update = tf.IndexedSlices(tf.stack(sums)[:, None], list(places))
            self.squares.variable.scatter_update(update)
            return tf.no_op()

        if places:
            tf.cond(self._active, write, tf.no_op)

    def norms(self, step: int, squares: Array) -> Norms | None:
        """Those of a step, of the squares on the host; None where there was no gradient."""
        known = squares[:, 0] != _NONE
        if not known.any():
            return None
        sums = np.where(known, squares[:, 0], 0.0)
        layers = {
            layer: math.sqrt(sums[own].sum())
            for layer, own in self.layers.items()
            if known[own].any()
        }
        return Norms(step, math.sqrt(sums.sum()), layers)


def _weights(layer: keras.Layer) -> Iterator[Any]:
    """All that can be trained, be it frozen now: it may be unfrozen later."""
    for part in layer._flatten_layers():
        yield from part._trainable_variables


def _squares(gradient: Any, variable: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        # A row that was looked up several times stands there as often.
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, variable.shape[0]
        )
    wide = gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)
    return tf.cast(tf.reduce_sum(tf.square(wide)), tf.float64)
