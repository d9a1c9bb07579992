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


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it when the process dies, however it dies.

    Raises:
        CheckpointError: another process holds it, or it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise CheckpointError(f"the run folder {path.parent} cannot be used: {error}") from error
    try:
        try:
            # Not flock, which forked loader workers inherit and hold for seconds after we died.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise CheckpointError(
                f"another training process uses {path.parent}; end it, or choose another run folder"
            ) from None
        except OSError as error:
            # Some network file systems have no locks; training is worth more than this check.
            log.warning("%s cannot be locked (%s): make sure that one trainer uses it", path, error)
        yield
    finally:
        os.close(descriptor)
