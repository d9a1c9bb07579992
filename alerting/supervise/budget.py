"""RUN_FOLDER/supervise.json: how many restarts have brought nothing, over all supervisors.

systemd or Slurm may start a supervisor anew whenever one ends, so its memory cannot be its own.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from alerting.files import write_atomically

log = logging.getLogger(__name__)

NAME = "supervise.json"
VERSION = 1

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
"""A file system or a node that comes back does so within minutes; waiting longer wins nothing."""

Position = tuple[int, int]
"""Generation and step."""


class RestartBudget:
    """Counts the restarts since the run last got further than ever before.

    Args:
        run_folder: where the count is kept; None keeps it in memory.
        max_restarts: of those restarts.
    """

    def __init__(self, run_folder: Path | None, max_restarts: int) -> None:
        self._path = run_folder / NAME if run_folder is not None else None
        self._max_restarts = max_restarts
        self._used = 0
        self._furthest: Position | None = None
        if self._path is not None:
            self._load(self._path)

    @property
    def left(self) -> int:
        """How many more restarts without progress there are."""
        return max(0, self._max_restarts - self._used)

    def spend(self, position: Position | None) -> float | None:
        """Pay for a restart of a trainer that came as far as `position`.

        Args:
            position: generation and step, or None where nothing is known of either.

        Returns:
            Seconds to wait before it, or None where the budget is spent. After progress a restart
            is free and immediate, and the budget is whole again.
        """
        if position is not None and (self._furthest is None or position > self._furthest):
            self._furthest, self._used = position, 0
            self._save()
            return 0.0
        if self.left == 0:
            return None
        # Before the restart: a supervisor that is killed in it must not forget it.
        self._used += 1
        self._save()
        return float(min(FIRST_WAIT_SECONDS * 2 ** (self._used - 1), LONGEST_WAIT_SECONDS))

    def _load(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            self._used = int(content["restarts"])
            furthest = content["furthest"]
            self._furthest = (int(furthest[0]), int(furthest[1])) if furthest else None
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.warning("%s cannot be read (%s): restarts are counted anew.", path, error)

    def _save(self) -> None:
        if self._path is None:
            return
        content = {"version": VERSION, "restarts": self._used, "furthest": self._furthest}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content) + "\n")
        except OSError as error:
            # A full disk is no reason to leave a trainer down.
            log.warning("%s cannot be written (%s): a new supervisor counts anew.", NAME, error)
