"""Mean and deviation of the last values that broke no rule, for all taps at once.

A window that takes spikes in goes blind: after one spike of 5,000 a spike of ten times the level
scored 0.36 sigma. So rule-breakers stay out; only when a whole window's worth of them came in a
row are they accepted as a new level.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.rows import Array

Mask = npt.NDArray[np.bool_]

# A constant series has a deviation of 0, and then any change is infinitely many sigmas: the
# deviation is at least this share of the mean, and something for a mean of 0.
_STD_SHARE_OF_MEAN = 0.01
_STD_TINY = 1e-12

# Below this share of the mean square about the origin, half of float64's 16 digits are gone.
_LEAST_VARIANCE_SHARE = 1e-8


class Window:
    """The last `size` values of each tap.

    Args:
        taps: how many series.
        size: values kept a tap.
        minimum: values before there is a mean or deviation.
    """

    def __init__(self, taps: int, size: int, minimum: int) -> None:
        self._size = size
        self._minimum = minimum
        self._values = np.zeros((size, taps))
        self._count = np.zeros(taps, dtype=np.int64)
        self._next = np.zeros(taps, dtype=np.int64)
        self._rejected = np.zeros((size, taps))
        self._rejected_count = np.zeros(taps, dtype=np.int64)
        # Sums of distances from a value inside the window: steady, and no digits cancel.
        self._origin = np.zeros(taps)
        self._sum = np.zeros(taps)
        self._squares = np.zeros(taps)

    def add(self, values: Array, accepted: Mask, rejected: Mask) -> None:
        """Take in one finite value for each tap in `accepted`, and set aside those `rejected`."""
        taps = np.flatnonzero(accepted)
        if taps.size:
            self._accept(taps, values[taps])
        taps = np.flatnonzero(rejected)
        if taps.size:
            self._reject(taps, values[taps])

    def mean(self) -> Array:
        """(taps,), NaN where there are too few values."""
        return np.where(self._ready(), self._origin + self._offset(), np.nan)

    def std(self) -> Array:
        """(taps,), at least 1 % of the mean and above 0; NaN where there are too few values."""
        count = np.maximum(self._count, 1)
        variance = np.maximum(self._squares / count - self._offset() ** 2, 0)
        floor = np.abs(self.mean()) * _STD_SHARE_OF_MEAN + _STD_TINY
        return np.where(self._ready(), np.maximum(np.sqrt(variance), floor), np.nan)

    def state(self) -> dict[str, Any]:
        """Values and counts; the sums follow from them."""
        return {
            "values": self._values.copy(),
            "count": self._count.copy(),
            "next": self._next.copy(),
        }

    def restore(self, state: dict[str, Any], own: npt.NDArray[np.int64], saved: list[int]) -> None:
        """Take over columns `saved` of a state as this window's taps `own`; the rest restart.

        The state may be of a window of another size; as many of its newest values are kept.
        """
        self.clear()
        ring = state["values"]
        for tap, column in zip(own, saved, strict=True):
            count, following = int(state["count"][column]), int(state["next"][column])
            # Oldest first: a ring that is not full begins at its start.
            start = following if count == len(ring) else 0
            kept = np.roll(ring[:, column], -start)[:count][-self._size :]
            self._values[: len(kept), tap] = kept
            self._count[tap] = len(kept)
            self._next[tap] = len(kept) % self._size
        self._recompute(own)

    def clear(self) -> None:
        """Forget everything."""
        self._count[:] = 0
        self._next[:] = 0
        self._rejected_count[:] = 0
        self._sum[:] = 0
        self._squares[:] = 0

    def _ready(self) -> Mask:
        ready: Mask = self._count >= self._minimum
        return ready

    def _offset(self) -> Array:
        return self._sum / np.maximum(self._count, 1)

    def _accept(self, taps: npt.NDArray[np.int64], values: Array) -> None:
        self._rejected_count[taps] = 0
        first = taps[self._count[taps] == 0]
        self._origin[first] = values[np.isin(taps, first)]
        row = self._next[taps]
        full = self._count[taps] == self._size
        origin = self._origin[taps]
        new = values - origin
        old = np.where(full, self._values[row, taps] - origin, 0)
        self._sum[taps] += new - old
        self._squares[taps] += new**2 - old**2
        self._values[row, taps] = values
        self._count[taps] = np.minimum(self._count[taps] + 1, self._size)
        self._next[taps] = (row + 1) % self._size
        # Rounding of the running sums must not add up over ten million steps; and where the values
        # have moved far from the origin, the deviation would be lost in it.
        mean_square = self._squares[taps] / self._count[taps]
        variance = mean_square - self._offset()[taps] ** 2
        stale = (self._next[taps] == 0) | (variance < mean_square * _LEAST_VARIANCE_SHARE)
        self._recompute(taps[stale])

    def _reject(self, taps: npt.NDArray[np.int64], values: Array) -> None:
        self._rejected[self._rejected_count[taps], taps] = values
        self._rejected_count[taps] += 1
        level = taps[self._rejected_count[taps] == self._size]
        if level.size:
            self._values[:, level] = self._rejected[:, level]
            self._count[level] = self._size
            self._next[level] = 0
            self._rejected_count[level] = 0
            self._recompute(level)

    def _recompute(self, taps: npt.NDArray[np.int64]) -> None:
        if not taps.size:
            return
        held = np.arange(self._size)[:, np.newaxis] < self._count[taps]
        values = np.where(held, self._values[:, taps], 0)
        self._origin[taps] = values.sum(axis=0) / np.maximum(self._count[taps], 1)
        offsets = np.where(held, values - self._origin[taps], 0)
        self._sum[taps] = offsets.sum(axis=0)
        self._squares[taps] = (offsets**2).sum(axis=0)
