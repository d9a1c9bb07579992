"""Loss and gradient norm over the last steps."""

from __future__ import annotations

import math

import pytest

from act_exporter import Thresholds
from act_exporter.training import TrainingHistory

THRESHOLDS = Thresholds(window=40, window_minimum=10)


class Run:
    def __init__(self) -> None:
        self.now = 0.0
        self.history = TrainingHistory(THRESHOLDS, lambda: self.now)

    def feed(self, loss: float, steps: int = 1) -> str:
        for _ in range(steps):
            self.now += 1
            self.history.observe({"loss": loss, "learning_rate": 1.0})
            level = self.history.level("loss")
        return level


@pytest.fixture
def run() -> Run:
    run = Run()
    for step in range(40):
        run.feed(2 + 0.1 * math.sin(step))
    return run


def test_a_jump_is_high_and_stays_out_of_the_window(run: Run) -> None:
    before = run.history.signals["loss"].window_mean
    assert run.feed(5.0) == "high"
    assert run.history.signals["loss"].window_mean == before
    assert run.feed(2.0) == "calm"


def test_five_deviations_alone_are_calm(run: Run) -> None:
    """3.0 is more than 5 sigma above 2 with a deviation of 0.07, and not twice as much."""
    assert run.feed(3.0) == "calm"


def test_nothing_is_high_before_there_is_a_window() -> None:
    run = Run()
    run.feed(1.0, steps=9)
    assert run.feed(1e9) == "calm"


def test_nan_is_counted_and_is_no_peak(run: Run) -> None:
    assert run.feed(math.nan) == "nonfinite"
    assert run.feed(math.inf) == "nonfinite"
    signal = run.history.signals["loss"]
    assert signal.nonfinite == 2
    assert signal.peak < 3


def test_a_peak_is_held_for_two_minutes(run: Run) -> None:
    run.feed(50.0)
    run.now += 110
    run.feed(2.0)
    assert run.history.signals["loss"].peak == 50
    run.now += 20
    run.feed(2.0)
    assert run.history.signals["loss"].peak == 2


def test_other_numbers_have_no_history(run: Run) -> None:
    assert set(run.history.signals) == {"loss"}
    assert run.history.level("grad_norm") == "calm"


def test_a_rollback_takes_the_peak_along_and_leaves_the_window(run: Run) -> None:
    run.feed(50.0)
    run.history.reset()
    assert run.history.signals == {}
    run.feed(2.0)
    assert run.history.signals["loss"].peak == 2
    assert run.history.signals["loss"].window_mean == pytest.approx(2, abs=0.1)
