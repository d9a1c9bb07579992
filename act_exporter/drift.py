"""Slow growth: a layer that gains 1 or 2 % a step takes its own window along and breaks no rule.

Its growth a step is the distance between the medians of two halves of the last steps, in
logarithms: a spike in one of them moves neither.
"""

from __future__ import annotations

import numpy as np

from act_exporter.rows import Array
from act_exporter.window import Mask

# Sampled steps that are looked at. 1 % a step makes a factor of 1.6 between the halves' medians,
# well above the 10 to 20 % by which absmax wanders in health; longer would find it later.
_STEPS = 100

# Computed this often: two medians of all taps cost more than all else that is done in a step.
_EVERY = 10


class Drift:
    """Growth a sampled step of each tap, over the last 100.

    Args:
        taps: how many series.
    """

    def __init__(self, taps: int) -> None:
        self.growth = np.full(taps, np.nan)
        """(taps,) relative growth of absmax a sampled step; NaN where there are too few steps."""
        self._logs = np.full((_STEPS, taps), np.nan)
        self._count = 0

    def add(self, absmax: Array, accepted: Mask) -> None:
        """Take in a sampled step; values that are not accepted, or 0, leave a gap."""
        with np.errstate(divide="ignore"):
            logs = np.log(np.where(accepted, absmax, np.nan))
        self._logs[self._count % _STEPS] = np.where(np.isfinite(logs), logs, np.nan)
        self._count += 1
        if self._count >= _STEPS and self._count % _EVERY == 0:
            self._judge()

    def clear(self) -> None:
        """Forget the steps: those of another state of the model are no drift."""
        self._logs[:] = np.nan
        self._count = 0
        self.growth = np.full(len(self.growth), np.nan)

    def _judge(self) -> None:
        ordered = np.roll(self._logs, -(self._count % _STEPS), axis=0)
        half = _STEPS // 2
        # A gap in most of a half leaves too little to take a median of.
        enough = (np.isfinite(ordered[:half]).sum(0) > half // 2) & (
            np.isfinite(ordered[half:]).sum(0) > half // 2
        )
        growth = np.full(len(self.growth), np.nan)
        if enough.any():
            kept = ordered[:, enough]
            distance = np.nanmedian(kept[half:], axis=0) - np.nanmedian(kept[:half], axis=0)
            growth[enough] = np.expm1(distance / half)
        self.growth = growth
