"""A token bucket: so many at once, and so many a minute after that."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Tokens that come at a steady rate and are kept up to `capacity`; used by one thread.

    In any minute no more than `capacity + per_minute` are taken. It begins with one token: a
    process that is restarted again and again must not have a full bucket each time.

    Args:
        capacity: the most that can be taken at once.
        per_minute: how many come back in a minute.
        clock: seconds that never go back.
    """

    def __init__(
        self, capacity: int, per_minute: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._per_second = per_minute / 60
        self._clock = clock
        self._tokens = 1.0
        self._counted_at = clock()

    def take(self) -> float:
        """Take a token and return 0, or take none and return in how many seconds there is one."""
        now = self._clock()
        gained = (now - self._counted_at) * self._per_second
        self._tokens = min(self._capacity, self._tokens + gained)
        self._counted_at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second
