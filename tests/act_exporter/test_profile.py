"""Which place jumps against those before it."""

from __future__ import annotations

import numpy as np

from act_exporter.profile import Profile
from act_exporter.taps import Tap


def taps(*names: str) -> list[Tap]:
    """Named block.place."""
    return [Tap(layer=name, tensor="output", kind=name.partition(".")[2]) for name in names]


NAMES = ("0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp", "3.attn", "3.mlp")
DEPTH = np.arange(8.0)


def jumps(peak: list[float], baseline: list[float] | None = None) -> list[float]:
    own = np.ones(8) if baseline is None else np.array(baseline)
    return Profile(taps(*NAMES)).jump_ratio(np.array(peak), own, DEPTH).tolist()


def test_the_place_that_jumps_stands_out_and_those_after_it_do_not() -> None:
    """From block 2 on the attention's input is 50 times what it was: a spike, then a plateau."""
    found = jumps([1, 1, 1, 1, 50, 1, 50, 1])
    assert found[2:5] == [1, 1, 50]
    assert found[6] == 50  # against the median of three, two of them calm
    assert found[7] == 1


def test_growth_with_depth_that_is_the_models_own_is_no_jump() -> None:
    """Massive activations from block 2 on, as some healthy models have them."""
    profile = [1.0, 1, 1, 1, 500, 1, 500, 1]
    assert jumps(profile, baseline=profile)[2:] == [1] * 6


def test_the_first_block_has_nothing_before_it() -> None:
    assert np.isnan(jumps([1.0] * 8)[:2]).all()


def test_places_without_a_baseline_are_left_out() -> None:
    found = jumps([1.0] * 8, baseline=[1, 1, np.nan, 1, 1, 1, 1, 1])
    assert np.isnan(found[2])
    assert found[4] == 1


def test_before_is_by_execution_and_not_by_registration() -> None:
    """A decoder whose blocks are registered last first."""
    profile = Profile(taps("0.attn", "1.attn", "2.attn"))
    found = profile.jump_ratio(np.array([9.0, 1, 1]), np.ones(3), np.array([2.0, 1, 0]))
    assert np.isnan(found[2])
    assert found[:2].tolist() == [9, 1]


def plateau(peak: list[float]) -> tuple[float, float] | None:
    return Profile(taps(*NAMES)).plateau(np.array(peak), np.ones(8), DEPTH)


def test_a_plateau_is_from_where_to_where_it_stays_high() -> None:
    assert plateau([1, 1, 50, 1, 50, 1, 50, 1]) == (2, 6)
    assert plateau([1, 50, 1, 50, 1, 1, 1, 50]) == (1, 3)


def test_one_place_is_no_plateau() -> None:
    assert plateau([1, 1, 50, 1, 1, 1, 50, 1]) is None
    assert plateau([1.0] * 8) is None
