"""What saving and loading may raise, and how to say it in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from alerting.exceptions import CheckpointError

FAILURES = (Exception, CheckpointException)
"""CheckpointException is a BaseException, and an interrupt must still get through."""


def cause(error: BaseException) -> str:
    """What went wrong, in one line.

    torch wraps: a CheckpointException's text is each rank's traceback, and on a full disk what
    comes out of `torch.save` is that its archive could not be ended. The system's own error, where
    there is one behind it, says what to do.
    """
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, CheckpointError):
        return str(error)
    told = next((e for e in _behind(error) if isinstance(e, OSError)), error)
    return f"{type(told).__name__}: {' '.join(str(told).split())}"


def _behind(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
