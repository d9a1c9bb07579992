"""One tensor's statistics, held to float64 references on the CPU's path and the device's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from act_exporter.statistics import (
    Column,
    Statistics,
    add_on_cpu,
    add_on_device,
    empty_rows,
    has_statistics,
    merge,
)

Add = Callable[[torch.Tensor, torch.Tensor, float], None]

both = pytest.mark.parametrize("add", [add_on_cpu, add_on_device])


def row_of(add: Add, *tensors: torch.Tensor, threshold: float = 3.0) -> np.ndarray:
    rows = empty_rows(1, torch.device("cpu"))
    for tensor in tensors:
        add(tensor, rows[0], threshold)
    return rows.numpy()


def assert_right(rows: np.ndarray, x: torch.Tensor, threshold: float = 3.0) -> None:
    """Compare with float64 references over the finite elements."""
    finite = x[torch.isfinite(x)].double()
    found = Statistics.of(rows)
    expected = {
        "absmax": finite.abs().max(),
        "min": finite.min(),
        "max": finite.max(),
        "mean": finite.mean(),
        "std": finite.std(unbiased=False),
        "l2norm": finite.norm(),
        "rms": finite.square().mean().sqrt(),
        "exceed_ratio": (finite.abs() > threshold).double().mean(),
    }
    for name, value in expected.items():
        tolerance = 1e-3 if name == "std" else 1e-5
        absolute = 1e-6 * float(finite.abs().max()) if name == "mean" else 0
        assert getattr(found, name)[0] == pytest.approx(
            float(value), rel=tolerance, abs=absolute
        ), name
    row = rows[0]
    assert row[Column.COUNT] == finite.numel()
    assert row[Column.NAN] == int(torch.isnan(x).sum())
    assert row[Column.POSINF] == int((x == math.inf).sum())
    assert row[Column.NEGINF] == int((x == -math.inf).sum())


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
class TestAdd:
    @pytest.mark.parametrize("shape", [(), (1,), (7, 5), (131_072,), (3, 100_003)])
    def test_matches_the_reference(
        self, add: Add, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        torch.manual_seed(1)
        x = (torch.randn(shape) * 2 + 1).to(dtype)
        assert_right(row_of(add, x), x.reshape(-1))

    def test_counts_what_is_not_finite_and_measures_the_rest(
        self, add: Add, dtype: torch.dtype
    ) -> None:
        x = torch.tensor([1, -4, math.nan, math.inf, math.inf, -math.inf, 2], dtype=dtype)
        assert_right(row_of(add, x), x)

    def test_has_no_value_where_nothing_is_finite(self, add: Add, dtype: torch.dtype) -> None:
        rows = row_of(add, torch.full((5,), math.nan, dtype=dtype))
        assert rows[0, Column.NAN] == 5
        assert np.isnan(Statistics.of(rows).absmax[0])

    def test_merges_micro_batches(self, add: Add, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        first, second = torch.randn(50).to(dtype), torch.randn(70).to(dtype) * 3
        assert_right(row_of(add, first, second), torch.cat([first, second]))

    def test_takes_views(self, add: Add, dtype: torch.dtype) -> None:
        x = torch.arange(24.0).to(dtype).view(4, 6)[:, ::2].T
        assert_right(row_of(add, x), x.reshape(-1))


@both
class TestRange:
    @pytest.mark.parametrize("scale", [1e30, 1e-30])
    def test_squares_stay_finite(self, add: Add, scale: float) -> None:
        x = torch.tensor([3.0, -4.0]) * scale
        assert Statistics.of(row_of(add, x)).l2norm[0] == pytest.approx(5 * scale, rel=1e-5)

    def test_large_half_precision_sums_do_not_overflow(self, add: Add) -> None:
        x = torch.full((400_000,), 60_000.0, dtype=torch.float16)
        found = Statistics.of(row_of(add, x))
        exact = float(x[0])
        assert (found.mean[0], found.rms[0]) == pytest.approx((exact, exact), rel=1e-5)

    def test_std_beside_a_large_mean(self, add: Add) -> None:
        torch.manual_seed(3)
        x = torch.randn(1_000_000) + 30
        assert_right(row_of(add, x, threshold=31), x, threshold=31)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_eight_bit_floats(self, add: Add, dtype: torch.dtype) -> None:
        x = torch.tensor([0.5, -8.0, math.nan]).to(dtype)
        rows = row_of(add, x)
        assert Statistics.of(rows).absmax[0] == 8
        assert rows[0, Column.NAN] == 1


class TestPolicy:
    @pytest.mark.parametrize(
        "x",
        [
            torch.arange(3),
            torch.tensor([True]),
            torch.tensor([1j]),
            torch.eye(2).to_sparse(),
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            torch.empty(3, device="meta"),
            torch.empty(0),
        ],
        ids=["integer", "bool", "complex", "sparse", "nested", "meta", "empty"],
    )
    def test_has_no_statistics(self, x: torch.Tensor) -> None:
        assert not has_statistics(x)


def test_rows_of_two_devices_merge() -> None:
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([5.0])
    merged = merge([row_of(add_on_cpu, first), row_of(add_on_cpu, second)])
    assert_right(merged, torch.cat([first, second]))
