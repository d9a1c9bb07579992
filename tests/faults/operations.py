"""What a process does to the files of a run folder, and what strikes at one of these operations.

Python tells its audit hooks of each open, rename, link and removal before it happens. So a process
can be killed, or its disk fail, at any place of the shipped code, and all places can be counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_DATA = (".pt", ".distcp", ".metadata")
_OF_A_PROCESS = re.compile(r"\.\d+\.tmp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """Where the fault strikes, and what it does.

    Attributes:
        at: the number of the operation, from 1; or patterns of operations, looked for one after the
            other: it strikes before the one that matches the last.
        error: the system's error number that the operation fails with; 0 kills.
        lasts: how many further operations fail with it that would need space.
        rank: the rank whose operations are meant.
        victim: the rank that is killed, this one by default.
    """

    at: int | tuple[str, ...]
    error: int = 0
    lasts: int = 0
    rank: int = 0
    victim: int | None = None


class FileOperations:
    """Of this process, from now on to its end: no audit hook can be taken away.

    Args:
        folder: the run folder; operations elsewhere are of no interest.
        strike: what strikes, or None.
        processes: has the file `pid.RANK` of each rank.

    Attributes:
        seen: all so far, as "write checkpoints/step-00000005-g0/manifest.json".
    """

    def __init__(self, folder: Path, strike: Strike | None, processes: Path) -> None:
        self.seen: list[str] = []
        self._folder = str(folder)
        self._strike = strike
        self._processes = processes
        self._found = 0
        self._failures_left = 0
        self._deaf = False
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """While inside, operations are the experimenter's."""
        self._deaf = True
        try:
            yield
        finally:
            self._deaf = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._deaf:
            return
        operation = self._describe(event, arguments)
        if operation is None:
            return
        self.seen.append(operation)
        if self._strike is None:
            return
        if self._due(operation):
            self._failures_left = self._strike.lasts
            self._do(self._strike)
        elif self._failures_left and operation.startswith(("write ", "mkdir ", "link ")):
            self._failures_left -= 1
            self._do(self._strike)

    def _due(self, operation: str) -> bool:
        assert self._strike is not None
        at = self._strike.at
        if isinstance(at, int):
            return len(self.seen) == at
        if self._found < len(at) and fnmatch(operation, at[self._found]):
            self._found += 1
            return self._found == len(at)
        return False

    def _do(self, strike: Strike) -> None:
        if strike.error:
            raise OSError(strike.error, os.strerror(strike.error))
        with self.deaf():
            pid = os.getpid()
            if strike.victim is not None:
                pid = int((self._processes / f"pid.{strike.victim}").read_text())
        os.kill(pid, signal.SIGKILL)

    def _describe(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "os.remove" and arguments[1] != -1:
            # shutil.rmtree names files relative to their folder; nothing else here does.
            return f"remove {arguments[0]}"
        if event in ("os.rename", "os.link"):
            old, new = map(self._name, arguments[:2])
            return f"{event[3:]} {old} -> {new}" if old and new else None
        if event not in ("open", "os.remove", "os.mkdir", "os.rmdir"):
            return None
        name = self._name(arguments[0])
        if name is None:
            return None
        if event != "open":
            return f"{event[3:]} {name}"
        flags = arguments[2]
        if flags & os.O_DIRECTORY:
            return f"sync {name}"
        if flags & (os.O_WRONLY | os.O_RDWR):
            return f"write {name}"
        return f"read {name}" if name.endswith(_DATA) else None

    def _name(self, path: object) -> str | None:
        if not isinstance(path, str | os.PathLike):
            return None
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith(self._folder):
            return None
        if "heartbeat" in text:
            # It goes by the clock, and operations must have the same numbers in each run.
            return None
        return _OF_A_PROCESS.sub(".tmp", text[len(self._folder) + 1 :]) or "."
