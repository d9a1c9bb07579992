"""What a supervisor waits for, and how often it starts a trainer again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The supervisor's settings; 0 seconds turn a wait for a sign of life off.

    Attributes:
        stall_seconds: a trainer in which no step has ended for so long has hung.
        start_seconds: the same until the first step of a process has ended.
        request_seconds: a request to recover that is open for so long will not be taken up.
        grace_seconds: from the signal that asks the trainer to end to the one that ends it.
        max_restarts: restarts in a row without progress.
    """

    # As long as ActTrainerStalled waits, and as NCCL does by default; an evaluation between two
    # steps that takes longer needs more.
    stall_seconds: float = 600
    # Reading a checkpoint of terabytes and compiling the first step take minutes each.
    start_seconds: float = 1800
    # The receiver's request_deadline_seconds, after which it tells people.
    request_seconds: float = 600
    # torchrun gives its workers 30 s before it kills them, and must have the time to do so.
    grace_seconds: float = 40
    # One for an accident, one for a node or file system that recovers, and one more; what fails a
    # fourth time at the same step fails every time.
    max_restarts: int = 3
