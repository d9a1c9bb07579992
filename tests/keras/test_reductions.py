"""The numbers of one tensor, held to numpy in float64."""

import numpy as np
import pytest
import tensorflow as tf

from act_exporter.integrations.keras.reductions import log_partition, merged, row_norm, row_of
from act_exporter.rows import COLUMNS, Column, add_exactly, empty

THRESHOLD = 2.0

ARRAYS = {
    "few": lambda rng: rng.randn(1000),
    "one": lambda rng: rng.randn(1),
    "none": lambda rng: np.zeros(0),
    "zeros": lambda rng: np.zeros(70_000),
    "many": lambda rng: rng.randn(70_001),
    "a large offset": lambda rng: rng.randn(70_001) * 0.1 + 30,
    "few with a larger one": lambda rng: rng.randn(5_000) + 3_000,
    "huge": lambda rng: rng.randn(70_001) * 1e30,
    "tiny": lambda rng: rng.randn(70_001) * 1e-30,
    "nan": lambda rng: np.where(rng.rand(70_001) < 0.01, np.nan, rng.randn(70_001)),
    "infinities": lambda rng: np.where(
        rng.rand(70_001) < 0.5, rng.randn(70_001), np.where(rng.rand(70_001) < 0.3, np.inf, -np.inf)
    ),
    "nothing finite": lambda rng: np.full(70_001, np.nan),
}


def compiled(function, jit):
    return tf.function(function, jit_compile=jit, autograph=False)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
def test_a_row_is_what_numpy_says(dtype, jit):
    function = compiled(lambda x: row_of(x, THRESHOLD), jit)
    for name, make in ARRAYS.items():
        with np.errstate(over="ignore"):
            x = tf.cast(tf.constant(make(np.random.RandomState(1))), dtype)
        expected = empty(1)[0]
        expected[Column.CALLS] = 1
        if tf.size(x):
            add_exactly(tf.cast(x, tf.float64).numpy(), expected, THRESHOLD)
        row = function(x).numpy()
        # Exact, but for the sums of many float32.
        exact = [column for column in Column if column not in (Column.SUM, Column.SUM_SQUARES)]
        np.testing.assert_array_equal(row[exact], expected[exact], err_msg=name)
        size = max(expected[Column.COUNT], 1.0)
        spread = np.sqrt(expected[Column.SUM_SQUARES] * size)  # what the sum of |x| is at most
        assert abs(row[Column.SUM] - expected[Column.SUM]) <= 1e-6 * spread, name
        np.testing.assert_allclose(
            row[Column.SUM_SQUARES], expected[Column.SUM_SQUARES], rtol=1e-6, err_msg=name
        )


def test_a_small_deviation_beside_a_large_mean_is_seen():
    x = (np.random.RandomState(0).randn(200_000) * 0.1 + 30).astype("float32")
    row = row_of(tf.constant(x), THRESHOLD).numpy()
    mean = row[Column.SUM] / row[Column.COUNT]
    std = np.sqrt(row[Column.SUM_SQUARES] / row[Column.COUNT] - mean**2)
    assert std == pytest.approx(x.astype("float64").std(), rel=2e-2)


def test_calls_of_one_step_are_merged():
    parts = [np.random.RandomState(seed).randn(100) * seed for seed in (1, 3, 2)]
    row = tf.constant(empty(1)[0])
    for part in parts:
        row = merged(row, row_of(tf.constant(part, tf.float32), THRESHOLD))
    whole = row_of(tf.constant(np.concatenate(parts), tf.float32), THRESHOLD).numpy()
    whole[Column.CALLS] = 3
    assert row.shape == (COLUMNS,)
    np.testing.assert_allclose(row.numpy(), whole, rtol=1e-12)


@pytest.mark.parametrize("jit", [False, True])
def test_the_largest_row_of_a_head(jit):
    x = np.random.RandomState(0).randn(2, 3, 4, 8).astype("float16")
    norms = np.linalg.norm(x.astype("float64"), axis=-1)
    function = compiled(lambda x: row_norm(x, 8), jit)
    assert float(function(x)) == pytest.approx(norms.max())
    x[0, 0, 0, 0] = np.nan  # such a row does not count
    assert float(function(x)) <= norms.max()
    x[0, 0, 0, 0] = np.inf
    assert float(function(x)) == np.inf
    assert float(function(np.zeros((0, 8), "float16"))) == 0


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 64, 300])
def test_the_log_partition_of_logits(jit, rows):
    x = np.repeat(np.random.RandomState(0).randn(1, 50), rows, 0).astype("float32")
    expected = np.log(np.exp(x[0].astype("float64")).sum())
    assert float(compiled(log_partition, jit)(x)) == pytest.approx(expected, rel=1e-6)


def test_no_logits_have_no_log_partition():
    assert float(log_partition(tf.zeros((0, 50)))) == -np.inf
