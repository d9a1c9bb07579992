"""How a tensor of torch is added to its row.

Floating-point tensors only: for anything else (integers, bools, complex, sparse, nested, quantised,
meta) only the call is counted.
"""

from __future__ import annotations

import functools
import logging
import threading

import numpy as np
import torch

from act_exporter.graphs import capturing
from act_exporter.rows import COLUMNS, SUMS, Array, Column, add_exactly, add_finite

_log = logging.getLogger(__name__)

# The CPU works on rows of this many elements: a float32 sum over a whole tensor loses digits with
# its length, sums of rows joined in float64 do not. `vector_norm` adds one element after another:
# with longer rows bfloat16 values, rounded the same way each time, come out 4e-6 too small.
_ROW = 1_024

# Rows that the CPU works on at once: 4 MiB of float32, so that all passes but the first read
# from a cache, no temporary is as large as the tensor, and 32 threads have a share worth waking
# for.
_ROWS = 1_024

# Fewer elements than this are summed in float64, which is as fast for so few: the float32 error of
# one row's sum of squares is up to 2e-7, which is 1e-2 of std where |mean|/std is 300, and only
# the mean over many rows brings it down.
_FEW = 65_536

# Elements between these in absolute value have squares within float32's range (1e-38 to 3e38), and
# smaller ones beside them do not count.
_BOUNDS_SAFE = (1e-15, 1e15)

# A row whose sum of squares lies between these had no square outside float32's range (1e-38 to
# 3e38) that would count; the other rows are summed in float64.
_SQUARES_SAFE = (1e-24, 1e36)

# How many of those at once, in the second-level cache as float64.
_UNUSUAL_ROWS = 64

# Rows of logits whose log-partition is averaged: what it differs by from token to token in a
# trained model, a few units, is down to a few tenths in their mean.
_LOGIT_ROWS = 64

# Smaller exceed thresholds are not compared by squares, which could vanish.
_THRESHOLD_SAFE = 1e-15

_fused_works = True

_kept = threading.local()

# The floating-point formats whose conversions are tested; packed 4-bit ones have none.
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)

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
    rows[:, SUMS].zero_()
    rows[:, Column.MIN].fill_(torch.inf)
    rows[:, Column.MAX].fill_(-torch.inf)
    rows[:, Column.ROW_NORM].zero_()
    rows[:, Column.LOG_PARTITION].fill_(-torch.inf)


def count_call(row: torch.Tensor) -> None:
    """Count that the tap's module ran, for a tensor whose elements are not counted."""
    row[Column.CALLS] += 1


def has_statistics(x: torch.Tensor) -> bool:
    """Whether the elements of `x` are counted; never raises.

    Counted: strided tensors of any shape with at least one element, of float64, float32, float16,
    bfloat16 or an 8-bit float. Views, transposed, expanded and channels-last tensors are strided;
    an expanded element counts as often as it is seen.

    Not counted, so that only the call is:

    - integers and bools: indices, masks and packed weights, where a magnitude means nothing;
    - complex numbers, which have no order and so no minimum;
    - packed 4-bit floats, which torch cannot convert;
    - sparse and MKL-DNN layouts, nested tensors and quantised ones, whose stored values are not the
      tensor's elements;
    - meta tensors, which have no values, and tensors without elements.
    """
    return (
        x.dtype in _DTYPES
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_quantized
        and not x.is_meta
        and x.numel() > 0
    )


