"""The fused kernel and the ATen passes on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from act_exporter import statistics
from act_exporter.rows import Column
from act_exporter.statistics import add, add_on_device, empty_rows
from tests.act_exporter.test_statistics import DTYPES, Add, AddContract, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def add_fused(x: torch.Tensor, row: torch.Tensor, exceed_threshold: float) -> None:
    from act_exporter import kernels  # Triton, only where there is a GPU

    kernels.add_fused(x, row, exceed_threshold)


class TestOnCuda(AddContract):
    ways = (add_fused, add_on_device, add)
    device = "cuda"
    large = 20_000_003  # every program takes more than one chunk
    side = 120


def test_the_kernel_is_what_add_takes() -> None:
    row = empty_rows(1, torch.device("cuda"))[0]
    add(torch.ones(5, device="cuda"), row, 1.0)
    assert statistics._fused_works


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_synchronisation")
@pytest.mark.parametrize("way", [add_fused, add_on_device])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(way: Add, dtype: torch.dtype) -> None:
    row = empty_rows(1, torch.device("cuda"))[0]
    way(torch.ones(100_000, device="cuda").to(dtype), row, 0.5)


def test_a_graph_replays_it() -> None:
    rows = empty_rows(1, torch.device("cuda"))
    x = torch.randn(1_000_000, device="cuda")
    add_fused(x, rows[0], 3.0)  # compiles
    statistics.clear(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_fused(x, rows[0], 3.0)
    graph.replay()
    assert_right(rows.cpu().numpy(), x)
    graph.replay()
    assert rows[0, Column.COUNT].item() == 2_000_000


def test_more_elements_than_32_bits_count() -> None:
    n = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 2 * n:
        pytest.skip("needs 2 GiB of free GPU memory and room beside it")
    rows = empty_rows(1, torch.device("cuda"))
    x = torch.ones(n, device="cuda", dtype=torch.float8_e5m2)
    x.view(torch.uint8)[-1] = 0x7F  # NaN
    add_fused(x, rows[0], 0.5)
    row = rows.cpu().numpy()[0]
    assert (row[Column.COUNT], row[Column.EXCEEDED], row[Column.NAN]) == (n - 1, n - 1, 1)
