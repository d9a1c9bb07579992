"""When the next periodic checkpoint is due."""

from __future__ import annotations

import time


class Schedule:
    """Due after so many steps or so many seconds, whichever comes first."""

    def __init__(self, *, steps: int, seconds: float) -> None:
        self._steps = steps
        self._seconds = seconds
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from step `step` and from now."""
        self._step, self._time = step, time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be made at the boundary after `step`."""
        return step - self._step >= self._steps or time.monotonic() - self._time >= self._seconds
