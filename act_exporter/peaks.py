"""Maxima that are held for a time, so that no scrape misses what happened between two of them."""

from __future__ import annotations

import math

import numpy as np

from act_exporter.rows import Array


class HeldMaximum:
    """The largest value of each series in the last `seconds`, and at least the newest one.

    Kept in time buckets, so that holding costs the same at 1 and at 1,000 steps a second; a value
    is held for `seconds` and up to a bucket (a 24th) longer.
    """

    _BUCKETS = 24

    def __init__(self, shape: tuple[int, ...], seconds: float) -> None:
        self._bucket_seconds = seconds / self._BUCKETS
        self._buckets: list[tuple[int, Array]] = []  # (number, maxima), oldest first
        self._older = np.full(shape, np.nan)  # maximum of all but the newest bucket
        self._shape = shape

    def add(self, values: Array, now: float) -> Array:
        """Take in values of `now` (seconds) and return the held maxima; NaN counts as nothing."""
        number = math.floor(now / self._bucket_seconds)
        if not self._buckets or self._buckets[-1][0] != number:
            oldest = number - self._BUCKETS
            self._buckets = [bucket for bucket in self._buckets if bucket[0] >= oldest]
            self._older = np.full(self._shape, np.nan)
            for _, maxima in self._buckets:
                np.fmax(self._older, maxima, out=self._older)
            self._buckets.append((number, np.full(self._shape, np.nan)))
        newest = self._buckets[-1][1]
        np.fmax(newest, values, out=newest)
        held: Array = np.fmax(self._older, newest)
        return held

    def clear(self) -> None:
        """Forget all values."""
        self._buckets = []
