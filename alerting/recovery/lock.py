"""One trainer a run folder: two that write the same checkpoints would ruin both runs."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from alerting.exceptions import CheckpointError

log = logging.getLogger(__name__)

_HELD: dict[tuple[int, str], object] = {}
"""Who holds what in this process: the kernel's lock is the process's, so it would let a second
guard in, and lets go when any file of that name is closed. By process id, because a forked child
inherits the entries and not the locks."""


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it when the process dies, however it dies.

    Raises:
        CheckpointError: another guard holds it, here or in another process, or it cannot be
            written.
    """
    key, own = (os.getpid(), str(path.resolve())), object()
    # setdefault is one atomic operation, also between threads. Before the file is opened: closing
    # it again would end the first one's lock.
    if _HELD.setdefault(key, own) is not own:
        raise _taken(path)
    try:
        with _locked(path):
            yield
    finally:
        del _HELD[key]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise CheckpointError(f"the run folder {path.parent} cannot be used: {error}") from error
    try:
        try:
            # Not flock, which forked loader workers inherit and hold for seconds after we died.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _taken(path) from None
        except OSError as error:
            # Some network file systems have no locks; training is worth more than this check.
            log.warning("%s cannot be locked (%s): make sure that one trainer uses it", path, error)
        yield
    finally:
        os.close(descriptor)


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(
        f"another guard is training in {path.parent}; end it, or choose another run folder"
    )
