"""The processes that train one model together, and how they act as one.

Rank 0 decides, and alone touches what the run folder has only one of. What one rank cannot do none
does: an error of one is raised on all, so that no rank waits in a collective for one that has left.
A rank that dies closes its connections, which ends the others' waiting with an error too; one that
hangs is the supervisor's.

The groups are gloo's, on the CPU, and made for this alone: nothing queues behind the gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from alerting.exceptions import AlertingError, CheckpointError, ConfigError
from alerting.recovery.failures import FAILURES, cause

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=2)
"""For a rank that writes, compiles or evaluates much longer than the others. A dead one is seen at
once, by its closed connection."""


class Ranks(Protocol):
    """What the guard needs of the ranks.

    Attributes:
        rank: of this process.
        size: how many there are.
        group: for collectives of torch's own; None for a single process.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def lead(self, act: Callable[[], Value]) -> Value:
        """What `act` returns on rank 0, which alone calls it; what it raises is raised on all."""
        ...

    def united(self) -> contextlib.AbstractContextManager[None]:
        """The body, on each rank; an error of any is raised on all when all have left it."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """Each rank's value, by rank."""
        ...

    def combine(self, values: torch.Tensor) -> Callable[[], None]:
        """Begin to make each of `values` (int64) the largest of all ranks; call it to wait."""
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


def ranks() -> Ranks:
    """All ranks of this run; each must call it. A process without torch.distributed is alone."""
    return Many() if _size() > 1 else Alone()


def require_ranks(size: int) -> None:
    """Refuse to go on where `size` ranks were found earlier, and there are others now.

    Raises:
        ConfigError: there are.
    """
    if _size() != size:
        raise ConfigError(
            f"{size} rank(s) trained when the guard was made, and {_size()} do now: make it after "
            "torch.distributed.init_process_group"
        )


def _size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Alone:
    """A single process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        # At each save and load torch would wonder whether a single process is meant. For good: a
        # filter for the moment is the process's, and the writing thread is not alone in it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

    def lead(self, act: Callable[[], Value]) -> Value:
        """See `Ranks`."""
        return act()

    def united(self) -> contextlib.AbstractContextManager[None]:
        """See `Ranks`."""
        return contextlib.nullcontext()

    def gather(self, value: Value) -> list[Value]:
        """See `Ranks`."""
        return [value]

    def combine(self, values: torch.Tensor) -> Callable[[], None]:
        """See `Ranks`."""
        return lambda: None

    def twin(self) -> Alone:
        """See `Ranks`."""
        return self

    def close_at_exit(self, wanted: bool) -> None:
        """See `Ranks`."""


class Many:
    """Ranks that are connected by a gloo group of their own."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def lead(self, act: Callable[[], Value]) -> Value:
        """See `Ranks`."""
        outcome: list[tuple[Value | None, Exception | None]] = [(None, None)]
        if self.rank == 0:
            try:
                outcome = [(act(), None)]
            except FAILURES as error:
                self._broadcast([(None, _for_others(error, 0))])
                raise
        self._broadcast(outcome)
        value, failed = outcome[0]
        if failed is not None:
            raise failed
        return value  # type: ignore[return-value]

    @contextlib.contextmanager
    def united(self) -> Iterator[None]:
        """See `Ranks`."""
        try:
            yield
        except FAILURES as error:
            self.gather(_for_others(error, self.rank))
            raise
        for failed in self.gather(None):
            if failed is not None:
                raise failed

    def gather(self, value: Value) -> list[Value]:
        """See `Ranks`."""
        values: list[Value | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def combine(self, values: torch.Tensor) -> Callable[[], None]:
        """See `Ranks`."""
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return lambda: work.wait() and None

    def twin(self) -> Many:
        """See `Ranks`."""
        return Many()

    def close_at_exit(self, wanted: bool) -> None:
        """See `Ranks`."""
        atexit.unregister(self._close)
        if wanted:
            atexit.register(self._close)

    def _close(self) -> None:
        group, self.group = self.group, None
        if dist.is_initialized():  # else the trainer has ended them all, and that was the last one
            dist.destroy_process_group(group)

    def _broadcast(self, outcome: list[tuple[Value | None, Exception | None]]) -> None:
        dist.broadcast_object_list(outcome, src=0, group=self.group)


def _for_others(error: BaseException, rank: int) -> Exception:
    """`error` as the other ranks raise it: of the same kind where it is one of ours."""
    kind = type(error) if isinstance(error, AlertingError) else CheckpointError
    return kind(f"rank {rank}: {cause(error)}")
