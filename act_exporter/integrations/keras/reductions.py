"""The numbers of one tensor as TensorFlow's operators, for graphs with and without XLA.

As in `act_exporter.statistics`: all but the counts are over the finite elements, and sums are made
in float64, of float32 sums of short rows where there are many elements.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from act_exporter.rows import COLUMNS, SUMS, Column

# Elements of a row that is summed in float32; sums of rows are joined in float64.
_ROW = 1_024

# Fewer elements than this are summed in float64, which is as fast for so few and exact where the
# mean is large beside the deviation.
_FEW = 65_536

# Elements between these in absolute value have squares within float32's range (1e-38 to 3e38), and
# smaller ones beside them do not count.
_BOUNDS_SAFE = (1e-15, 1e15)

# Rows of logits whose log-partition is averaged: what it differs by from token to token in a
# trained model, a few units, is down to a few tenths in their mean.
_LOGIT_ROWS = 64

_WIDE = (tf.float32, tf.float64)


def row_of(x: tf.Tensor, threshold: float) -> tf.Tensor:
    """The row (COLUMNS,) of one call, float64, from floats `x` (n,); n may be 0."""
    wide = x if x.dtype in _WIDE else tf.cast(x, tf.float32)
    finite = tf.reduce_all(tf.math.is_finite(wide))
    return tf.cond(
        finite, lambda: _finite_row(wide, threshold), lambda: _exact_row(wide, threshold)
    )


def _finite_row(x: tf.Tensor, threshold: float) -> tf.Tensor:
    low, high = tf.reduce_min(x), tf.reduce_max(x)
    absmax = tf.maximum(-low, high)
    usual = tf.logical_and(absmax > _BOUNDS_SAFE[0], absmax < _BOUNDS_SAFE[1])
    usual = tf.logical_and(tf.logical_or(usual, tf.equal(absmax, 0)), tf.size(x) >= _FEW)
    total, squares = tf.cond(usual, lambda: _sums_by_row(x), lambda: _sums(tf.cast(x, tf.float64)))
    exceeded = tf.cond(
        tf.cast(absmax, tf.float64) > threshold,
        lambda: _count(tf.abs(tf.cast(x, tf.float64)) > threshold),
        lambda: tf.zeros((), tf.float64),
    )
    return _row(
        {
            Column.COUNT: tf.size(x, tf.int64),
            Column.SUM: total,
            Column.SUM_SQUARES: squares,
            Column.EXCEEDED: exceeded,
            Column.MIN: low,
            Column.MAX: high,
        }
    )


def _exact_row(x: tf.Tensor, threshold: float) -> tf.Tensor:
    """The same of elements of which some are not finite."""
    finite = tf.math.is_finite(x)
    wide = tf.cast(x, tf.float64)
    kept = tf.where(finite, wide, tf.zeros_like(wide))
    total, squares = _sums(kept)
    infinity = tf.constant(float("inf"), tf.float64)
    return _row(
        {
            Column.COUNT: _count(finite),
            Column.SUM: total,
            Column.SUM_SQUARES: squares,
            Column.EXCEEDED: _count(tf.abs(kept) > threshold),
            Column.NAN: _count(tf.math.is_nan(x)),
            Column.POSINF: _count(tf.equal(wide, infinity)),
            Column.NEGINF: _count(tf.equal(wide, -infinity)),
            Column.MIN: tf.reduce_min(tf.where(finite, wide, infinity)),
            Column.MAX: tf.reduce_max(tf.where(finite, wide, -infinity)),
        }
    )


def _sums(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.reduce_sum(x), tf.reduce_sum(tf.square(x))


def _sums_by_row(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    whole = tf.size(x) // _ROW * _ROW
    rows = tf.reshape(x[:whole], (-1, _ROW))
    total, squares = _sums(tf.cast(x[whole:], tf.float64))
    return (
        total + tf.reduce_sum(tf.cast(tf.reduce_sum(rows, -1), tf.float64)),
        squares + tf.reduce_sum(tf.cast(tf.reduce_sum(tf.square(rows), -1), tf.float64)),
    )


def _count(mask: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(mask, tf.float64))


def _row(values: dict[Column, Any]) -> tf.Tensor:
    unknown = {
        Column.CALLS: 1.0,
        Column.MIN: float("inf"),
        Column.MAX: float("-inf"),
        Column.LOG_PARTITION: float("-inf"),
    }
    known = {**unknown, **values}
    return tf.stack([tf.cast(known.get(column, 0.0), tf.float64) for column in Column])


def row_norm(x: tf.Tensor, dim: int) -> tf.Tensor:
    """The largest L2 norm of the rows of `x`, (..., n * dim), `dim` elements each, float64.

    Rows with a NaN do not count, an infinite norm does.
    """
    rows = tf.cast(tf.reshape(x, (-1, dim)), tf.float64)
    norms = tf.sqrt(tf.reduce_sum(tf.square(rows), -1))
    counted = tf.where(tf.math.is_nan(norms), tf.zeros_like(norms), norms)
    return tf.maximum(tf.reduce_max(counted), 0.0)  # of no rows it is -inf


def log_partition(x: tf.Tensor) -> tf.Tensor:
    """The mean log-partition, log(sum(exp(x))), of some rows of logits `x` (..., classes).

    Of rows spread over the batch, since the exponentials of a whole vocabulary cost more than all
    other statistics.
    """
    rows = tf.reshape(x, (-1, x.shape[-1]))
    size = tf.shape(rows)[0]
    count = tf.minimum(size, _LOGIT_ROWS)
    some = tf.gather(rows, tf.range(count) * size // tf.maximum(count, 1))
    means = tf.reduce_mean(tf.reduce_logsumexp(tf.cast(some, tf.float32), -1))
    return tf.cast(tf.where(count > 0, means, float("-inf")), tf.float64)


def merged(before: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """One row of two, (COLUMNS,) each; the log-partition is that of the last call that has one."""
    sums = before[SUMS] + added[SUMS]
    low = tf.minimum(before[Column.MIN], added[Column.MIN])
    high = tf.maximum(
        before[Column.MAX : Column.LOG_PARTITION], added[Column.MAX : Column.LOG_PARTITION]
    )
    partition = tf.where(
        tf.equal(added[Column.LOG_PARTITION], float("-inf")),
        before[Column.LOG_PARTITION],
        added[Column.LOG_PARTITION],
    )
    row = tf.concat([sums, low[None], high, partition[None]], 0)
    return tf.ensure_shape(row, (COLUMNS,))
