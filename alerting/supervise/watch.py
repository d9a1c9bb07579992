"""What the run folder says of a trainer: whether it moves, how far it came, whether it halted.

Only what has changed since this process of it was started counts, by this machine's monotonic
clock: the folder may hold a former process's words, and another machine's clock may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from alerting.control import ControlDirectory, Request, Status
from alerting.exceptions import ControlError
from alerting.heartbeat import Heartbeat, read_heartbeat
from alerting.supervise.budget import Position
from alerting.supervise.settings import Limits


class Watch:
    """Watches one run folder.

    Args:
        run_folder: the guard's.
        limits: how long to wait for what.
        clock: monotonic seconds.
    """

    def __init__(
        self, run_folder: Path, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control = ControlDirectory(run_folder / "control")
        self._limits = limits
        self._clock = clock
        # Told of once: were its answer lost, each restart would be followed by the next.
        self._overdue: str | None = None
        self.begin()

    def begin(self) -> None:
        """A process of the trainer is started now."""
        self._begun_with = self._read_status()
        self._first = self._last = read_heartbeat(self._control.path)
        self._last_at = self._clock()
        self._request: str | None = None
        self._request_at = 0.0

    @property
    def state(self) -> str | None:
        """The state that this process has published, None where it hasn't published any."""
        status = self._read_status()
        return None if status is None or status == self._begun_with else status.state

    @property
    def position(self) -> Position | None:
        """Generation and step that this process came to, None where it finished no step."""
        beat = self._look()
        return beat.position if beat is not None else None

    def complaint(self) -> str | None:
        """Why the trainer is to be taken for hung, as a clause; None where it is not."""
        beat, state, now = self._look(), self.state, self._clock()
        if state in ("finished", "halted"):
            # No more steps to wait for; what a script does after its loop takes its own time.
            return None
        silent = now - self._last_at
        if beat is None:
            limit = self._limits.start_seconds
            return (
                f"no step has ended {silent:.0f} s after its start" if 0 < limit < silent else None
            )
        limit = self._limits.stall_seconds
        if 0 < limit < silent:
            return f"no step has ended for {silent:.0f} s, the last was step {beat.step}"
        return None if state == "recovering" else self._complain_of_request(now)

    def _complain_of_request(self, now: float) -> str | None:
        request, limit = self._read_request(), self._limits.request_seconds
        if request is None or request.id != self._request:
            self._request, self._request_at = (request.id if request else None), now
            return None
        waiting = now - self._request_at
        if not 0 < limit < waiting or request.id == self._overdue:
            return None
        self._overdue = request.id
        return f"request {request.id} to recover has not been taken up for {waiting:.0f} s"

    def _look(self) -> Heartbeat | None:
        """The newest beat of this process."""
        beat = read_heartbeat(self._control.path)
        if beat is not None and beat != self._last:
            self._last, self._last_at = beat, self._clock()
        return self._last if self._last != self._first else None

    def _read_status(self) -> Status | None:
        try:
            return self._control.status()
        except ControlError:
            return None

    def _read_request(self) -> Request | None:
        try:
            return self._control.open_request("recover")
        except ControlError:
            # The guard sets it aside.
            return None
