"""Processes of the demo and the tests: where binaries lie, ports, waiting, and an end for each."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60.0
"""For what takes a second or two on a quiet machine: a busy one with a slow disk gets there too."""
_LOG_TAIL_BYTES = 4000
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

T = TypeVar("T")


def binary(name: str) -> Path:
    """The path of prometheus, promtool, alertmanager or amtool, as `make setup` linked it."""
    path = REPOSITORY / ".servers" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `make setup` first")
    return path


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(
    probe: Callable[[], T],
    what: str,
    timeout: float = WAIT_SECONDS,
    interval: float = 0.05,
) -> T:
    """Ask `probe` until its answer is true, and return that answer.

    An OSError in the probe (connection refused, file not there yet; the errors of urllib and
    requests are such) counts as "not yet".

    Raises:
        TimeoutError: it was not true within `timeout` seconds; names `what`, the last answer or
            the last error.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = probe()
            if answer:
                return answer
            last = f"the last answer was {answer!r}"
        except OSError as error:
            last = f"the last error was {error!r}"
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}; {last}")
        time.sleep(interval)


class Server:
    """A process that logs to `folder/NAME.log`; it can be ended and started again.

    Args:
        name: for messages and the log.
        argv: program and arguments.
        folder: place of the log, and working directory unless `cwd` is given.
        env: replaces the whole environment, as in subprocess.
        cwd: working directory.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        folder: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._argv = [str(part) for part in argv]
        self._cwd = cwd or folder
        self._env = env
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own, so that Ctrl-C reaches only who started it."""
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self._argv,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                # Safe beside threads: it makes one system call and takes no lock.
                preexec_fn=end_with_parent if _LIBC is not None else None,  # noqa: PLW1509
            )

    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.poll() if self.process is not None else None

    def tail(self) -> str:
        """The end of its log, for messages about failures."""
        data = self.log.read_bytes()[-_LOG_TAIL_BYTES:]
        return f"--- end of {self.log} ---\n{data.decode(errors='replace')}"

    def wait_for(self, probe: Callable[[], T], what: str, timeout: float = WAIT_SECONDS) -> T:
        """As the function of that name, but fails at once when the process has ended."""

        def probe_while_alive() -> T:
            code = self.returncode()
            if code is not None:
                # No OSError, so the wait ends here.
                raise RuntimeError(f"{self.name} ended with {code}\n{self.tail()}")
            return probe()

        return wait_for(probe_while_alive, f"{what} of {self.name}", timeout)

    def stop(self, patience: float = 30.0) -> None:
        """SIGTERM to this very process, and SIGKILL when it has not ended after `patience`."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash or the kernel's out-of-memory killer would end it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def end_with_parent() -> None:
    """Have the kernel end the process when its starter dies, even by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def running(
    name: str,
    argv: Sequence[str | Path],
    folder: Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Server]:
    """A started `Server`, ended by its process id on leaving.

    Whatever fails inside carries the end of the log as a note, so that a failed test says what the
    server said.
    """
    server = Server(name, argv, folder, env, cwd)
    server.start()
    try:
        yield server
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.stop()
