"""The steps of a Keras optimizer, changed by remedies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from alerting.recovery.remedies import ClipGradients, LowerLearningRate, Remedy


class KerasSteps:
    """See `alerting.recovery.treatment.Steps`.

    What a traced step does is settled when it is traced, so what may have to be changed later is
    put in beforehand, as variables that change nothing so far; without such a remedy, nothing is.

    Args:
        optimizer: in place of one with a loss scale, the one inside.
        remedies: that may come.
    """

    def __init__(self, optimizer: Any, remedies: Sequence[Remedy]) -> None:
        kinds = {type(remedy) for remedy in remedies}
        lowers, clips = LowerLearningRate in kinds, ClipGradients in kinds
        self._rate_factor = tf.Variable(1.0, trainable=False) if lowers else None
        self._max_norm = tf.Variable(math.inf, trainable=False) if clips else None
        self._update: Callable[..., Any] = optimizer._backend_update_step
        if self.in_use:
            optimizer._backend_update_step = self._changed

    @property
    def in_use(self) -> bool:
        """Whether what was traced before this was made knows nothing of it."""
        return self._rate_factor is not None or self._max_norm is not None

    def change(self, *, rate_factor: float, max_norm: float) -> None:
        """See `alerting.recovery.treatment.Steps`."""
        if self._rate_factor is not None:
            self._rate_factor.assign(rate_factor)
        if self._max_norm is not None:
            self._max_norm.assign(max_norm)

    def _changed(self, gradients: Sequence[Any], variables: Any, rate: Any) -> Any:
        if self._max_norm is not None:
            gradients = _clipped(gradients, self._max_norm)
        if self._rate_factor is not None:
            rate = tf.convert_to_tensor(rate)
            rate = rate * tf.cast(self._rate_factor, rate.dtype)
        return self._update(gradients, variables, rate)


def _clipped(gradients: Sequence[Any], max_norm: Any) -> list[Any]:
    norm = tf.linalg.global_norm([tf.cast(g, tf.float32) for g in map(_dense, gradients)])
    # By exactly 1 below the limit: a comparison, since with an infinite one a quotient is NaN.
    factor = tf.where(norm > max_norm, max_norm / norm, 1.0)
    return [_scaled(gradient, factor) for gradient in gradients]


def _dense(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient: Any, factor: Any) -> Any:
    scaled = _dense(gradient) * tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
    return scaled
