"""CUDA graphs that a user captures: what is gathered at replays, and what counts.

There is no device here, so capturing is only said to be going on; `tests/gpu` has real graphs.
What a compiler needs to know for graphs of its own can be read from its traces.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

from act_exporter import start_exporter, statistics
from tests.act_exporter.models import gpt, train
from tests.act_exporter.test_probe import Watched, tokens


@contextlib.contextmanager
def capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def test_a_graph_gathers_though_it_was_captured_in_a_step_that_is_not_sampled() -> None:
    model = gpt()
    watched = Watched(model)
    watched.probe.sampling = False
    with capture():
        model(tokens())
    assert set(watched.calls().values()) == {1}
    assert watched.errors == []


def test_what_replays_gather_in_a_step_that_is_not_sampled_does_not_count() -> None:
    model = gpt()
    watched = Watched(model)
    with capture():
        model(tokens())
    watched.probe.skip()
    assert set(watched.calls().values()) == {0}


def test_without_a_graph_nothing_is_gathered_in_such_a_step_or_lost_after_it() -> None:
    model = gpt()
    watched = Watched(model)
    model(tokens())
    watched.probe.skip()
    assert set(watched.calls().values()) == {1}


def test_a_kernel_that_has_not_run_yet_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile and load it would break the capture; torch's own passes are captured instead."""
    kernels = types.ModuleType("act_exporter.kernels")
    loaded: list[torch.dtype] = []
    kernels.is_loaded = lambda x, _: x.dtype in loaded  # type: ignore[attr-defined]
    kernels.add_fused = lambda x, *_: loaded.append(x.dtype)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "act_exporter.kernels", kernels)
    x, row = torch.ones(3), statistics.empty_rows(1, torch.device("cpu"))[0]
    with capture():
        assert not statistics._add_fused(x, row, 1.0)
    assert statistics._add_fused(x, row, 1.0)
    with capture():
        assert statistics._add_fused(x, row, 1.0)
        assert not statistics._add_fused(x.double(), row, 1.0)


def test_a_compiler_knows_that_what_is_written_to_stays_where_it_is() -> None:
    """Else it would copy the rows into its graphs, or give up the graphs for their sake."""
    torch._dynamo.reset()
    model = gpt()
    watched = Watched(model)
    written: set[int] = set()
    fixed: set[int] = set()

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        found = TracingContext.get().fw_metadata
        assert found is not None
        written.update(i for i, given in enumerate(found.input_info) if given.mutates_data)
        fixed.update(found.static_input_indices)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    compiled(tokens()).sum().backward()
    assert len(written) == len(watched.taps)
    assert written <= fixed
    assert set(watched.calls().values()) == {1}


def test_no_step_ends_while_one_is_captured() -> None:
    """Its kernels have only been written down, the optimizer's too."""
    model = gpt()
    with start_exporter(model, 0) as exporter:
        train(model, 2)
        with capture():
            train(model, 1)
            exporter.record(loss=torch.tensor(3.0))
        assert exporter._training.step == 2
        assert "loss" not in exporter._training.values
        # A graph of the whole step tells nobody; the loop does.
        exporter.step(3)
        exporter.step(4)
        assert (exporter._training.step, exporter._training.steps) == (4, 4)
        assert sum(exporter._errors.values()) == 0


def test_steps_that_only_the_loop_tells_of_count_after_a_rollback_too() -> None:
    model = gpt()
    with start_exporter(model, 0) as exporter:
        with capture():
            train(model, 1)
        exporter.step(1)
        exporter.reset(generation=1)
        before = exporter._training.steps
        exporter.step(2)
        assert exporter._training.steps == before + 1
