"""What people write by hand, for comparison: each judges the absmax of every tap at every step.

All take (steps, taps), NaN or Inf where the tensor had any, and return (steps, taps) of verdicts.
They see every sampled step, which no scrape does. A NaN is never above a limit; where a detector
keeps a history, what is not finite is kept out of it, or it would be blind from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Detector = Callable[[np.ndarray], np.ndarray]

_FIRST = 100
_WINDOW = 128
_SHARE = 0.01  # of a new value in the average: a memory of about 100 steps


def above(limit: float) -> Detector:
    """A fixed threshold."""
    return lambda values: _greater(values, limit)


def ten_averages(values: np.ndarray) -> np.ndarray:
    """10 times an exponential average, which every finite value enters."""
    verdicts = np.zeros(values.shape, dtype=bool)
    average = np.array(values[0], dtype=float)
    for step, row in enumerate(values[1:], 1):
        verdicts[step] = _greater(row, 10 * average)
        average = np.where(np.isfinite(row), average + _SHARE * (row - average), average)
        average = np.where(np.isfinite(average), average, row)
    return verdicts


def six_sigma(values: np.ndarray) -> np.ndarray:
    """6 deviations above the mean of the 128 values before, spikes among them."""
    verdicts = np.zeros(values.shape, dtype=bool)
    known = np.isfinite(values)
    finite = np.where(known, values, 0).astype(float)
    for step in range(_WINDOW, len(values)):
        window, held = finite[step - _WINDOW : step], known[step - _WINDOW : step]
        count = np.maximum(held.sum(axis=0), 1)
        mean = window.sum(axis=0) / count
        deviation = np.sqrt((np.where(held, window - mean, 0) ** 2).sum(axis=0) / count)
        verdicts[step] = held.any(axis=0) & _greater(values[step], mean + 6 * deviation)
    return verdicts


def ten_times_first(values: np.ndarray) -> np.ndarray:
    """10 times the largest of the first 100 steps."""
    first = np.max(values[:_FIRST], axis=0, where=np.isfinite(values[:_FIRST]), initial=0)
    verdicts = _greater(values, 10 * first)
    verdicts[:_FIRST] = False
    return verdicts


DETECTORS: dict[str, Detector] = {
    "fixed threshold of 100": above(100),
    "fixed threshold of 1,000": above(1000),
    "10x exponential average": ten_averages,
    "6 sigma over 128 steps": six_sigma,
    "10x maximum of the first 100 steps": ten_times_first,
}


def _greater(values: np.ndarray, limit: np.ndarray | float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return values > limit
