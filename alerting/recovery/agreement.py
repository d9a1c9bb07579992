"""One vote a step boundary, so that all ranks act at the same step.

What a rank wants is known to that rank alone: a request's file may appear between two ranks' looks
at it, a signal reaches one process, saves are due by one clock. So each rank votes, and all act on
the sum of the votes.

The vote of one boundary is counted at the next, so the ranks never stand still for it: gloo's
answer (some 0.2 ms) comes while the step is computed. A single process counts its own at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from alerting.recovery.ranks import Ranks

_NEVER = numpy.iinfo(numpy.int64).min


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What a rank, or all of them together, have to say at a boundary.

    Attributes:
        recover: a request to roll back is open (rank 0).
        back_up: a request for a backup is open (rank 0).
        save: a periodic save is due (rank 0).
        stop: the number of the signal that a process was told to end by, 0 without one.
        writing: files of the save in flight are not complete.
        failed: the guard's own code has failed.
        onset: the first bad step that the detector has seen, or None.
    """

    recover: bool = False
    back_up: bool = False
    save: bool = False
    stop: int = 0
    writing: bool = False
    failed: bool = False
    onset: int | None = None

    def to_array(self) -> NDArray[numpy.int64]:
        """As numbers of which the largest of each is the sum of the votes."""
        onset = _NEVER if self.onset is None else -self.onset
        flags = self.recover, self.back_up, self.save, self.stop, self.writing, self.failed
        return numpy.array([*map(int, flags), onset], dtype=numpy.int64)

    @classmethod
    def from_array(cls, values: NDArray[numpy.int64]) -> Vote:
        """What `to_array` gave."""
        recover, back_up, save, stop, writing, failed, onset = values.tolist()
        return cls(
            recover=bool(recover),
            back_up=bool(back_up),
            save=bool(save),
            stop=stop,
            writing=bool(writing),
            failed=bool(failed),
            onset=None if onset == _NEVER else -onset,
        )


class Agreement:
    """The votes of one run.

    Args:
        ranks: who votes.
        every: a vote each so many steps.

    Attributes:
        ahead: steps from a vote to the last boundary before the next one can be acted on: what is
            due until then must be voted for.
    """

    def __init__(self, ranks: Ranks, every: int) -> None:
        self._ranks = ranks
        self._every = every
        self._votes: NDArray[numpy.int64] | None = None
        self._wait: Callable[[], None] | None = None
        self.ahead = 0 if ranks.size == 1 else every

    def settle(self, vote: Callable[[], Vote], *, last: bool) -> Vote | None:
        """What to act on at this boundary, or None where no vote was due.

        Args:
            vote: gives this rank's vote.
            last: there is no later boundary, so the votes are of now and waited for.
        """
        if self._ranks.size == 1:
            return vote()
        counted = self._count()
        if not last:
            return counted
        self._cast(vote())
        return self._count()

    def propose(self, step: int, vote: Callable[[], Vote]) -> None:
        """Cast this rank's vote, when all has been done that was agreed on at step `step`."""
        if self._ranks.size > 1 and step % self._every == 0:
            self._cast(vote())

    def _cast(self, vote: Vote) -> None:
        self._votes = vote.to_array()
        self._wait = self._ranks.combine(self._votes)

    def _count(self) -> Vote | None:
        if self._wait is None or self._votes is None:
            return None
        self._wait()
        self._wait = None
        return Vote.from_array(self._votes)
