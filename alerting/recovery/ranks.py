"""The processes that train one model together, and how they act as one.

Rank 0 decides, and alone touches what the run folder has only one of. What one rank cannot do none
does: an error of one is raised on all, so that no rank waits in a collective for one that has left.
A rank that dies closes its connections, which ends the others' waiting with an error too; one that
hangs is the supervisor's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy
from numpy.typing import NDArray

Value = TypeVar("Value")


class Ranks(Protocol):
    """What the guard needs of the ranks.

    Attributes:
        rank: of this process.
        size: how many there are.
        group: for collectives of the framework's own; None for a single process.
    """

    rank: int
    size: int
    group: Any

    def lead(self, act: Callable[[], Value]) -> Value:
        """What `act` returns on rank 0, which alone calls it; what it raises is raised on all."""
        ...

    def united(self) -> contextlib.AbstractContextManager[None]:
        """The body, on each rank; an error of any is raised on all when all have left it."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """Each rank's value, by rank."""
        ...

    def combine(self, values: NDArray[numpy.int64]) -> Callable[[], None]:
        """Begin to make each of `values` the largest of all ranks; call what it gives to wait."""
        ...

    def twin(self) -> Ranks:
        """The same ranks, for another thread: its collectives cross none of this one's."""
        ...

    def close_at_exit(self, wanted: bool) -> None:
        """Whether the group is closed when the interpreter ends: where all ranks leave in order.

        Else gloo's thread may drop the last reference to a tensor when the interpreter is gone,
        which ends the process by SIGABRT in place of its exit code (as was seen on a busy machine).
        Not where one leaves by itself: closing would wait for what others have yet to answer.
        """
        ...


class Alone:
    """A single process."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def lead(self, act: Callable[[], Value]) -> Value:
        """See `Ranks`."""
        return act()

    def united(self) -> contextlib.AbstractContextManager[None]:
        """See `Ranks`."""
        return contextlib.nullcontext()

    def gather(self, value: Value) -> list[Value]:
        """See `Ranks`."""
        return [value]

    def combine(self, values: NDArray[numpy.int64]) -> Callable[[], None]:
        """See `Ranks`."""
        return lambda: None

    def twin(self) -> Alone:
        """See `Ranks`."""
        return self

    def close_at_exit(self, wanted: bool) -> None:
        """See `Ranks`."""
