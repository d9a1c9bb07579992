"""Where a run stands in its data."""

from __future__ import annotations

from typing import Protocol

from alerting.recovery.manifest import DataPosition


class Position(Protocol):
    """What the guard needs of the data.

    Attributes:
        data: the position for people, or None where it is not known.
        taken: batches of all epochs that were taken, skipped ones too.
        batches_a_step: how many of them the loop takes each step.
    """

    taken: int
    batches_a_step: int

    @property
    def data(self) -> DataPosition | None:
        """See above."""
        ...

    def skip_to(self, taken: int) -> None:
        """Draw and drop batches until `taken` are taken; an epoch's end is no hindrance."""
        ...


class Nowhere:
    """Stands in where nobody knows, or somebody else does."""

    data: DataPosition | None = None

    def __init__(self) -> None:
        self.taken = 0
        self.batches_a_step = 1

    def skip_to(self, taken: int) -> None:
        """Nothing to skip in."""
