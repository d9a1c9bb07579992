"""Loss and gradient norm over the last steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from act_exporter import StateError, Thresholds
from act_exporter.training import TrainingHistory

THRESHOLDS = Thresholds(window=40, window_minimum=10)


class Run:
    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0
        self.history = TrainingHistory(THRESHOLDS, lambda: self.now)

    def feed(self, loss: float, steps: int = 1) -> str:
        for _ in range(steps):
            self.now += 1
            self.step += 1
            self.history.observe(self.step, {"loss": loss, "learning_rate": 1.0})
            level = self.history.level("loss")
        return level

    def gradient(self, norm: float, steps: int = 1) -> float:
        for _ in range(steps):
            self.step += 1
            self.now += 1
            self.history.observe(self.step, {"grad_norm": norm})
        return self.history.signals["grad_norm"].shifted


@pytest.fixture
def run() -> Run:
    run = Run()
    for step in range(60):
        run.feed(2 + 0.1 * math.sin(step))
    return run


def test_a_jump_is_high_and_stays_out_of_the_window(run: Run) -> None:
    before = run.history.signals["loss"].window_mean
    assert run.feed(5.0) == "high"
    assert run.history.signals["loss"].window_mean == pytest.approx(before, abs=0.01)
    assert run.feed(2.0) == "calm"


def test_five_deviations_alone_are_calm(run: Run) -> None:
    """3.0 is more than 5 sigma above 2 with a deviation of 0.07, and not twice as much."""
    assert run.feed(3.0) == "calm"


def test_nothing_is_high_before_there_is_a_window() -> None:
    run = Run()
    run.feed(1.0, steps=29)
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


def test_a_spike_is_held_against_the_window_that_it_met(run: Run) -> None:
    """The window moves on while the peak is held."""
    before = run.history.signals["loss"]
    run.feed(50.0)
    met = run.history.signals["loss"]
    assert met.peak_ratio == pytest.approx(50 / before.window_mean)
    assert met.peak_zscore == pytest.approx((50 - before.window_mean) / before.window_std)
    run.history.rebaseline()
    run.now += 100
    run.feed(9.0)
    assert run.history.signals["loss"].peak_ratio == met.peak_ratio
    run.now += 30
    run.feed(9.0)
    assert math.isnan(run.history.signals["loss"].peak_zscore)


def test_a_loss_that_is_not_high_is_no_spike(run: Run) -> None:
    """Many deviations, but not twice the mean."""
    run.feed(3.0)
    assert math.isnan(run.history.signals["loss"].peak_zscore)


def test_the_height_that_a_loss_falls_from_is_no_peak() -> None:
    run = Run()
    for step in range(60):
        run.feed(2 + 9 * 0.8**step)
    signal = run.history.signals["loss"]
    assert signal.peak < 2 * signal.window_mean


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


def test_a_loss_that_has_moved_is_counted_and_stays_out_of_the_window(run: Run) -> None:
    """0.5 up, which is 7 deviations and no single value that is high."""
    assert run.feed(2.5, steps=45) == "calm"
    signal = run.history.signals["loss"]
    assert signal.shifted == 36  # from the tenth on
    assert signal.window_mean == pytest.approx(2, abs=0.02)
    assert run.history.onset is None  # of a loss alone nothing is rolled back


def test_twenty_bad_batches_move_it_for_twenty_steps(run: Run) -> None:
    run.feed(2.5, steps=20)
    run.feed(2.0, steps=40)
    assert 18 <= run.history.signals["loss"].shifted <= 21


def test_a_negative_loss_moves_up_too() -> None:
    run = Run()
    for step in range(60):
        run.feed(-5 + 0.1 * math.sin(step))
    run.feed(-4.0, steps=40)
    assert run.history.signals["loss"].shifted > 25


def test_a_gradient_that_runs_away_has_an_onset_and_single_spikes_have_none() -> None:
    run = Run()
    run.gradient(1.0, steps=100)
    for _ in range(20):
        run.gradient(1e4)
        assert run.gradient(1.0, steps=20) == 0
    began = run.step + 1
    assert run.gradient(25.0, steps=34) == 24
    assert run.history.onset is None
    run.gradient(25.0, steps=2)
    assert run.history.onset is not None
    assert began - 1 <= run.history.onset <= began + 1
    run.gradient(1.0, steps=20)
    assert run.history.onset is None


def test_gradients_that_are_not_finite_run_away_too() -> None:
    run = Run()
    run.gradient(1.0, steps=100)
    assert run.gradient(math.nan, steps=40) > 25


def test_an_update_follows_a_gradient_and_is_high_without_one() -> None:
    run = Run()

    def update(rms: float, norm: float = 1.0) -> str:
        run.gradient(norm)
        run.history.observe(run.step, {"update_rms": rms})
        return run.history.level("update_rms")

    for step in range(60):
        assert update(0.25 + 0.01 * math.sin(step)) == "calm"
    assert update(0.56) == "high"
    assert run.history.signals["update_rms"].peak_ratio == pytest.approx(2.24, abs=0.05)
    assert update(0.56, norm=3.0) == "calm"
    assert [update(0.4) for _ in range(9)] == ["calm"] * 9  # the rest of its momentum
    assert update(0.56) == "high"


def test_a_change_on_purpose_is_learnt_anew(run: Run) -> None:
    run.history.rebaseline()
    run.feed(9.0, steps=60)
    assert run.feed(9.0) == "calm"
    assert run.history.signals["loss"].window_mean == pytest.approx(9)


def test_the_windows_are_saved_and_restored(run: Run) -> None:
    """A loss that jumps at the first step after a resume is seen at once."""
    other = Run()
    other.history.load_state_dict(run.history.state_dict())
    assert other.feed(5.0) == "high"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: "loss", "expected dict"),
        (lambda state: {"loss": {}}, "'count' is missing"),
        (lambda state: {"loss": {**state["loss"], "count": np.array([99])}}, "count has"),
        (lambda state: {"loss": {**state["loss"], "next": np.array([0, 0])}}, "not of one"),
    ],
)
def test_a_state_that_is_none_is_an_error(run: Run, change: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        run.history.load_state_dict(change(run.history.state_dict()))
    assert run.feed(5.0) == "high"
