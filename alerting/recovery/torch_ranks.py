"""Ranks of torch.distributed.

Their groups are gloo's, on the CPU, and made for this alone: nothing queues behind the gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from alerting.exceptions import AlertingError, CheckpointError, ConfigError
from alerting.recovery.ranks import Alone, Ranks
from alerting.recovery.torch_failures import FAILURES, cause

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=2)
"""For a rank that writes, compiles or evaluates much longer than the others. A dead one is seen at
once, by its closed connection."""


def ranks() -> Ranks:
    """All ranks of this run; each must call it. A process without torch.distributed is alone."""
    if _size() > 1:
        return Many()
    # At each save and load torch would wonder whether a single process is meant. For good: a
    # filter for the moment is the process's, and the writing thread is not alone in it.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
    return Alone()


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

    def combine(self, values: NDArray[numpy.int64]) -> Callable[[], None]:
        """See `Ranks`."""
        shared = torch.from_numpy(values)
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group, async_op=True)
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
