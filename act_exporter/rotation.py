"""The files of a journal: a new one each start, day and so many bytes, compressed, then deleted.

No file is ever appended to by a second process, so a torn line is always a file's last one. The
process that writes to a file holds a lock on it: what lies there plain and unlocked was left by a
crash, and whoever comes next compresses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from act_exporter.exceptions import SettingError
from act_exporter.records import FILE_NAME, begun

log = logging.getLogger(__name__)

_FOLDER_MODE = 0o750
_FILE_MODE = 0o640

# A plain file this young may be one that its process has created and not locked yet.
_LEFT_SECONDS = 60

_DAY_SECONDS = 86_400

# Half the time of gzip's 6, and 7 % larger.
_LEVEL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much of a journal is kept."""

    file_bytes: int = 64 * 2**20
    """A file is complete from this size on. Compressing it takes the writer two seconds, for which
    the queue must last."""

    days: float = 30.0
    """Files that were last written to earlier are deleted."""

    total_bytes: int = 10 * 2**30
    """Of all journals in the folder, whichever rank wrote them; beyond it the oldest are deleted.
    Checked with each new file, so what is being written may lie beyond it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise SettingError(f"journal: {name}={getattr(self, name)!r} must be above 0")


class Files:
    """The files of one process' journal. Not thread-safe: the writer's thread has it alone.

    Every method may raise OSError, after which it can be tried again.

    Args:
        folder: where they lie; created where missing, without access for others.
        rank: for their names.
        limits: when one is complete and when it is deleted.
        clock: Unix seconds.
    """

    def __init__(self, folder: Path, rank: int, limits: Limits, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._rank = rank
        self._limits = limits
        self._clock = clock
        self._descriptor: int | None = None
        self._path = folder
        self._day = ""
        self._size = 0

    def append(self, data: bytes) -> None:
        """Append whole lines to the open file, all or none of them."""
        descriptor = self._open_file()
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            self._take_back()
            raise
        self._size += len(data)

    def rotate(self) -> None:
        """Compress and begin anew where the file is complete; delete what was kept long enough."""
        if self._descriptor is None:
            return
        if self._size >= self._limits.file_bytes or self._day != self._today():
            try:
                _compress(self._path)
            finally:
                self.close()
                self.tidy()

    def tidy(self) -> None:
        """Compress what crashes have left, delete what is too old or too much."""
        self._make_folder()
        for path in self._journals():
            if path.suffix == ".jsonl" and self._age(path) > _LEFT_SECONDS:
                with _locked(path) as ours:
                    if ours:
                        _compress(path)
        found = self._journals()
        total = sum(_size(path) for path in found)
        for path in found:
            size, age = _size(path), self._age(path)
            if age > self._limits.days * _DAY_SECONDS:
                reason = f"older than {self._limits.days:g} days"
            elif total > self._limits.total_bytes:
                reason = f"the journals are larger than {self._limits.total_bytes:,} bytes"
            else:
                continue
            with _locked(path) as ours:
                if not ours:
                    continue
                path.unlink()
                total -= size
                log.info("journal: deleted %s of %d bytes: %s", path, size, reason)

    def close(self) -> None:
        """Close the open file; the next line goes to a new one."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _close(descriptor)

    def _open_file(self) -> int:
        """The open file, or a new one where there is none or somebody has removed it."""
        if self._descriptor is not None:
            if os.fstat(self._descriptor).st_nlink:
                return self._descriptor
            self.close()
        self._make_folder()
        self._path, self._descriptor = self._create_next()
        self._day = self._today()
        self._size = 0
        return self._descriptor

    def _create_next(self) -> tuple[Path, int]:
        """A new file, named by the first millisecond from now on that no other is named by."""
        milliseconds = int(self._clock() * 1000)
        while True:
            begun_at = datetime.fromtimestamp(milliseconds // 1000, UTC)
            stamp = f"{begun_at:%Y%m%dT%H%M%S}.{milliseconds % 1000:03d}Z"
            path = self._folder / f"act-journal-rank{self._rank}-{stamp}.jsonl"
            if not path.with_name(f"{path.name}.gz").exists():
                with contextlib.suppress(FileExistsError):
                    return path, _create(path, os.O_EXCL)
            milliseconds += 1

    def _take_back(self) -> None:
        """Remove what an append that failed has left of its lines."""
        if self._descriptor is None:
            return
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()  # so that the torn line stays this file's last one
            if not self._size:
                with contextlib.suppress(OSError):
                    self._path.unlink()

    def _make_folder(self) -> None:
        if self._folder.is_dir():
            return
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            self._folder.mkdir()
            self._folder.chmod(_FOLDER_MODE)

    def _journals(self) -> list[Path]:
        """The folder's journals, those begun first coming first; nothing else is ever touched."""
        found = [path for path in self._folder.iterdir() if FILE_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: begun(path.name))

    def _age(self, path: Path) -> float:
        try:
            return self._clock() - path.stat().st_mtime
        except FileNotFoundError:
            return 0  # another rank has deleted or compressed it

    def _today(self) -> str:
        return f"{datetime.fromtimestamp(self._clock(), UTC):%Y%m%d}"


def _create(path: Path, flags: int) -> int:
    """A descriptor to write to, locked, of a file with our mode whatever the umask."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, _FILE_MODE)
    try:
        os.fchmod(descriptor, _FILE_MODE)
    except OSError:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _compress(path: Path) -> None:
    """Replace a file by its compressed form, which has its name only once it is whole."""
    part = path.with_name(f"{path.name}.gz.part")
    before = path.stat()
    descriptor = _create(part, os.O_TRUNC)
    try:
        with (
            path.open("rb") as source,
            os.fdopen(descriptor, "wb", closefd=False) as target,
            gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as compressed,
        ):
            shutil.copyfileobj(source, compressed, 2**20)
        os.utime(part, (before.st_atime, before.st_mtime))  # its age is that of its last line
        part.rename(path.with_name(f"{path.name}.gz"))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        _close(descriptor)
    path.unlink()


def _close(descriptor: int) -> None:
    """Close a file from `_create`, which a forked child would otherwise keep locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody writes to the file, nor will while this is open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False  # another rank has deleted or compressed it
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            ours = False
        else:
            ours = os.fstat(descriptor).st_nlink > 0
        yield ours
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
