"""The journal: every sampled step on disk, for the steps that no scrape saw.

The training thread only puts a step's arrays into a queue; a thread of the journal's own makes
lines of them and writes them. Whatever becomes of the disk costs records and never training.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from act_exporter.records import Sampled, Writing
from act_exporter.rotation import Files, Limits
from act_exporter.rows import Array, Statistics
from act_exporter.taps import Tap

log = logging.getLogger(__name__)

# Lines in one write: a step of a usual model, 70 kB.
_BATCH = 256

# Lines that fewer than a batch wait at most, so that `tail -f` shows a slow run as well.
_WAIT_SECONDS = 1.0

# Records that may wait for the disk: 10 MB of arrays, and ten seconds of ten steps a second of a
# thousand taps.
_QUEUED_RECORDS = 100_000

_Entry = Sampled | list[dict[str, Any]]
"""A sampled step, or notes that belong together."""


class OnError(Protocol):
    """Told of an error: the stage, which is always "journal", and the error."""

    def __call__(self, stage: str, error: Exception) -> None: ...


class Journal:
    """Writes a folder of JSON lines, one a watched tensor and sampled step.

    Nothing here raises or waits in the training thread, but for `close`. A forked child (a
    DataLoader's worker) writes nothing.

    Args:
        folder: where the files lie; created, with mode 0750, where missing.
        run: the run's name.
        rank: the process' rank.
        taps: the taps, in the order of the arrays.
        on_error: told of the first error of an outage of the disk, in the journal's thread.
        limits: how much is kept.
        clock: Unix seconds; of the names and ages of files, not of the records.

    Attributes:
        records: lines written.
        bytes: their size, before compression.
        dropped: lines lost, by reason: "queue" (the writer was too slow), "write" (the disk
            was full, read-only or gone).
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        rank: int,
        taps: Sequence[Tap],
        on_error: OnError,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.records = 0
        self.bytes = 0
        self.dropped = {"queue": 0, "write": 0}
        self._folder = folder
        self._on_error = on_error
        self._writing = Writing(run, rank, taps)
        self._files = Files(folder, rank, limits or Limits(), clock)
        # Its put neither waits nor takes a lock that a fork could leave held; the bound is ours.
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._limit = max(_QUEUED_RECORDS // max(len(taps), 1), 1)
        self._failing = False
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="act-journal", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a trainer that ends without closing loses nothing

    def write(
        self,
        step: int,
        time: float,
        generation: int,
        statistics: Statistics,
        nonfinite: Array,
        called: npt.NDArray[np.bool_],
        holder: Array | None = None,
    ) -> None:
        """Write a line for each tap that ran; the arrays must not be changed afterwards.

        Args:
            step: the step.
            time: when it ended, Unix seconds.
            generation: 0, and one more with each rollback.
            statistics: arrays (taps,).
            nonfinite: the elements of this step by kind, (kinds, taps).
            called: which taps ran at this step, (taps,).
            holder: which rank has the absmax, (taps,), where ranks were joined.
        """
        sampled = Sampled(step, time, generation, statistics, nonfinite, called, holder)
        if not self._put(sampled):
            self.dropped["queue"] += int(np.count_nonzero(called))

    def note(self, kind: str, /, step: int, time: float, generation: int, **fields: Any) -> None:
        """Write a line on something that happened once; `act_exporter.records` has the kinds.

        Args:
            kind: what happened.
            step: at which step.
            time: when, Unix seconds.
            generation: 0, and one more with each rollback.
            fields: whatever else there is to say, as JSON knows it.
        """
        self.note_each(kind, step, time, generation, [fields])

    def note_each(
        self,
        kind: str,
        step: int,
        time: float,
        generation: int,
        several: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write a line for each of `several`, which hold what the lines do not have in common."""
        common = {"note": kind, "step": step, "time": time, "generation": generation}
        if several and not self._put([{**common, **fields} for fields in several]):
            self.dropped["queue"] += len(several)

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, for `timeout` seconds at most; a second call does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("journal: not all was written within %g s; the rest is lost", timeout)

    def _put(self, entry: _Entry) -> bool:
        """Whether the entry is taken care of; a closed journal and a child's want none."""
        if self._closed or os.getpid() != self._process:
            return True
        # Nobody else puts, so that between the two lines the queue can only get shorter.
        if self._queue.qsize() >= self._limit:
            return False
        self._queue.put(entry)
        return True

    # In the journal's own thread

    def _work(self) -> None:
        self._attempt(self._files.tidy)
        lines: list[str] = []
        due = 0.0
        ended = False
        while not ended:
            try:
                entry = self._queue.get(timeout=max(due - time.monotonic(), 0) if lines else None)
            except queue.Empty:
                pass
            else:
                due = due if lines else time.monotonic() + _WAIT_SECONDS
                ended = entry is None
                lines += self._lines_of(entry)
            while len(lines) >= _BATCH or (lines and (ended or time.monotonic() >= due)):
                self._append(lines[:_BATCH])
                del lines[:_BATCH]
        self._attempt(self._files.close)

    def _lines_of(self, entry: _Entry | None) -> list[str]:
        if entry is None:
            return []
        try:
            if isinstance(entry, Sampled):
                return self._writing.lines(entry)
            return [self._writing.note(note) for note in entry]
        except Exception as error:
            self.dropped["write"] += (
                int(np.count_nonzero(entry.called)) if isinstance(entry, Sampled) else len(entry)
            )
            self._tell(error)
            return []

    def _append(self, lines: list[str]) -> None:
        data = "".join(lines).encode()
        if not self._attempt(lambda: self._files.append(data)):
            self.dropped["write"] += len(lines)
            return
        self.records += len(lines)
        self.bytes += len(data)
        self._attempt(self._files.rotate)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether it went well; the first error since something did is told of."""
        try:
            action()
        except Exception as error:
            if not self._failing:
                self._tell(error)
            self._failing = True
            return False
        if self._failing:
            log.info("journal: written to %s again", self._folder)
        self._failing = False
        return True

    def _tell(self, error: Exception) -> None:
        if isinstance(error, OSError):
            # Not the file, whose name is another each time: the same cause is to be one log line.
            error = OSError(error.errno, error.strerror, str(self._folder))
        self._on_error("journal", error)
