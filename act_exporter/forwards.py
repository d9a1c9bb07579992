"""Forwards that no optimizer's step follows: what is wrong then must be seen all the same."""

from __future__ import annotations

# A step that gathers this many times as many forwards as any step before it, and at least so many,
# is not gathering micro-batches: the optimizer is being skipped (a loss scaler after an overflow, a
# loop that drops bad losses), and what is wrong must be seen all the same.
_STUCK_FACTOR = 2
_STUCK_FORWARDS = 8
# Before the first step it is not known how many are usual; a scaler that starts too high skips a
# dozen, large runs accumulate over a hundred.
_STUCK_AT_FIRST = 256


class Forwards:
    """Counts forwards of training since the last step.

    Attributes:
        count: so many.
    """

    def __init__(self) -> None:
        self.count = 0
        self._usual = 0  # the most that a step had

    def is_stuck(self) -> bool:
        """Whether far more of them than usual came; from then on as often as steps would have."""
        usual = self._usual
        limit = max(_STUCK_FACTOR * usual, _STUCK_FORWARDS) if usual else _STUCK_AT_FIRST
        if self.count < limit:
            return False
        self.count -= max(usual, 1)
        return True

    def end_step(self) -> None:
        """A step has ended: what it had of forwards is usual."""
        self._usual = max(self._usual, self.count)
        self.count = 0
