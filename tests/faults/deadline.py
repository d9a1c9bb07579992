"""How long an experiment may take."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 120
"""One that hangs must end; the longest starts torchrun with four ranks twice."""


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)
