"""Each tap's baseline: the absmax that it had once training had settled.

Zero-initialised projections and a warm-up make a *healthy* run reach 295 times the median of its
first 100 steps; so the baseline is the median of a block of steps that came after the learning
rate stopped rising, was like the block before it, and is not far below the same place elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.rows import Array
from act_exporter.window import Mask

# Two blocks in a row whose medians differ by more than this are a level that still moves. The
# hard rule looks for 100; what a settled tap wanders by itself is well below 2.
_SETTLED_FACTOR = 2.0

# A schedule's steps differ by rounding; a warm-up over 100,000 steps rises by more than this from
# one block of 100 to the next.
_RISING_FACTOR = 1.001

# A baseline that was learnt in a pause of the warm-up (one that rises once an epoch) is replaced,
# once training has settled at a rate this much higher. It stays in force until then: a learning
# rate that is suddenly far too high must not silence the hard rule.
_RELEARN_FACTOR = 1.5

# A tap that is far below its like in the other blocks (a zero-initialised projection that has
# hardly moved) has not settled, however still it stands.
_LEAST_SHARE_OF_KIND = 0.1


class Baseline:
    """Learns one value a tap and keeps it.

    Args:
        kinds: for each tap, what it is within its block; equal for its like in other blocks.
        steps: sampled steps whose median is a candidate.
    """

    def __init__(self, kinds: Sequence[str], steps: int) -> None:
        self.values = np.full(len(kinds), np.nan)
        """(taps,), NaN where not settled yet."""
        self._steps = steps
        names = sorted(set(kinds))
        self._kinds = np.array([names.index(kind) for kind in kinds])
        self._block = np.zeros((steps, len(kinds)))
        self._filled = np.zeros(len(kinds), dtype=np.int64)
        self._median = np.full(len(kinds), np.nan)  # of the block before the one being filled
        # Largest learning rates, NaN while not known: of the block being filled, of the one before,
        # and of the one that the baseline is from.
        self._rate = np.full(len(kinds), np.nan)
        self._rate_before = np.full(len(kinds), np.nan)
        self._rate_learnt = np.full(len(kinds), np.nan)

    def add(self, values: Array, accepted: Mask, learning_rate: float | None) -> None:
        """Take in one finite value for each tap in `accepted` that has no lasting baseline yet."""
        rate = np.nan if learning_rate is None else learning_rate
        with np.errstate(invalid="ignore"):  # an unknown rate is not higher
            open_ = np.isnan(self.values) | (rate > self._rate_learnt * _RELEARN_FACTOR)
        taps = np.flatnonzero(accepted & open_)
        if not taps.size:
            return
        self._block[self._filled[taps], taps] = values[taps]
        self._filled[taps] += 1
        self._rate[taps] = np.fmax(self._rate[taps], rate)
        full = taps[self._filled[taps] == self._steps]
        if full.size:
            self._judge(full)

    def set(self, values: dict[int, float]) -> None:
        """Take over values that were settled elsewhere, by tap; they stay until `clear`."""
        for tap, value in values.items():
            self.values[tap] = value
            self._rate_learnt[tap] = np.nan

    def clear(self) -> None:
        """Forget the baselines and learn them anew."""
        self.values[:] = np.nan
        self._filled[:] = 0
        for learnt in (self._median, self._rate, self._rate_before, self._rate_learnt):
            learnt[:] = np.nan

    def state(self) -> dict[str, Any]:
        """The baselines and what is being learnt."""
        return {
            "values": self.values.copy(),
            "block": self._block.copy(),
            "filled": self._filled.copy(),
            "median": self._median.copy(),
            "rate": self._rate.copy(),
            "rate_before": self._rate_before.copy(),
            "rate_learnt": self._rate_learnt.copy(),
        }

    def restore(self, state: dict[str, Any], own: npt.NDArray[np.int64], saved: list[int]) -> None:
        """Take over columns `saved` of a state as this baseline's taps `own`; the rest restart.

        Of a state with other block sizes only what is settled is kept.
        """
        self.clear()
        self.values[own] = state["values"][saved]
        self._rate_learnt[own] = state["rate_learnt"][saved]
        if len(state["block"]) == self._steps:
            self._block[:, own] = state["block"][:, saved]
            self._filled[own] = state["filled"][saved]
            self._median[own] = state["median"][saved]
            self._rate[own] = state["rate"][saved]
            self._rate_before[own] = state["rate_before"][saved]

    def _judge(self, taps: npt.NDArray[np.int64]) -> None:
        before = self._median[taps]
        median = np.median(self._block[:, taps], axis=0)
        self._median[taps] = median
        like = np.empty(len(self._kinds))
        for kind in np.unique(self._kinds[taps]):
            like[self._kinds == kind] = np.nanmedian(self._median[self._kinds == kind])
        with np.errstate(invalid="ignore"):
            rising = self._rate[taps] > self._rate_before[taps] * _RISING_FACTOR
            settled = (
                (median > 0)
                & ~rising
                & (median <= before * _SETTLED_FACTOR)
                & (median >= before / _SETTLED_FACTOR)
                & (median >= like[taps] * _LEAST_SHARE_OF_KIND)
            )
        learnt = taps[settled]
        self.values[learnt] = median[settled]
        self._rate_learnt[learnt] = self._rate[learnt]
        self._rate_before[taps] = self._rate[taps]
        self._rate[taps] = np.nan
        self._filled[taps] = 0
