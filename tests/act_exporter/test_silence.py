"""Hooks that never run: all of them, or those of some layers among others."""

from __future__ import annotations

import numpy as np

from act_exporter.silence import Silence
from act_exporter.taps import Tap


def silence(*layers: str) -> Silence:
    taps = [Tap(layer=name, tensor="output", kind=name) for name in layers]
    return Silence(taps)


def messages(watch: Silence, steps: int, *calls: int) -> list[str]:
    told = [watch.observe(np.array(calls)) for _ in range(steps)]
    return [message for message in told if message is not None]


def test_nothing_ran_in_five_steps_and_is_said_once() -> None:
    watch = silence("a", "b")
    assert messages(watch, 4, 0, 0) == []
    (message,) = messages(watch, 50, 0, 0)
    assert "no watched layer ran" in message
    assert "training=True" in message  # what a loop of one's own with Keras forgets


def test_steps_in_which_all_rest_are_no_silence_of_one() -> None:
    watch = silence("a", "b")
    for _ in range(60):
        assert messages(watch, 2, 0, 0) == []
        assert messages(watch, 1, 1, 1) == []


def test_those_that_did_not_run_beside_others_are_named_once() -> None:
    watch = silence("a", "b", "c")
    assert messages(watch, 99, 1, 0, 0) == []
    (message,) = messages(watch, 500, 1, 0, 0)
    assert message.startswith("b, c did not run in 100 sampled steps")


def test_a_layer_that_has_its_turn_now_and_then_is_not_silent() -> None:
    """An expert, or a layer that is dropped at random."""
    watch = silence("a", "b")
    for _ in range(10):
        assert messages(watch, 90, 1, 0) == []
        assert messages(watch, 1, 1, 1) == []


def test_of_many_names_some_are_given() -> None:
    names = [f"expert.{number}" for number in range(128)]
    watch = silence("a", *names)
    (message,) = messages(watch, 100, 1, *[0] * 128)
    assert "expert.4 and 123 more did not run" in message
