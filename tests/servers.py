"""Real servers in tests: where their binaries lie, ports, waiting, and an end for each process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
LOG_TAIL_BYTES = 4000

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
    timeout: float = 30.0,
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


@dataclass(frozen=True, slots=True)
class Server:
    """A started process and the file that its standard output and error go to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """The end of its log, for messages about failures."""
        data = self.log.read_bytes()[-LOG_TAIL_BYTES:]
        return f"--- end of {self.log} ---\n{data.decode(errors='replace')}"

    def wait_for(self, probe: Callable[[], T], what: str, timeout: float = 30.0) -> T:
        """As the function of that name, but fails at once when the process has ended."""

        def probe_while_alive() -> T:
            if self.process.poll() is not None:
                # No OSError, so the wait ends here.
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}")
            return probe()

        return wait_for(probe_while_alive, f"{what} of {self.name}", timeout)

    def stop(self, patience: float = 10.0) -> None:
        """SIGTERM to this very process, and SIGKILL when it has not ended after `patience`."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash or the kernel's out-of-memory killer would end it."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(
    name: str,
    argv: Sequence[str | Path],
    folder: Path,
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start a process, log to `folder/NAME.log`, and end it by its process id on leaving.

    `env` replaces the whole environment, as in subprocess. Whatever fails inside carries the end
    of the log as a note, so that a failed test says what the server said.
    """
    log = folder / f"{name}.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [str(part) for part in argv],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
        )
    server = Server(name, process, log)
    try:
        yield server
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.stop()
