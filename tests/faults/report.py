"""What the scenes cost, for the terminal, for programs and for the documentation."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from alerting.recovery.versions import versions
from tests.faults.experiment import Loss

COLUMNS = (
    "fault",
    "what happened",
    "steps repeated",
    "checkpoints lost",
    "untrusted resumes",
    "bitwise",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A scene that was played.

    Attributes:
        fault: in words.
        happened: in words.
        loss: None where the scene went wrong.
        seconds: that it took.
    """

    fault: str
    happened: str
    loss: Loss | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def cells(self) -> list[str]:
        """In the order of `COLUMNS`."""
        loss, seconds = self.loss, f"{self.seconds:.1f}"
        if loss is None:
            return [self.fault, f"WRONG: {self.happened[:500]}", "", "", "", "", seconds]
        numbers = map(str, (loss.repeated, loss.checkpoints, loss.untrusted))
        return [self.fault, self.happened, *numbers, "yes" if loss.bitwise else "NO", seconds]


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    drawn = Table(*COLUMNS)
    for row in rows:
        drawn.add_row(*row.cells())
    return drawn


def markdown(rows: Sequence[Row]) -> str:
    """A page of documentation."""
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [line.format(
        day=time.strftime("%Y-%m-%d", time.gmtime()), cores=os.cpu_count(), installed=installed
    ) for line in PAGE.splitlines()]  # fmt: skip
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |")
    return "\n".join(lines) + "\n"


PAGE = """\
# Faults of a guarded training
Each row is a fault that was brought about, what happened, and what was lost. This page is written
by

```sh
make test-faults ARGS='--write docs/faults.md'
```

and was so on {day}, on {cores} cores, with {installed}.

- *steps repeated*: taken again, in all runs of the row together; a checkpoint is due at each 5th
  step. A rollback repeats steps on purpose.
- *checkpoints lost*: published ones that by the end are gone, not whole or said to be corrupt. Only
  what a scene damages itself may be lost.
- *untrusted resumes*: loads of a checkpoint that was partial, corrupt or suspect at the time, as
  judged by code of the tests' own.
- *bitwise*: sample numbers, losses, learning rate, weights, optimizer moments and random numbers
  (Python, NumPy, torch) of each step are those of a run to which nothing happened, each time that
  the step was taken; of a run with a bad step, but for what lies between it and the rollback.

Two ranks train with DDP, four with FSDP2: DDP orders the gradients' buckets anew after its first
step, so with more than two ranks the first step after any new start is rounded otherwise, with or
without a guard.

The trainer is a small one on the CPU, the guard the shipped one. Processes are forked from one that
has imported torch, except under the supervisor. Not tried: a power cut (after SIGKILL the system
still writes what it holds, so the order of syncs is not put to the test), a network file system, a
GPU, ranks on more than one machine. Scenes with mounts need the right to mount.

"""
