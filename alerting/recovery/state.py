"""What a guarded run saves and goes back to, whoever keeps it: we or a framework's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from alerting.exceptions import CheckpointError
from alerting.recovery.manifest import DataPosition
from alerting.recovery.ranks import Ranks


def rank_file(rank: int) -> str:
    """The name of the file of what is a rank's own.

    A file a rank: random states differ between ranks, and torch.distributed.checkpoint keeps one
    value of a key that several ranks save.
    """
    return f"rank-{rank:05d}.pt"


def require_own(file: Path, framework: str) -> None:
    """Refuse a checkpoint without `file`, which all that `framework` saved have.

    Raises:
        CheckpointError: it is not there. What has merely lost it is found corrupt before.
    """
    if not file.exists():
        raise CheckpointError(
            f"checkpoint {file.parent.name} was not saved by {framework}; choose another run folder"
        )


class Snapshot(Protocol):
    """A training state at a step boundary, which training no longer changes."""

    def write(self, folder: Path, ranks: Ranks) -> list[Path]:
        """Write it into `folder`, synced; called by all ranks, in their writing threads.

        Returns:
            The files of this rank. Every file of the checkpoint is some rank's.
        """
        ...


class State(Protocol):
    """The live state of a run.

    Attributes:
        data: the position in the data for people, or None where there is none.
    """

    @property
    def data(self) -> DataPosition | None:
        """See above."""
        ...

    def start(self) -> None:
        """Stand before the first batch of the first epoch."""
        ...

    def capture(self, step: int, folder: Path) -> Snapshot:
        """The state after `step` steps, to be written into `folder`, which is there and empty.

        Raises:
            CheckpointError: some of it cannot be saved.
        """
        ...

    def restore(self, folder: Path, world_size: int) -> None:
        """Put back, on each rank, what was captured into the checkpoint `folder`.

        Args:
            folder: the checkpoint's.
            world_size: of the ranks that saved it.

        Raises:
            CheckpointError: it does not fit this run, or cannot be read, on some rank.
        """
        ...
