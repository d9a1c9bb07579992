"""What looking costs, measured by the run itself, and the interval that keeps to a budget.

The overhead is the median duration of sampled steps minus that of unsampled ones: everything that
looking adds is in it, on any device and under any compiler, with no clock in a hook.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Steps of each kind whose durations are compared. With 24 and a step that jitters by 3 %, a
# difference of 1 % is known to about 1.1 % (1.25 * sigma / sqrt(n), both medians).
_KEPT = 24

# From so many of each there is a ratio to show; below, a median says nothing.
_LEAST = 12

# At least one step in so many stays unsampled, or there is nothing to compare with.
_UNSAMPLED_EVERY = 50

# The budget is exceeded when the difference is by so many standard errors above it: a busy machine
# must not be taken for an expensive exporter. Of 200 simulated runs of 5,000 steps that jitter by
# 3 %, with one step in 50 unsampled, none was (3 with two standard errors); a cost of 3 % was found
# within them in 87, of the others later.
_SURE = 3.0


class Overhead:
    """Durations of the last steps, sampled and not.

    Args:
        budget: largest share of a step that looking may cost, or None for no limit.
        sample_every: the interval asked for, in steps.
    """

    def __init__(self, budget: float | None, sample_every: int) -> None:
        self._budget = budget
        self.sample_every = sample_every
        """The interval in force."""
        self._durations: dict[bool, deque[float]] = {
            True: deque(maxlen=_KEPT),
            False: deque(maxlen=_KEPT),
        }
        self._fresh = {True: 0, False: 0}  # since the last judgement
        self._ended: float | None = None
        self._steps = 0
        self._measured: tuple[float, float] | None = None

    def samples(self, distance: int) -> bool:
        """Whether the step that begins is sampled, `distance` steps after the last one that was."""
        rests = self._steps % _UNSAMPLED_EVERY == _UNSAMPLED_EVERY - 1
        return distance >= self.sample_every and not rests

    def step(self, now: float, sampled: bool) -> bool:
        """A step has ended at `now` (seconds); whether the interval was raised because of it."""
        self._steps += 1
        if self._ended is not None:
            self._durations[sampled].append(now - self._ended)
            self._fresh[sampled] += 1
            if not sampled:  # with each of the rare ones, since it costs a few medians
                self._measured = self._extra()
        self._ended = now
        # Judged on new steps each time: who looks at every step finds chance sooner or later.
        if self._budget is None or min(self._fresh.values()) < _KEPT:
            return False
        self._fresh = {True: 0, False: 0}
        if not self._exceeded(self._budget):
            return False
        self.sample_every *= 2
        for durations in self._durations.values():
            durations.clear()
        return True

    def pause(self) -> None:
        """What comes next is no step: a save, an evaluation, a rollback."""
        self._ended = None

    def ratio(self) -> float | None:
        """The share of training time that looking costs, or None while it is not known.

        Of a sampled step's extra time each step bears its part; never below 0.
        """
        return None if self._measured is None else max(self._measured[0], 0.0)

    def _exceeded(self, budget: float) -> bool:
        measured = self._extra()
        return measured is not None and measured[0] - _SURE * measured[1] > budget

    def _extra(self) -> tuple[float, float] | None:
        """The extra share of a step and its standard error."""
        sampled, unsampled = self._durations[True], self._durations[False]
        if min(len(sampled), len(unsampled)) < _LEAST:
            return None
        usual = statistics.median(unsampled)
        if usual <= 0:
            return None
        extra = (statistics.median(sampled) - usual) / usual
        error = math.hypot(_error(sampled), _error(unsampled)) / usual
        return extra / self.sample_every, error / self.sample_every


def _error(durations: deque[float]) -> float:
    """Standard error of the median, from the median deviation, which outliers leave alone."""
    middle = statistics.median(durations)
    sigma = 1.4826 * statistics.median(abs(duration - middle) for duration in durations)
    return 1.2533 * sigma / math.sqrt(len(durations))
