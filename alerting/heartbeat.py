"""RUN_FOLDER/control/heartbeat.json: the guard's sign that steps end, for a supervisor.

Standard library only: the trainer imports this module, and so does the supervisor.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from alerting.files import write_atomically

log = logging.getLogger(__name__)

NAME = "heartbeat.json"

PACE_SECONDS = 1.0
"""Fine enough to notice a hang within seconds, and nothing beside a step that takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """One sign of progress.

    Attributes:
        generation: of the run; one more with each rollback, after which steps count from less.
        step: the last finished step.
        pid: the trainer's process.
        host: the machine that it runs on.
        time: Unix seconds of that machine, for people: clocks of two machines are not compared.
    """

    generation: int
    step: int
    pid: int
    host: str
    time: float

    @property
    def position(self) -> tuple[int, int]:
        """(generation, step): grows as the run gets on, also over a rollback."""
        return self.generation, self.step


class HeartbeatFile:
    """The guard's end: writes beats, and never stops a training.

    Args:
        control: the run's control directory.
    """

    def __init__(self, control: Path) -> None:
        self._path = control / NAME
        self._host = socket.gethostname()
        self._due = float("-inf")
        self._failed = False

    def beat(self, generation: int, step: int) -> None:
        """Say that `step` has ended, at most once a second."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + PACE_SECONDS
        beat = Heartbeat(
            generation=generation, step=step, pid=os.getpid(), host=self._host, time=time.time()
        )
        try:
            # Not durable: it is of no use after a power cut, and syncing would hold up the step.
            write_atomically(self._path, json.dumps(dataclasses.asdict(beat)) + "\n", durable=False)
        except OSError as error:
            if not self._failed:
                log.warning("step %d: no heartbeat for a supervisor: %s", step, error)
            self._failed = True
        else:
            self._failed = False


def read_heartbeat(control: Path) -> Heartbeat | None:
    """The last beat in that control directory; None where there is none, or none to be read."""
    try:
        beat = Heartbeat(**json.loads((control / NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    whole = all(type(number) is int for number in (*beat.position, beat.pid))
    return beat if whole else None
