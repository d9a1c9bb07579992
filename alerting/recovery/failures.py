"""How to say in one sentence what saving or loading has raised."""

from __future__ import annotations

from collections.abc import Iterator

from alerting.exceptions import CheckpointError


def cause(error: BaseException) -> str:
    """What went wrong, in one line.

    On a full disk what comes out of `torch.save` is that its archive could not be ended. The
    system's own error, where there is one behind it, says what to do.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    told = next((e for e in _behind(error) if isinstance(e, OSError)), error)
    return f"{type(told).__name__}: {' '.join(str(told).split())}"


def _behind(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