def add(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Count a call and add the elements of `x` to `row`, in the fastest way that works there.

    Args:
        x: what `has_statistics` accepts.
        row: (COLUMNS,), from `empty_rows`, on the same device.
        exceed_threshold: for `Column.EXCEEDED`.
    """
    if x.is_cpu:
        add_on_cpu(x, row, exceed_threshold)
    elif not x.is_cuda or not _add_fused(x, row, exceed_threshold):
        add_on_device(x, row, exceed_threshold)


def _add_fused(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> bool:
    """Whether the Triton kernel could add `x` to `row`; once it fails, it isn't tried again."""
    global _fused_works
    if not _fused_works:
        return False
    try:
        from act_exporter.kernels import add_fused, is_loaded

        if capturing() and not is_loaded(x, exceed_threshold):
            return False  # this once: loading a kernel can break a capture, torch's own can't
        add_fused(x, row, exceed_threshold)
    except Exception as error:
        # No Triton, no compiler for its launcher, a GPU that it doesn't know: nothing was added.
        _fused_works = False
        _log.info("statistics are taken without Triton: %r", error)
    return _fused_works


def warm_up(device: torch.device, exceed_threshold: float) -> None:
    """Have what `add` runs on `device` compiled and loaded for the usual dtypes.

    So that it is ready for a CUDA graph, and the first step does not wait for a compiler.
    """
    if device.type != "cuda" or capturing():
        return
    row = empty_rows(1, device)[0]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        add(torch.zeros(_ROW, dtype=dtype, device=device), row, exceed_threshold)


def add_on_cpu(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Count a call and add the elements of `x` (any shape, on the CPU) to `row` (COLUMNS,).

    Branches on the values, which costs nothing on a CPU: a piece whose elements are finite and
    below the threshold, as nearly all are, takes three passes; in the others the rows are sorted
    out one by one. After a training step nothing of this is left in a cache, and each further
    call of torch or numpy costs 10 to 40 us there, hence as few of them as will do.
    """
    flat = in_memory_order(x)
    values = row.numpy()
    values[Column.CALLS] += 1
    size = flat.numel()
    if size < _FEW or exceed_threshold <= _THRESHOLD_SAFE:
        add_exactly(flat.double().numpy(), values, exceed_threshold)
        return
    if rest := size % _ROW:
        add_exactly(flat[-rest:].double().numpy(), values, exceed_threshold)
        flat = flat[:-rest]
    rows = flat.view(-1, _ROW)
    for start in range(0, rows.shape[0], _ROWS):
        _add_rows(rows[start : start + _ROWS], values, exceed_threshold)


def _add_rows(x: torch.Tensor, values: Array, threshold: float) -> None:
    """Add `x` (rows, _ROW), at most `_ROWS` of them, to `values` (COLUMNS,)."""
    wide = x if x.dtype in (torch.float32, torch.float64) else _scratch_like(x).copy_(x)
    low, high = map(float, torch.aminmax(wide))
    absmax = max(-low, high)
    # False where there is a NaN: then both bounds are one.
    if not (_BOUNDS_SAFE[0] < absmax < _BOUNDS_SAFE[1] or absmax == 0):
        _sort_out(x, wide, values, threshold)
        return
    total = _joined(wide.sum(-1))
    if absmax <= threshold:
        norms = torch.linalg.vector_norm(wide, dim=-1).numpy().astype(np.float64)
        squares, exceeded = norms.dot(norms), 0.0
    else:
        squares, exceeded = map(_joined, _squares_and_exceeded(wide, threshold))
    add_finite(values, x.numel(), total, squares, exceeded, low, high)


def _joined(sums: torch.Tensor) -> float:
    """The sum of (rows,) in float64."""
    joined: float = np.add.reduce(sums.numpy(), dtype=np.float64)
    return joined


def _sort_out(x: torch.Tensor, wide: torch.Tensor, values: Array, threshold: float) -> None:
    """Add `x` (rows, _ROW), some of whose elements are not finite or have no square in float32.

    Args:
        x: as it came.
        wide: the same as float32 or float64.
        values: (COLUMNS,).
        threshold: for `Column.EXCEEDED`.
    """
    bounds_and_total = wide.amin(-1), wide.amax(-1), wide.sum(-1)
    by_row = torch.stack([*bounds_and_total, *_squares_and_exceeded(wide, threshold)])
    joined: Array = by_row.double().numpy()
    low, high, total, squares, exceeded = joined
    # False too for a row with a NaN or an infinity, since its sum of squares is one.
    usual = (squares > _SQUARES_SAFE[0]) & (squares < _SQUARES_SAFE[1])
    usual |= (low == 0) & (high == 0)
    if not usual.all():
        unusual = torch.from_numpy(np.flatnonzero(~usual))
        for start in range(0, unusual.numel(), _UNUSUAL_ROWS):
            rows = unusual[start : start + _UNUSUAL_ROWS]
            add_exactly(x[rows].double().view(-1).numpy(), values, threshold)
    if usual.any():
        low, high, total, squares, exceeded = joined[:, usual]
        count, total, squares = low.size * _ROW, total.sum(), squares.sum()
        add_finite(values, count, total, squares, exceeded.sum(), low.min(), high.max())


def _squares_and_exceeded(
    wide: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares and number of elements above `threshold` in each row, both (rows,).

    Overwrites the scratch memory, and so `wide` (rows, _ROW) where it lies there.
    """
    scratch = _scratch_like(wide)
    squares = torch.mul(wide, wide, out=scratch).sum(-1)
    # A comparison that writes floats, and their sum: a fifth of the time of counting bools.
    limit = _square_limit(threshold, scratch.dtype)
    return squares, torch.gt(scratch, limit, out=scratch).sum(-1)


def _scratch_like(x: torch.Tensor) -> torch.Tensor:
    """This thread's own memory for one piece, in the shape of `x` (rows, _ROW), to be overwritten.

    float64 for float64, else float32. Kept, because memory fresh from the system costs more to map
    than all passes over it.
    """
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    scratch: torch.Tensor | None = getattr(_kept, "scratch", None)
    if scratch is None or scratch.dtype is not dtype:
        with torch.inference_mode(False):
            scratch = torch.empty(_ROWS, _ROW, dtype=dtype, device="cpu")
        _kept.scratch = scratch
    return scratch[: x.shape[0]]


@functools.lru_cache(maxsize=16)
def _square_limit(threshold: float, dtype: torch.dtype) -> float:
    """The square, rounded to `dtype`, that only elements above `threshold` have squares above.

    Rounded squares are in the order of their elements, and those of neighbours differ (by two units
    or one in the last place). So the largest element not above the threshold, squared, is exact.
    """
    if dtype is torch.float64:
        return threshold * threshold
    limit = np.float32(below(threshold))
    with np.errstate(over="ignore"):
        return float(limit * limit)


def below(threshold: float) -> float:
    """The largest float32 that is not above `threshold`, for comparisons of float32 elements.

    Above it are exactly the elements above `threshold`; of one rounded up one would be missing.
    """
    with np.errstate(over="ignore"):
        rounded = np.float32(threshold)
    if float(rounded) > threshold:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    return float(rounded)


def add_on_device(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    """Count a call and add the elements of `x` to `row` on their own device, never waiting for it.

    Works on the CPU too, where the tests hold it to the same references.
    """
    count_call(row)
    flat = in_memory_order(x)
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


def add_row_norm(x: torch.Tensor, row: torch.Tensor, dim: int) -> None:
    """Keep the largest L2 norm of the rows of `x`, (..., n * dim), `dim` elements each.

    What heads do with queries and keys is a product of two such rows, so no logit is beyond the
    product of their largest norms. Rows with a NaN do not count, an infinite norm does. Never waits
    for a device.
    """
    if x.shape[-1] % dim:
        return
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = x.detach().reshape(-1, dim).to(dtype)
    largest = torch.linalg.vector_norm(rows, dim=-1).nan_to_num(nan=0.0, posinf=torch.inf).amax()
    row[Column.ROW_NORM] = torch.maximum(row[Column.ROW_NORM], largest.to(row.dtype))


def note_log_partition(x: torch.Tensor, row: torch.Tensor) -> None:
    """Keep the mean log-partition, log(sum(exp(x))), of some rows of logits `x` (..., classes).

    Of rows spread over the batch, since the exponentials of a whole vocabulary cost more than all
    other statistics; never waits for a device.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    some = rows[:: max(rows.shape[0] // _LOGIT_ROWS, 1)][:_LOGIT_ROWS]
    row[Column.LOG_PARTITION] = torch.logsumexp(some.float(), dim=-1).mean()


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x`, flat (n,), in the order of memory, which mostly spares a copy."""
    if x.is_contiguous() and not x.is_neg():
        return x.detach().view(-1)
    x = x.detach().resolve_neg()  # a real view may be negated lazily: the `imag` of a conjugate
    if not x.is_contiguous():
        # Transposed and channels-last ones are whole pieces of memory too.
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1).contiguous()  # a flat one may have gaps all the same
