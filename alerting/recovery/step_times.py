"""RUN_FOLDER/steps.log: when steps ended, for where only an alert's time is known.

A line each ten seconds: generation, step, Unix time. Nothing that goes wrong with it stops a
training.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from alerting.files import write_atomically

log = logging.getLogger(__name__)

FILE = "steps.log"
PACE_SECONDS = 10.0
"""Finer than a scrape interval, which is as fine as an alert's time is."""
KEPT = 10_000
"""A day: what is older, nobody asks for a recovery of."""


class StepTimes:
    """The journal of one run folder, kept by rank 0.

    Args:
        path: its file.
        clock: Unix seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._entries: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._generation = 0
        self._failed = False

    def stand_at(self, generation: int, step: int) -> None:
        """The run goes on from `step`, in this process or a new one.

        What was noted of this generation up to there still holds; the rest was another training.
        """
        self._entries.clear()
        self._entries.extend(e for e in self._read(generation) if e[0] < step)
        self._generation = generation
        self._entries.append((step, self._clock()))
        lines = "".join(self._line(*entry) for entry in self._entries)
        self._write(lambda: write_atomically(self._path, lines, durable=False))

    def note(self, step: int) -> None:
        """`step` has ended."""
        now = self._clock()
        # A clock that was set back makes an entry the sooner.
        if self._entries and 0 <= now - self._entries[-1][1] < PACE_SECONDS:
            return
        self._entries.append((step, now))
        self._write(self._append)

    def onset(self, asked_at: float, lag_seconds: float) -> int | None:
        """The step after the last one that had certainly ended before what was asked about began.

        Args:
            asked_at: when a receiver asked, Unix seconds of its clock.
            lag_seconds: by how much an alert may come after the step that it is about.

        Returns:
            None where no step of this generation is as old.
        """
        now = self._clock()
        # A clock that is apart from this one finds nothing, or too late a step. What was asked is
        # taken up within seconds, unless this run was down: so this clock's own is the second best.
        for moment in (min(asked_at, now), now):
            before = [step for step, ended in self._entries if ended <= moment - lag_seconds]
            if before:
                return max(before) + 1
        return None

    def _append(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(self._line(*self._entries[-1]))

    def _line(self, step: int, ended: float) -> str:
        return f"{self._generation} {step} {ended:.3f}\n"

    def _read(self, generation: int) -> list[tuple[int, float]]:
        found = []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return []
        for line in lines:
            try:
                of, step, ended = line.split()
                if int(of) == generation:
                    found.append((int(step), float(ended)))
            except ValueError:
                # Cut short by a crash; the lines before it are whole.
                continue
        return found

    def _write(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False
