"""How long an experiment may take."""

from __future__ import annotations

from collections.abc import Callable

from deploy.demo.servers import wait_for

SECONDS = 120
"""One that hangs must end; the longest starts torchrun with four ranks twice."""


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    wait_for(holds, "what never came", timeout=SECONDS, interval=0.001)
