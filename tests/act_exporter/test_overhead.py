"""What looking costs, from the durations of steps, and the interval that keeps to a budget."""

from __future__ import annotations

import random

import pytest

from act_exporter.overhead import Overhead


def feed(
    overhead: Overhead,
    steps: int,
    *,
    usual: float,
    extra: float,
    jitter: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Steps of which each second one is sampled; those at which the interval was raised."""
    chance = random.Random(seed)
    now, raised = 0.0, []
    for step in range(steps):
        sampled = step % 2 == 0
        now += (usual + extra * sampled) * (1 + jitter * chance.gauss(0, 1))
        if overhead.step(now, sampled):
            raised.append(step)
    return raised


def test_is_unknown_before_there_are_enough_steps() -> None:
    overhead = Overhead(None, 1)
    feed(overhead, 20, usual=1, extra=0.1)
    assert overhead.ratio() is None


def test_is_the_extra_time_of_sampled_steps() -> None:
    overhead = Overhead(None, 1)
    feed(overhead, 100, usual=1, extra=0.05)
    assert overhead.ratio() == pytest.approx(0.05)


def test_is_borne_by_all_steps() -> None:
    overhead = Overhead(None, 10)
    feed(overhead, 100, usual=1, extra=0.05)
    assert overhead.ratio() == pytest.approx(0.005)


def test_the_interval_is_raised_above_the_budget_and_not_below() -> None:
    assert feed(Overhead(0.01, 1), 200, usual=1, extra=0.009) == []
    costly = Overhead(0.01, 1)
    assert feed(costly, 400, usual=1, extra=0.035)
    assert costly.sample_every == 4  # 0.035 a sampled step is within 0.01 a step


def test_jitter_is_not_taken_for_cost() -> None:
    for seed in range(20):
        assert feed(Overhead(0.01, 1), 1000, usual=1, extra=0, jitter=0.05, seed=seed) == []


def test_long_pauses_between_steps_do_not_count() -> None:
    overhead = Overhead(0.01, 1)
    now = 0.0
    for step in range(200):
        overhead.pause()
        now += 100
        overhead.step(now, sampled=True)
        now += 1
        overhead.step(now, sampled=step % 2 == 0)
    assert overhead.ratio() == pytest.approx(0)


def test_one_step_in_fifty_is_left_alone() -> None:
    overhead = Overhead(None, 1)
    sampled = []
    for step in range(200):
        sampled.append(overhead.samples(1))
        overhead.step(float(step), sampled[-1])
    assert sampled.count(False) == 4


def test_the_interval_is_kept() -> None:
    overhead = Overhead(None, 10)
    assert [overhead.samples(distance) for distance in (9, 10, 11)] == [False, True, True]
