"""What one row of the matrix holds, and the statistics that are made of it.

A row is additive: micro-batches of one step, a module called three times in a forward and the rows
of several devices or ranks are merged by sums, minima and maxima. Mean, std, L2 and RMS are taken
from the sums on the host, in float64, where they can be had for all taps at once.

All but the counts are over the finite elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Column(IntEnum):
    """The columns of a row."""

    CALLS = 0
    COUNT = 1  # finite elements
    SUM = 2
    SUM_SQUARES = 3
    EXCEEDED = 4  # finite elements with |x| above the exceed threshold
    NAN = 5
    POSINF = 6
    NEGINF = 7
    MIN = 8
    MAX = 9
    ROW_NORM = 10  # largest L2 norm of a head's row, of taps that have heads
    LOG_PARTITION = 11  # of logits, at the last call; -inf where there is none


COLUMNS = len(Column)
NONFINITE_KINDS = {"nan": Column.NAN, "posinf": Column.POSINF, "neginf": Column.NEGINF}
SUMS = slice(Column.CALLS, Column.NEGINF + 1)
"""The columns that are added up, over calls, devices and ranks; the rest are extremes."""


def empty(taps: int) -> Array:
    """A matrix (taps, COLUMNS) of rows that no tensor was added to."""
    rows = np.zeros((taps, COLUMNS))
    rows[:, Column.MIN] = np.inf
    rows[:, Column.MAX] = -np.inf
    rows[:, Column.LOG_PARTITION] = -np.inf
    return rows


def add_exactly(x: Array, values: Array, threshold: float) -> None:
    """Add float64 elements `x` (n,), whatever they are, to `values` (COLUMNS,)."""
    finite = np.isfinite(x)
    if not finite.all():
        values[Column.NAN] += np.count_nonzero(np.isnan(x))
        values[Column.POSINF] += np.count_nonzero(x == np.inf)
        values[Column.NEGINF] += np.count_nonzero(x == -np.inf)
        x = x[finite]
        if not x.size:
            return
    with np.errstate(over="ignore", under="ignore"):  # beyond float64 the sums are infinite
        total, squares = x.sum(), np.square(x).sum()
        exceeded = float(np.count_nonzero(np.abs(x) > threshold))
        add_finite(values, x.size, total, squares, exceeded, x.min(), x.max())


def add_finite(
    values: Array,
    count: int,
    total: float,
    squares: float,
    exceeded: float,
    low: float,
    high: float,
) -> None:
    """Add finite elements to `values` (COLUMNS,), one by one: a tuple costs four times as much."""
    values[Column.COUNT] += count
    values[Column.SUM] += total
    values[Column.SUM_SQUARES] += squares
    values[Column.EXCEEDED] += exceeded
    if low < values[Column.MIN]:
        values[Column.MIN] = low
    if high > values[Column.MAX]:
        values[Column.MAX] = high


def merge(rows: list[Array]) -> Array:
    """One matrix from the matrices of several devices."""
    merged = rows[0].copy()
    for other in rows[1:]:
        merged[:, SUMS] += other[:, SUMS]
        np.minimum(merged[:, Column.MIN], other[:, Column.MIN], out=merged[:, Column.MIN])
        for column in (Column.MAX, Column.ROW_NORM, Column.LOG_PARTITION):
            np.maximum(merged[:, column], other[:, column], out=merged[:, column])
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of all taps, each an array (taps,) of float64; NaN where undefined.

    Attributes:
        absmax: largest absolute value.
        min: smallest value.
        max: largest value.
        mean: arithmetic mean.
        std: population standard deviation.
        l2norm: Euclidean norm.
        rms: root of the mean square.
        exceed_ratio: share of elements with |x| above the exceed threshold, 0 to 1.
    """

    absmax: Array
    min: Array
    max: Array
    mean: Array
    std: Array
    l2norm: Array
    rms: Array
    exceed_ratio: Array

    @classmethod
    def of(cls, rows: Array) -> Statistics:
        """The statistics in a host matrix (taps, COLUMNS); infinite where float64 ends."""
        count = np.where(rows[:, Column.COUNT] > 0, rows[:, Column.COUNT], np.nan)
        defined = ~np.isnan(count)
        mean = rows[:, Column.SUM] / count
        mean_square = rows[:, Column.SUM_SQUARES] / count
        with np.errstate(over="ignore", invalid="ignore"):
            std = np.sqrt(np.maximum(mean_square - mean**2, 0))
        low = np.where(defined, rows[:, Column.MIN], np.nan)
        high = np.where(defined, rows[:, Column.MAX], np.nan)
        return cls(
            absmax=np.maximum(np.abs(low), np.abs(high)),
            min=low,
            max=high,
            mean=mean,
            std=std,
            l2norm=np.sqrt(mean_square * count),
            rms=np.sqrt(mean_square),
            exceed_ratio=rows[:, Column.EXCEEDED] / count,
        )
