"""The statistics of one tensor: what one row of the matrix holds, and how a tensor is added to it.

A row is additive: micro-batches of one step, a module called three times in a forward and, later,
the rows of several devices are merged by sums, minima and maxima. Mean, std, L2 and RMS are taken
from the sums on the host, in float64, where they can be had for all taps at once.

All but the counts are over the finite elements. Floating-point tensors only: for anything else
(integers, bools, complex, sparse, nested, quantised, meta) only the call is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

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


COLUMNS = len(Column)
_SUMS = slice(Column.CALLS, Column.NEGINF + 1)

# A float32 sum over a whole tensor loses digits with its length; sums over pieces of this many
# elements, joined in float64, keep std within 1e-3 also where |mean|/std is 300 (4e-4 measured;
# 1e-2 with pieces of 131,072, in the same time).
_PIECE = 4_096

# Outside these, squares of float32 elements leave float32's range (1e38, 1e-38) or its precision.
_SQUARES_SAFE = (1e-15, 1e15)


# On a device, at most this many elements are worked on at a time: the passes below need about 20
# bytes an element for a moment, which must not be what makes a training run out of memory.
_DEVICE_PIECE = 4_194_304

# Devices on which nothing can be float64; sums are less exact there.
_WITHOUT_FLOAT64 = {"mps"}


def empty_rows(taps: int, device: torch.device) -> torch.Tensor:
    """A matrix (taps, COLUMNS) of float64 rows that no tensor was added to."""
    dtype = torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64
    # Outside inference mode, or a training step could not write to it later.
    with torch.inference_mode(False):
        rows = torch.empty(taps, COLUMNS, dtype=dtype, device=device)
        clear(rows)
    return rows


def clear(rows: torch.Tensor) -> None:
    """Make all rows empty again, in place."""
    rows[:, _SUMS].zero_()
    rows[:, Column.MIN].fill_(torch.inf)
    rows[:, Column.MAX].fill_(-torch.inf)


def count_call(row: torch.Tensor) -> None:
    """Count that the tap's module ran."""
    if row.is_cpu:
        row.numpy()[Column.CALLS] += 1  # a third of the time of a tensor's own indexing
    else:
        row[Column.CALLS] += 1


def has_statistics(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor whose elements are counted."""
    return (
        x.is_floating_point()
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_quantized
        and not x.is_meta
        and x.numel() > 0
    )


def add_on_cpu(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Add the elements of `x` (any shape, on the CPU) to `row` (COLUMNS,).

    Branches on values, which costs nothing on a CPU and spares the usual, finite tensor all
    passes but one for minimum and maximum and two for the sums.
    """
    x = _flat(x)
    values = row.numpy()
    low, high = (float(bound) for bound in torch.aminmax(x))
    if not (np.isfinite(low) and np.isfinite(high)):
        values[Column.NAN] += int(torch.isnan(x).sum())
        values[Column.POSINF] += int((x == torch.inf).sum())
        values[Column.NEGINF] += int((x == -torch.inf).sum())
        x = x[torch.isfinite(x)]
        if x.numel() == 0:
            return
        low, high = (float(bound) for bound in torch.aminmax(x))
    absmax = max(abs(low), abs(high))
    total, squares = _sums(x, absmax)
    values[Column.COUNT] += x.numel()
    values[Column.SUM] += total
    values[Column.SUM_SQUARES] += squares
    if absmax > exceed_threshold:
        values[Column.EXCEEDED] += int((x.abs() > exceed_threshold).sum())
    values[Column.MIN] = min(values[Column.MIN], low)
    values[Column.MAX] = max(values[Column.MAX], high)


def add_on_device(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Add the elements of `x` to `row` on their own device, never waiting for a value.

    Works on the CPU too, where the tests hold it to the same references.
    """
    flat = _flat(x)
    for start in range(0, flat.numel(), _DEVICE_PIECE):
        piece = flat[start : start + _DEVICE_PIECE]
        piece = piece if piece.dtype is torch.float64 else piece.float()
        finite = torch.isfinite(piece)
        kept = torch.where(finite, piece, 0).to(row.dtype)
        sums = torch.stack(
            [
                finite.sum(),
                kept.sum(),
                kept.square().sum(),
                (kept.abs() > exceed_threshold).sum(),
                torch.isnan(piece).sum(),
                (piece == torch.inf).sum(),
                (piece == -torch.inf).sum(),
            ]
        )
        row[Column.COUNT : Column.NEGINF + 1] += sums
        low = torch.where(finite, piece, torch.inf).amin()
        high = torch.where(finite, piece, -torch.inf).amax()
        row[Column.MIN] = torch.minimum(row[Column.MIN], low)
        row[Column.MAX] = torch.maximum(row[Column.MAX], high)


def _flat(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1)
    # 8-bit floats have conversions but hardly any arithmetic.
    return x if x.element_size() > 1 else x.float()


def _sums(x: torch.Tensor, absmax: float) -> tuple[float, float]:
    """Sum and sum of squares of finite, flat `x`."""
    safe = absmax == 0 or _SQUARES_SAFE[0] < absmax < _SQUARES_SAFE[1]
    dtype = torch.float32 if safe and x.dtype is not torch.float64 else torch.float64
    whole = x.numel() - x.numel() % _PIECE
    total = squares = 0.0
    for piece in (x[:whole].view(-1, _PIECE), x[whole:].view(1, -1)):
        if piece.numel():
            norms = torch.linalg.vector_norm(piece, dim=-1, dtype=dtype).double()
            total += float(piece.sum(-1, dtype=dtype).double().sum())
            squares += float(norms.square().sum())
    return total, squares


def merge(rows: list[Array]) -> Array:
    """One matrix from the matrices of several devices."""
    merged = rows[0].copy()
    for other in rows[1:]:
        merged[:, _SUMS] += other[:, _SUMS]
        np.minimum(merged[:, Column.MIN], other[:, Column.MIN], out=merged[:, Column.MIN])
        np.maximum(merged[:, Column.MAX], other[:, Column.MAX], out=merged[:, Column.MAX])
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
