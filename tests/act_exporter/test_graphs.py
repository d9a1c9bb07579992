"""CUDA graphs that a user captures: what is gathered at replays, and what counts.

There is no device here, so capturing is only said to be going on; `tests/gpu` has real graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from act_exporter import start_exporter
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
