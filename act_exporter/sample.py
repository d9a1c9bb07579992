"""What a trainer hands over for one sampled step, on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from act_exporter.rows import NONFINITE_KINDS, Array, Column

_NONFINITE = list(NONFINITE_KINDS.values())


@dataclass(slots=True)
class Sample:
    """What one sampled step left behind.

    Attributes:
        step: the step.
        time: when it ended, Unix seconds.
        rows: (taps, COLUMNS), on the host.
        values: the numbers that the trainer recorded since the last sample, by name.
        depth: (taps,) position in the order in which the taps first ran; NaN for those that didn't.
        largest: (taps,) largest finite number of the tensor's dtype; likewise.
        holder: (taps,) the rank that has the absmax, or elements that are not finite; NaN for
            tensors without elements. None unless ranks were joined.
        lost: whether it did not reach the host, or its step was undone; nothing is in it then.
    """

    step: int
    time: float
    rows: Array
    values: dict[str, float]
    depth: Array
    largest: Array
    holder: Array | None = None
    lost: bool = False

    @property
    def called(self) -> npt.NDArray[np.bool_]:
        """(taps,) which of them ran."""
        called: npt.NDArray[np.bool_] = self.rows[:, Column.CALLS] > 0
        return called

    @property
    def nonfinite(self) -> Array:
        """(kinds, taps) elements that were not finite, in the order of `NONFINITE_KINDS`."""
        return self.rows[:, _NONFINITE].T


@dataclass(frozen=True, slots=True)
class Norms:
    """The gradients of one step, as autograd left them.

    Attributes:
        step: the step.
        total: Euclidean norm over all parameters of the model that have a gradient.
        layers: the same of each watched layer, over the parameters in it.
        scale: the loss scale that is still in them; None where no scaler is known.
    """

    step: int
    total: float
    layers: dict[str, float]
    scale: float | None = None

    def over(self, scale: float | None) -> Norms | None:
        """The norms without their scale, else `scale`; None of a step that the scaler skips.

        A scaler skips a step with an infinite gradient and tries a smaller scale: that is how it
        works, no anomaly. (A fused optimizer's step is called all the same.)
        """
        scale = self.scale if self.scale is not None else scale
        if scale is None or scale == 1:
            return self
        if not (math.isfinite(self.total) and math.isfinite(scale) and scale > 0):
            return None
        layers = {layer: norm / scale for layer, norm in self.layers.items()}
        return Norms(self.step, self.total / scale, layers, scale)

    def values(self, *, told: bool) -> dict[str, float]:
        """What the page shows of them by name, without the total where the trainer has told it."""
        scale = {} if self.scale is None else {"loss_scale": self.scale}
        return scale if told else {**scale, "grad_norm": self.total}


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did to the weights; a part is missing where nothing is known.

    Attributes:
        step: the step.
        values: "update_ratio", RMS of the update over that of the weights; "update_rms", RMS of
            the update over the learning rate, of parameters whose rate is known and above 0;
            "update_unchanged_ratio", of the elements with a gradient other than 0 the share that
            the step left bitwise as it was, 0 to 1, of parameters whose rate is not 0.
        ratios: watched layer to the first of these, over its own matrices.
        unchanged: watched layer to the last of these.
    """

    step: int
    values: dict[str, float]
    ratios: dict[str, float]
    unchanged: dict[str, float]
