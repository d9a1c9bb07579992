"""The fused kernel, held to the CPU's references by Triton's interpreter on CPU tensors.

The interpreter is chosen when Triton is imported, and torch may have imported it: so these tests
run in a process of their own, which this file starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from act_exporter.rows import Column
from tests.act_exporter.test_statistics import AddContract, assert_right, row_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
    def test_by_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        # One thread: the interpreter works on small arrays.
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout

else:
    from act_exporter import kernels

    @pytest.fixture
    def _small(monkeypatch: pytest.MonkeyPatch) -> None:
        """Two programs with several chunks each, of few elements: a tile of 1,024 takes 5 ms."""
        monkeypatch.setattr(kernels, "_PROGRAMS", 2)
        monkeypatch.setattr(kernels, "_TILES", 2)
        monkeypatch.setattr(kernels, "_TILE", 256)

    @pytest.mark.usefixtures("_small")
    class TestInterpreted(AddContract):
        ways = (kernels.add_fused,)
        large = 2_003
        side = 6
        examples = 5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_with_the_sizes_of_a_gpu(dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        x = (torch.randn(40_003) + 29).to(dtype)
        assert_right(row_of(kernels.add_fused, x, threshold=30.1), x, 30.1)

    @pytest.mark.parametrize(
        "dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu], ids=str
    )
    def test_the_rarer_8_bit_floats(dtype: torch.dtype) -> None:
        x = torch.arange(1, 256, dtype=torch.uint8).view(dtype)
        row = row_of(kernels.add_fused, x)[0]
        assert (row[Column.NAN], row[Column.COUNT]) == (1, 254)

    def test_a_kernel_that_has_run_is_known_and_another_is_not() -> None:
        x = torch.ones(2_048)
        row_of(kernels.add_fused, x, threshold=4.5)
        assert kernels.is_loaded(x[:1_024], 4.5)
        assert kernels.is_loaded(x.view(2, 1_024).T, 4.5)
        assert not kernels.is_loaded(x, 4.25)
        assert not kernels.is_loaded(x[:1_001], 4.5)
        assert not kernels.is_loaded(x[1:1_025], 4.5)
        assert not kernels.is_loaded(x.double(), 4.5)
