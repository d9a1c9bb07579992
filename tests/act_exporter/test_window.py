"""Mean and deviation of the last values that broke no rule."""

from __future__ import annotations

import numpy as np
import pytest

from act_exporter.window import Window

SIZE = 50


def add(window: Window, value: float, accepted: bool = True) -> None:
    window.add(np.array([value]), np.array([accepted]), np.array([not accepted]))


def test_has_no_verdict_before_there_are_enough_values() -> None:
    window = Window(1, SIZE, 20)
    for _ in range(19):
        add(window, 1.0)
    assert np.isnan(window.mean()[0])
    assert np.isnan(window.std()[0])
    add(window, 1.0)
    assert window.mean()[0] == 1


def test_is_of_the_last_values_only_and_steady() -> None:
    """A hundred thousand values later it still is what numpy says of the last fifty."""
    window = Window(1, SIZE, 20)
    values = np.random.default_rng(0).normal(1e6, 30_000, 100_000)
    for value in values:
        add(window, value)
    assert window.mean()[0] == pytest.approx(values[-SIZE:].mean(), rel=1e-12)
    assert window.std()[0] == pytest.approx(values[-SIZE:].std(), rel=1e-9)


def test_a_constant_series_has_a_deviation() -> None:
    window = Window(2, SIZE, 20)
    for _ in range(SIZE):
        window.add(np.array([3.0, 0.0]), np.array([True, True]), np.array([False, False]))
    assert window.std()[0] == pytest.approx(0.03)
    assert window.std()[1] > 0


def test_rule_breakers_stay_out() -> None:
    window = Window(1, SIZE, 20)
    for step in range(SIZE):
        add(window, 1.0 + step % 2)
    mean, std = window.mean()[0], window.std()[0]
    for _ in range(SIZE - 1):
        add(window, 5_000.0, accepted=False)
    assert (window.mean()[0], window.std()[0]) == (mean, std)


def test_a_windows_worth_of_rule_breakers_in_a_row_is_a_new_level() -> None:
    window = Window(1, SIZE, 20)
    for _ in range(SIZE):
        add(window, 1.0)
    for step in range(SIZE):
        add(window, 100.0 + step % 2, accepted=False)
    assert window.mean()[0] == pytest.approx(100.5)


def test_one_good_value_begins_the_row_anew() -> None:
    window = Window(1, SIZE, 20)
    for _ in range(SIZE):
        add(window, 1.0)
    for step in range(3 * SIZE):
        add(window, 100.0, accepted=step % SIZE == 0)
    assert window.mean()[0] < 10


def test_taps_do_not_mix() -> None:
    window = Window(3, SIZE, 2)
    for step in range(10):
        values = np.array([1.0, 10.0, np.nan])
        window.add(values, np.array([True, step % 2 == 0, False]), np.zeros(3, dtype=bool))
    assert window.mean()[:2] == pytest.approx([1, 10])
    assert np.isnan(window.mean()[2])


def test_a_giant_that_leaves_does_not_blur_what_stays() -> None:
    window = Window(1, SIZE, 20)
    add(window, 1e12)
    values = np.linspace(0.001, 0.002, SIZE + 5)
    for value in values:
        add(window, value)
    assert window.mean()[0] == pytest.approx(values[-SIZE:].mean(), rel=1e-9)
    assert window.std()[0] == pytest.approx(values[-SIZE:].std(), rel=1e-6)


@pytest.mark.parametrize("count", [7, SIZE, SIZE + 13])
@pytest.mark.parametrize("size", [20, SIZE, 80])
def test_a_state_goes_into_a_window_of_another_size(count: int, size: int) -> None:
    window, other = Window(2, SIZE, 5), Window(2, size, 5)
    values = np.random.default_rng(1).normal(10, 1, count + 9)
    for value in values[:count]:
        window.add(np.array([0, value]), np.array([False, True]), np.zeros(2, dtype=bool))
    other.restore(window.state(), np.array([0]), [1])
    for value in values[count:]:
        other.add(np.array([value, 0]), np.array([True, False]), np.zeros(2, dtype=bool))
    kept = values[max(0, count - min(size, SIZE)) :][-size:]
    assert other.mean()[0] == pytest.approx(kept.mean())
    assert other.std()[0] == pytest.approx(kept.std())
