"""What saving and loading by torch may raise besides; see `failures`."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from alerting.recovery import failures

FAILURES = (Exception, CheckpointException)
"""CheckpointException is a BaseException, and an interrupt must still get through."""


def cause(error: BaseException) -> str:
    """What went wrong, in one line: torch wraps it, with each rank's traceback as the text."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return failures.cause(error)
