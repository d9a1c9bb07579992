"""The baseline waits until training has settled, and then stays."""

from __future__ import annotations

import numpy as np

from act_exporter.baseline import Baseline

STEPS = 10


def feed(
    baseline: Baseline, steps: int, *values: float, rate: float | None = 1e-3, rising: float = 0.0
) -> None:
    array = np.array(values)
    for step in range(steps):
        at = None if rate is None else rate * (1 + rising * step)
        baseline.add(array, np.isfinite(array), at)


def test_is_the_median_once_two_blocks_agree() -> None:
    baseline = Baseline(["a"], STEPS)
    feed(baseline, STEPS, 1.0)
    assert np.isnan(baseline.values[0])
    feed(baseline, STEPS, 1.5)
    assert baseline.values[0] == 1.5


def test_is_frozen() -> None:
    baseline = Baseline(["a"], STEPS)
    feed(baseline, 2 * STEPS, 1.0)
    feed(baseline, 10 * STEPS, 70.0)
    assert baseline.values[0] == 1


def test_waits_while_the_level_moves() -> None:
    baseline = Baseline(["a"], STEPS)
    for level in (1.0, 3.0, 9.0, 27.0):
        feed(baseline, STEPS, level)
    assert np.isnan(baseline.values[0])
    feed(baseline, STEPS, 40.0)
    assert baseline.values[0] == 40


def test_waits_while_the_learning_rate_rises() -> None:
    baseline = Baseline(["a"], STEPS)
    for block in range(5):
        feed(baseline, STEPS, 1.0, rate=1e-3 * (1 + block), rising=0.01)
    assert np.isnan(baseline.values[0])
    feed(baseline, STEPS, 1.0, rate=5e-3)
    assert baseline.values[0] == 1


def test_a_cyclic_rate_does_not_rise() -> None:
    baseline = Baseline(["a"], STEPS)
    for _ in range(3 * STEPS // 5):
        feed(baseline, 5, 1.0, rising=0.5)
    assert baseline.values[0] == 1


def test_is_learnt_anew_at_a_much_higher_rate_and_in_force_until_then() -> None:
    """A warm-up that rises once an epoch has pauses in which training seems settled."""
    baseline = Baseline(["a"], STEPS)
    feed(baseline, 3 * STEPS, 1.0, rate=1e-4)
    feed(baseline, 2 * STEPS - 1, 20.0, rate=1e-3)
    assert baseline.values[0] == 1
    feed(baseline, STEPS + 1, 20.0, rate=1e-3)
    assert baseline.values[0] == 20
    feed(baseline, 5 * STEPS, 50.0, rate=1.4e-3)
    assert baseline.values[0] == 20


def test_does_without_a_learning_rate() -> None:
    baseline = Baseline(["a"], STEPS)
    feed(baseline, 2 * STEPS, 1.0, rate=None)
    assert baseline.values[0] == 1


def test_waits_for_a_tap_that_is_far_below_its_like() -> None:
    """A zero-initialised projection that has hardly moved."""
    baseline = Baseline(["proj", "proj", "proj", "norm"], STEPS)
    feed(baseline, 2 * STEPS, 1.0, 1.0, 0.05, 0.05)
    assert list(np.isnan(baseline.values)) == [False, False, True, False]
    feed(baseline, STEPS, 1.0, 1.0, 0.09, 0.05)
    assert np.isnan(baseline.values[2])
    feed(baseline, 2 * STEPS, 1.0, 1.0, 0.15, 0.05)
    assert baseline.values[2] == 0.15


def test_zero_is_no_baseline() -> None:
    baseline = Baseline(["a"], STEPS)
    feed(baseline, 4 * STEPS, 0.0)
    assert np.isnan(baseline.values[0])


def test_a_tap_that_comes_late_learns_by_itself() -> None:
    baseline = Baseline(["a", "b"], STEPS)
    feed(baseline, 2 * STEPS, 1.0, np.nan)
    assert list(np.isnan(baseline.values)) == [False, True]
    feed(baseline, 2 * STEPS, 1.0, 2.0)
    assert baseline.values[1] == 2
