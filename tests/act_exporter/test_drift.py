"""Slow growth, which takes its own window along."""

from __future__ import annotations

import numpy as np
import pytest

from act_exporter.drift import Drift


def feed(drift: Drift, values: np.ndarray) -> np.ndarray:
    for value in values:
        drift.add(np.array([value]), np.isfinite([value]))
    return drift.growth


@pytest.mark.parametrize("rate", [0.01, 0.02, -0.01, 0.0])
def test_growth_is_found_in_noise(rate: float) -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.1, 200)
    grown = feed(Drift(1), noise * (1 + rate) ** np.arange(200))
    assert grown[0] == pytest.approx(rate, abs=0.001)


def test_is_unknown_until_there_are_a_hundred_steps() -> None:
    drift = Drift(1)
    assert np.isnan(feed(drift, np.ones(99))[0])
    assert feed(drift, np.ones(1))[0] == 0


def test_a_spike_is_no_drift() -> None:
    values = np.ones(200)
    values[-10:] = 1e4
    assert feed(Drift(1), values)[0] == 0


def test_gaps_are_left_out_and_too_many_are_no_verdict() -> None:
    values = 1.01 ** np.arange(200)
    values[::3] = np.nan
    assert feed(Drift(1), values)[0] == pytest.approx(0.01, abs=0.001)
    values[100:180] = np.nan
    assert np.isnan(feed(Drift(1), values)[0])


def test_zeros_are_gaps() -> None:
    assert np.isnan(feed(Drift(1), np.zeros(200))[0])


def test_steps_of_another_state_are_forgotten() -> None:
    drift = Drift(1)
    feed(drift, np.ones(100))
    drift.clear()
    assert np.isnan(feed(drift, np.ones(50))[0])
