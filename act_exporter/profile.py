"""The profile over depth: which place jumps against those before it.

Growth with depth is healthy (a residual stream grows by about sqrt(2) a sublayer), and some models
carry massive activations from one block on for ever. So each tap is compared with its own baseline
first, and what the quotient is elsewhere in the model second.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np

from act_exporter.rows import Array
from act_exporter.taps import Tap

# Times the baseline from which a place counts as high in a plateau: a tenth of the hard rule, and
# five times what a settled tap wanders.
_HIGH = 10.0


class Profile:
    """Groups of like taps, one of each block.

    Args:
        taps: the taps, in the order of all arrays.
    """

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._kinds: dict[str, list[int]] = {}
        for index, tap in enumerate(taps):
            self._kinds.setdefault(tap.kind, []).append(index)

    def jump_ratio(self, peak: Array, baseline: Array, depth: Array) -> Array:
        """Each tap's peak over its baseline, against the median of its like in the blocks before.

        In health it is about 1. All arrays are (taps,); NaN for the first of its kind, and where
        there is no baseline. Run by scrapes, not by the training thread.
        """
        ratio = peak / baseline
        jump = np.full(len(ratio), np.nan)
        for taps in self._kinds.values():
            before: list[float] = []  # sorted
            for tap in sorted(taps, key=depth.__getitem__):
                if np.isnan(ratio[tap]):
                    continue
                if before:
                    jump[tap] = ratio[tap] / _median(before)
                insort(before, float(ratio[tap]))
        return jump

    def plateau(self, peak: Array, baseline: Array, depth: Array) -> tuple[float, float] | None:
        """From which depth to which activations stay high: the longest row of like taps that are.

        None where there are no two in a row. Run by scrapes, as `jump_ratio` is.
        """
        with np.errstate(invalid="ignore"):
            high = peak / baseline > _HIGH
        longest: list[int] = []
        for taps in self._kinds.values():
            row: list[int] = []
            for tap in sorted(taps, key=depth.__getitem__):
                row = [*row, tap] if high[tap] else []
                longest = max(longest, row, key=len)
        if len(longest) < 2:
            return None
        return float(depth[longest[0]]), float(depth[longest[-1]])


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
