"""The trainer's processes: its own, and all that it starts, in whatever session. Linux only.

torchrun puts each worker into a session of its own, out of reach of a signal to the group. So this
process adopts what loses its parent (a "subreaper"), and what has to die is found among its own
descendants in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_LEASH = str(Path(__file__).with_name("leash.py"))
_KILL_SECONDS = 30.0
"""What SIGKILL has not ended by then waits in the kernel for a device or a network file system."""
_LOOK_AGAIN_SECONDS = 0.01


class TrainerProcesses:
    """The trainer and its descendants. This process may have no other children."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._pid = 0
        self._code: int | None = None

    def start(self, command: Sequence[str]) -> int:
        """Start the command in a session of its own; its process id.

        Raises:
            OSError: there is no process to be had.
        """
        # Isolated: neither the working directory nor PYTHONPATH has a say before the exec.
        leash = [sys.executable, "-I", _LEASH, str(os.getpid()), *command]
        self._code = None
        self._pid = os.posix_spawn(leash[0], leash, os.environ, setsid=True, setsigmask=())
        return self._pid

    def poll(self) -> int | None:
        """The trainer's exit code, minus a signal's number, or None while it runs."""
        with contextlib.suppress(ChildProcessError):
            while True:
                # All of them: adopted processes end too, and would stay as zombies.
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def signal(self, number: int) -> None:
        """To the trainer's own process."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def signal_group(self, number: int) -> None:
        """To the trainer and what has stayed in its group."""
        # Not waited for yet, so the group is still its own.
        if self.poll() is None:
            os.killpg(self._pid, number)

    def kill(self) -> None:
        """End all of them now, and wait until they are gone."""
        deadline = time.monotonic() + _KILL_SECONDS
        self.poll()
        while left := _descendants(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                log.error("Processes %s do not end, even when killed.", left)
                return
            time.sleep(_LOOK_AGAIN_SECONDS)
            self.poll()


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; state and parent follow it.
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found
