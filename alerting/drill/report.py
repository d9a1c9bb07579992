"""What a drill says of each hop, as it comes, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TextIO, TypeVar

from alerting.text import clean

POLL_SECONDS = 0.5
"""People do not notice half a second."""
WORD_SECONDS = 10.0
"""How often it is said what is waited for."""

State = Literal["ok", "failed", "waiting", "skipped"]
T = TypeVar("T")


class Report:
    """Lines about hops.

    Args:
        out: where they go.
        wait_seconds: how long to wait for all of them, from `start` on.

    Attributes:
        is_broken: whether a hop has failed.
    """

    def __init__(self, out: TextIO, wait_seconds: float) -> None:
        self.is_broken = False
        self._out = out
        self._wait_seconds = wait_seconds
        self._deadline = 0.0

    def start(self) -> None:
        """From now on time counts."""
        self._deadline = time.monotonic() + self._wait_seconds

    def tell(self, state: State, hop: str, sentence: str) -> None:
        """Say what is known of a hop."""
        # A run's name is what somebody wrote into a file: it must not steer the terminal.
        self._out.write(f"{state:<9}{hop}: {clean(sentence)}\n")
        self._out.flush()

    def fail(self, hop: str, sentence: str) -> None:
        """Say what is broken, and what to do."""
        self.is_broken = True
        self.tell("failed", hop, sentence)

    def wait(self, hop: str, probe: Callable[[], T | None], what: str) -> T | None:
        """What `probe` finds, or None where it finds nothing in time; looks once at least."""
        word = time.monotonic() + WORD_SECONDS
        while (found := probe()) is None:
            now = time.monotonic()
            if now >= self._deadline:
                return None
            if now >= word:
                self.tell("waiting", hop, f"{what}, up to {self._deadline - now:.0f} s more")
                word = now + WORD_SECONDS
            time.sleep(POLL_SECONDS)
        return found
