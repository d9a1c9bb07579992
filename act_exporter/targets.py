"""The exporter's entry in a folder that Prometheus discovers targets from.

One file a rank, in the format of `file_sd_configs`
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config), so that
runs come and go without anybody editing prometheus.yml. It is taken away when the exporter closes.
A process that was killed leaves it behind, as it should: a listed target that does not answer is
what ActExporterDown reports. Files that nobody has touched for long are somebody's of whom nobody
is going to hear again; the next run that begins removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
from pathlib import Path
from urllib.parse import quote

_REFRESH_SECONDS = 60.0

STALE_SECONDS = 3600.0
"""A file is stale when it was not refreshed for so long: sixty chances missed. The alarm about a
process that was killed is raised after 2 minutes and told anew each hour, so it was heard."""

_ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not listened on


class TargetFile:
    """The file of one exporter. What fails raises OSError, after which it can be tried again.

    Args:
        folder: where Prometheus looks; created where missing.
        run: the run's name.
        rank: the process' rank, or "all".
        scheme: "http" or "https".
        host: the address that the page is served on. One that stands for all of the machine's is
            listed by the machine's own name, which Prometheus must be able to resolve.
        port: the page's port.
    """

    def __init__(
        self, folder: Path, *, run: str, rank: str, scheme: str, host: str, port: int
    ) -> None:
        host = socket.gethostname() if host in _ANY_ADDRESS else host
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        group = {"targets": [target], "labels": {"run": run, "rank": rank, "__scheme__": scheme}}
        self._content = json.dumps([group]) + "\n"
        # A run's name may hold what a file's cannot.
        self._path = folder / f"act-{quote(run, safe='')}-rank{rank}.json"
        self._inode: int | None = None
        self._process = os.getpid()
        self._due = 0.0

    def write(self) -> None:
        """Put the file there, whole; one that a former process of this rank left is replaced."""
        self._due = time.monotonic() + _REFRESH_SECONDS
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not a name that `*.json` matches.
        part = self._path.with_name(f"{self._path.name}.{self._process}.part")
        try:
            part.write_text(self._content)
            part.chmod(0o644)  # Prometheus is another user, and there is nothing secret in it
            self._inode = part.stat().st_ino
            part.replace(self._path)
        finally:
            part.unlink(missing_ok=True)
        atexit.register(self.remove)

    def refresh(self) -> None:
        """Say once a minute that the process lives; list it again where somebody unlisted it."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _REFRESH_SECONDS
        try:
            if self._is_ours():
                os.utime(self._path)
        except FileNotFoundError:
            self.write()

    def remove(self) -> None:
        """Take the file away, unless another process has put its own there; twice does nothing."""
        # A DataLoader's forked worker ends long before the run does.
        if self._inode is None or os.getpid() != self._process:
            return
        atexit.unregister(self.remove)
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._path.unlink()
        self._inode = None

    def _is_ours(self) -> bool:
        return self._path.stat().st_ino == self._inode


def remove_stale(folder: Path) -> list[Path]:
    """Remove the files that nobody has refreshed for `STALE_SECONDS`; the paths of those."""
    removed = []
    for path in folder.glob("act-*.json"):
        with contextlib.suppress(OSError):  # another one was faster, or may not
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
                removed.append(path)
    return removed
