"""One tensor's statistics, held to float64 references on the CPU's path and the device's.

What holds for every way of adding a tensor is in `AddContract`; the kernel's tests take it over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from act_exporter import statistics
from act_exporter.rows import Column, Statistics, merge
from act_exporter.statistics import (
    add,
    add_on_cpu,
    add_on_device,
    below,
    empty_rows,
    has_statistics,
)

Add = Callable[[torch.Tensor, torch.Tensor, float], None]

E4M3FN, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, E4M3FN, E5M2]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# The same every time; a search that may end differently is for a workbench, not for CI.
few = settings(deadline=None, derandomize=True, database=None)


def row_of(way: Add, *tensors: torch.Tensor, threshold: float = 3.0) -> np.ndarray:
    rows = empty_rows(1, tensors[0].device)
    for tensor in tensors:
        way(tensor, rows[0], threshold)
    return rows.cpu().numpy()


def assert_right(rows: np.ndarray, x: torch.Tensor, threshold: float = 3.0) -> None:
    """Compare with float64 references over the finite elements."""
    x = x.detach().cpu().double().reshape(-1)
    finite = x[torch.isfinite(x)]
    row = rows[0]
    assert row[Column.COUNT] == finite.numel()
    assert row[Column.NAN] == int(torch.isnan(x).sum())
    assert row[Column.POSINF] == int((x == math.inf).sum())
    assert row[Column.NEGINF] == int((x == -math.inf).sum())
    assert row[Column.EXCEEDED] == int((finite.abs() > threshold).sum())
    found = Statistics.of(rows)
    if not finite.numel():
        assert np.isnan(found.absmax[0])
        return
    mean, std = float(finite.mean()), float(finite.std(unbiased=False))
    expected = {
        "absmax": finite.abs().max(),
        "min": finite.min(),
        "max": finite.max(),
        "l2norm": finite.norm(),
        "rms": finite.square().mean().sqrt(),
        "exceed_ratio": (finite.abs() > threshold).double().mean(),
    }
    for name, value in expected.items():
        assert getattr(found, name)[0] == pytest.approx(float(value), rel=1e-5), name
    # Where the elements cancel, the mean is as exact as their size lets a sum be.
    assert found.mean[0] == pytest.approx(mean, rel=1e-5, abs=1e-6 * float(finite.abs().max()))
    if abs(mean) < 30 * std:
        assert found.std[0] == pytest.approx(std, rel=1e-3)
    elif abs(mean) <= 300 * std:
        assert found.std[0] == pytest.approx(std, rel=1e-2)


def with_specials(x: torch.Tensor, specials: list[tuple[int, float]]) -> torch.Tensor:
    """`x` with values put at places (modulo its length), where its dtype has them."""
    flat = x.reshape(-1).clone()
    for place, value in specials:
        flat[place % flat.numel()] = torch.tensor(value).to(x.dtype)
    return flat.view(x.shape)


SPECIALS = st.lists(
    st.tuples(st.integers(0, 10**9), st.sampled_from([math.nan, math.inf, -math.inf, 0.0])),
    max_size=4,
)


class AddContract:
    """What every way of adding a tensor to a row has to do; subclasses name the way.

    Attributes:
        ways: the ways.
        device: where the tensors lie.
        large: a number of elements that is many for the ways.
        side: of pictures that are large enough to be taken in rows.
        examples: how many hypothesis tries.
    """

    ways: tuple[Add, ...]
    device = "cpu"
    large = 300_003
    side = 60
    examples = 25

    def check(self, x: torch.Tensor, threshold: float = 3.0) -> None:
        x = x.to(self.device)
        for way in self.ways:
            assert_right(row_of(way, x, threshold=threshold), x, threshold)

    @EVERY_DTYPE
    def test_random_tensors(self, dtype: torch.dtype) -> None:
        @settings(few, max_examples=self.examples)
        @given(
            size=st.one_of(st.integers(1, 200), st.integers(self.large // 5, self.large // 3)),
            seed=st.integers(0, 2**31),
            scale=st.sampled_from([0.01, 1.0, 50.0]),
            ratio=st.sampled_from([0.0, -3.0, 25.0, 250.0]),
            threshold=st.sampled_from([0.0, 0.1, 3.0, 3.3, 50.0, math.inf]),
            specials=SPECIALS,
        )
        def test(
            size: int,
            seed: int,
            scale: float,
            ratio: float,
            threshold: float,
            specials: list[tuple[int, float]],
        ) -> None:
            generator = torch.Generator().manual_seed(seed)
            x = (torch.randn(size, generator=generator, dtype=torch.float64) + ratio) * scale
            self.check(with_specials(x.to(dtype), specials), threshold)

        test()

    @EVERY_DTYPE
    def test_every_bit_pattern_of_few_elements(self, dtype: torch.dtype) -> None:
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]

        @settings(few, max_examples=self.examples)
        @given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
        def test(patterns: list[int]) -> None:
            x = torch.tensor(patterns).to(bits).view(dtype)
            # The squares of larger ones leave float64, which only the limit of 1e30 forbids.
            x = torch.where(x.double().abs() > 1e100, 1.0, x.double()).to(dtype)
            for way in self.ways:
                rows = row_of(way, x.to(self.device))
                row, wide = rows[0], x.double()
                finite = wide[torch.isfinite(wide)]
                assert row[Column.COUNT] == finite.numel()
                assert row[Column.NAN] == int(torch.isnan(wide).sum())
                assert row[Column.EXCEEDED] == int((finite.abs() > 3).sum())
                if finite.numel():
                    assert (row[Column.MIN], row[Column.MAX]) == (finite.min(), finite.max())

        test()

    @EVERY_DTYPE
    def test_all_8_bit_or_all_16_bit_patterns(self, dtype: torch.dtype) -> None:
        if dtype.itemsize > 2:
            pytest.skip("too many patterns")
        bits = torch.int8 if dtype.itemsize == 1 else torch.int16
        x = torch.arange(2 ** (8 * dtype.itemsize)).to(bits).view(dtype)
        self.check(x)

    @EVERY_DTYPE
    @pytest.mark.parametrize("shape", [(), (1,), (7, 5), (0,), (3, 0, 2), (2, 1, 3, 1)], ids=str)
    def test_shapes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        torch.manual_seed(1)
        x = (torch.randn(shape) * 2 + 1).to(dtype)
        if x.numel():
            self.check(x)
        else:
            assert not has_statistics(x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_views(self, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        x = torch.randn(2, 12, self.side, self.side).to(self.device, dtype)
        for view in (
            x[:, ::2, 3:],
            x.transpose(1, 3),
            x.to(memory_format=torch.channels_last),
            x[:, :1].expand(2, 5, self.side, self.side),
            x[0, 0, 0, 0].expand(self.large // 4),
            x.flip(2),
        ):
            self.check(view)

    def test_a_lazily_negated_view(self) -> None:
        x = torch.randn(5, dtype=torch.complex64, device=self.device).conj().imag
        assert x.is_neg()
        assert has_statistics(x)
        self.check(x)

    def test_a_tensor_with_gradients_in_inference_mode_and_outside(self) -> None:
        x = torch.randn(100, device=self.device, requires_grad=True)
        self.check(x * 1)
        with torch.inference_mode():
            self.check(x * 1)
        self.check(x * 1)

    @EVERY_DTYPE
    def test_nothing_finite(self, dtype: torch.dtype) -> None:
        self.check(torch.full((self.large,), math.nan).to(dtype))

    @pytest.mark.parametrize("every", [1, 3, 5_000])
    def test_many_that_are_not_finite(self, every: int) -> None:
        x = torch.randn(self.large)
        x[::every] = -math.inf
        x[1::every] = math.nan
        self.check(x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("scale", [1e30, 1e-30, 1e16, 1e-16, 0.0])
    def test_squares_stay_finite_and_exact(self, dtype: torch.dtype, scale: float) -> None:
        torch.manual_seed(3)
        x = (torch.randn(self.large, dtype=torch.float64).clamp(-4, 4) * scale).to(dtype)
        self.check(x)
        self.check(x, threshold=2 * scale)

    def test_one_large_element_among_usual_ones(self) -> None:
        x = torch.ones(self.large)
        x[5] = -1e30
        self.check(x)

    @pytest.mark.parametrize("mean", [29, 300])
    def test_std_beside_a_large_mean(self, mean: int) -> None:
        torch.manual_seed(3)
        for size in (1_000, 4_096, self.large // 4, self.large):
            x = torch.randn(size, dtype=torch.float64)
            x = (x - x.mean()) / x.std(unbiased=False) * 1.001 + mean
            self.check(x.float(), threshold=mean)

    def test_the_threshold_is_not_rounded(self) -> None:
        for value in (3.3, 0.1, 6.0, 1e-3):
            element = torch.tensor([value], dtype=torch.float32)
            for x in (element, torch.nextafter(element, torch.tensor(math.inf))):
                self.check(x.expand(self.large // 4), threshold=value)
                self.check(x.expand(self.large // 4).contiguous().double(), threshold=value)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_autocast_changes_nothing(self, dtype: torch.dtype) -> None:
        torch.manual_seed(4)
        x = (torch.randn(self.large) + 2).to(self.device, dtype)
        for way in self.ways:
            without = row_of(way, x)
            with torch.autocast(self.device, dtype=torch.bfloat16):
                assert np.array_equal(row_of(way, x), without)

    def test_adding_again_adds(self) -> None:
        torch.manual_seed(2)
        first, second = torch.randn(50), torch.randn(self.large) * 3
        for way in self.ways:
            rows = row_of(way, first.to(self.device), second.to(self.device))
            assert_right(rows, torch.cat([first, second]))
            assert rows[0, Column.CALLS] == 2

    def test_the_same_tensor_gives_the_same_bits(self) -> None:
        x = torch.randn(self.large).to(self.device)
        for way in self.ways:
            assert np.array_equal(row_of(way, x), row_of(way, x))


class TestOnCpu(AddContract):
    ways = (add_on_cpu, add_on_device, add)

    def test_it_works_in_pieces(self) -> None:
        """More rows than are worked on at once, and a rest."""
        torch.manual_seed(5)
        self.check(with_specials(torch.randn(1_200_007), [(7, math.nan), (1_200_006, math.inf)]))

    def test_sums_of_very_many_half_precision_elements(self) -> None:
        """100 million, whose float16 or float32 sums would overflow or stick; 200 MB for a moment.

        Every element is the same, so that the reference needs no pass.
        """
        for dtype, value in ((torch.bfloat16, 1.0), (torch.float16, 60_000.0)):
            x = torch.full((100_000_000,), value, dtype=dtype)
            exact = float(x[0])
            rows = row_of(add_on_cpu, x)
            found = Statistics.of(rows)
            assert rows[0, Column.COUNT] == 100_000_000
            assert rows[0, Column.EXCEEDED] == (100_000_000 if exact > 3 else 0)
            assert found.l2norm[0] == pytest.approx(exact * 1e4, rel=1e-5)
            assert found.rms[0] == pytest.approx(exact, rel=1e-5)
            assert found.mean[0] == pytest.approx(exact, rel=1e-5)

    def test_counts_beyond_float32(self) -> None:
        """A float32 counter stops at 16,777,216; float64 counts to 9e15."""
        x = torch.full((9_999_999,), 5.0, dtype=torch.float16)
        x[123] = math.nan
        rows = row_of(add_on_cpu, *[x] * 10)
        row = rows[0]
        assert (row[Column.COUNT], row[Column.EXCEEDED]) == (99_999_980, 99_999_980)
        assert row[Column.NAN] == 10

    @pytest.mark.parametrize(
        "dtype",
        [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
        ids=str,
    )
    def test_the_rarer_8_bit_floats(self, dtype: torch.dtype) -> None:
        x = torch.arange(1, 256, dtype=torch.uint8).view(dtype)
        for way in self.ways:
            row = row_of(way, x)[0]
            wide = x.double()
            assert row[Column.NAN] == int(torch.isnan(wide).sum()) == 1
            assert row[Column.COUNT] == 254
            finite = wide[torch.isfinite(wide)]
            assert (row[Column.MIN], row[Column.MAX]) == (finite.min(), finite.max())


class TestPolicy:
    """What is not counted, and that finding out never raises."""

    @pytest.mark.parametrize(
        "x",
        [
            torch.arange(3),
            torch.arange(3, dtype=torch.uint8),
            torch.tensor([True]),
            torch.tensor([1j]),
            torch.eye(2).to_sparse(),
            torch.eye(2).to_mkldnn(),
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            torch.empty(3, device="meta"),
            torch.empty(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            torch.empty(0),
            torch.empty(2, 0, 3),
        ],
        ids=[
            "integer",
            "byte",
            "bool",
            "complex",
            "sparse",
            "mkldnn",
            "nested",
            "meta",
            "four bits",
            "empty",
            "an empty dimension",
        ],
    )
    def test_has_no_statistics(self, x: torch.Tensor) -> None:
        assert not has_statistics(x)

    @pytest.mark.filterwarnings("ignore")  # torch warns of compressed rows and of quantisation
    def test_rarer_kinds_have_none(self) -> None:
        assert not has_statistics(torch.eye(2).to_sparse_csr())
        assert not has_statistics(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
        for dtype in (torch.qint8, torch.quint8, torch.qint32):
            assert not has_statistics(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, dtype))

    @EVERY_DTYPE
    def test_floats_have(self, dtype: torch.dtype) -> None:
        assert has_statistics(torch.ones(()).to(dtype))
        assert has_statistics(torch.ones(2, 3).to(dtype).T)


@few
@given(st.floats(min_value=-1e38, max_value=1e38))
def test_below_is_the_nearest_float32_not_above(threshold: float) -> None:
    found = below(threshold)
    assert found <= threshold
    assert float(np.nextafter(np.float32(found), np.float32(math.inf))) > threshold


def test_a_kernel_that_does_not_work_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(statistics, "_fused_works", True)
    monkeypatch.setitem(sys.modules, "act_exporter.kernels", None)  # as if it had no Triton
    row = empty_rows(1, torch.device("cpu"))[0]
    assert not statistics._add_fused(torch.ones(3), row, 1.0)
    assert not statistics._fused_works
    assert row[Column.COUNT] == 0


def test_rows_of_two_devices_merge() -> None:
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([5.0])
    merged = merge([row_of(add_on_cpu, first), row_of(add_on_cpu, second)])
    assert_right(merged, torch.cat([first, second]))


class TestLogPartition:
    @pytest.mark.parametrize("rows", [1, 64, 1000])
    def test_is_that_of_the_rows(self, rows: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(1, rows, 50) + 20
        row = empty_rows(1, torch.device("cpu"))[0]
        statistics.note_log_partition(x.bfloat16(), row)
        wanted = float(torch.logsumexp(x.double(), -1).mean())
        assert float(row[Column.LOG_PARTITION]) == pytest.approx(wanted, abs=0.1)

    def test_large_logits_do_not_overflow(self) -> None:
        row = empty_rows(1, torch.device("cpu"))[0]
        statistics.note_log_partition(torch.full((3, 4), 6e4, dtype=torch.float16), row)
        assert float(row[Column.LOG_PARTITION]) == pytest.approx(6e4 + math.log(4), rel=1e-3)


class TestRowNorm:
    def test_is_the_largest_over_heads_and_rows(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(3, 5, 32)
        row = empty_rows(1, torch.device("cpu"))[0]
        statistics.add_row_norm(x, row, 8)
        assert float(row[Column.ROW_NORM]) == pytest.approx(
            float(x.view(3, 5, 4, 8).norm(dim=-1).max())
        )
        statistics.add_row_norm(x / 2, row, 8)
        assert float(row[Column.ROW_NORM]) > float(x.view(3, 5, 4, 8).norm(dim=-1).max()) * 0.99

    def test_rows_with_a_nan_do_not_count(self) -> None:
        x = torch.tensor([[3.0, 4.0], [math.nan, 100.0]])
        row = empty_rows(1, torch.device("cpu"))[0]
        statistics.add_row_norm(x, row, 2)
        assert float(row[Column.ROW_NORM]) == pytest.approx(5)

    def test_what_cannot_be_cut_into_heads_is_left_alone(self) -> None:
        row = empty_rows(1, torch.device("cpu"))[0]
        statistics.add_row_norm(torch.ones(2, 7), row, 4)
        assert float(row[Column.ROW_NORM]) == 0
