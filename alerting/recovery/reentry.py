"""Trainings whose loop belongs to a framework, which cannot be sent back from inside.

The framework's trainer writes the checkpoints and loads them, under our manifest and health. After
a rollback its loop is left and entered again, in the same process, with the checkpoint chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch

from alerting.exceptions import CheckpointError
from alerting.files import sync_file, sync_folder
from alerting.recovery import rng
from alerting.recovery.detector import Detector, Unwatched, take_over
from alerting.recovery.failures import cause
from alerting.recovery.manifest import DataPosition
from alerting.recovery.ranks import Ranks
from alerting.recovery.remedies import Remedies
from alerting.recovery.run import GuardedRun
from alerting.recovery.settings import GivenSettings, Settings, run_name
from alerting.recovery.staging import staged
from alerting.recovery.state import rank_file, require_own
from alerting.recovery.torch_ranks import ranks
from alerting.recovery.treatment import Untreated


class Framework(Protocol):
    """A framework's trainer.

    Attributes:
        name: of the framework; checkpoints of another one are refused.
        step: optimizer steps finished.
        data: the position in the data for people, or None where it is not known.
    """

    name: str

    @property
    def step(self) -> int:
        """See above."""
        ...

    @property
    def data(self) -> DataPosition | None:
        """See above."""
        ...

    def save(self, folder: Path) -> None:
        """Write the framework's own checkpoint into `folder`; called by all ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the loop is to be entered with.

    Attributes:
        folder: of the checkpoint.
        step: of the checkpoint.
        random: the random state of this rank.
    """

    folder: Path
    step: int
    random: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A state that the framework has written already.

    Attributes:
        rank: what the framework does not keep.
    """

    rank: dict[str, Any]

    def write(self, folder: Path, ranks: Ranks) -> list[Path]:
        """See `alerting.recovery.state.Snapshot`."""
        own = folder / rank_file(ranks.rank)
        torch.save(self.rank, own)
        # Which rank wrote which of the framework's files only the framework knows.
        files = [own, *_framework_files(folder)] if ranks.rank == 0 else [own]
        for file in files:
            sync_file(file)
        for parent in {file.parent for file in files} - {folder}:
            sync_folder(parent)
        return files


class FrameworkState:
    """The live state of a run that a framework's trainer holds.

    Attributes:
        entry: what the loop is to be entered with; None while it is to go on.
    """

    def __init__(self, framework: Framework, detector: Detector, ranks: Ranks) -> None:
        self._framework = framework
        self._detector = detector
        self._ranks = ranks
        self.entry: Entry | None = None

    @property
    def data(self) -> DataPosition | None:
        """See `alerting.recovery.state.State`."""
        return self._framework.data

    def start(self) -> None:
        """Nothing to do: the framework stands there."""

    def capture(self, step: int, folder: Path) -> Written:
        """See `alerting.recovery.state.State`.

        The framework writes from the live objects, so training stands until its files are written;
        reading them for the manifest is done behind its back.
        """
        if self._framework.step != step:
            raise CheckpointError(
                f"{self._framework.name}'s trainer stands at step {self._framework.step}, the run "
                f"at {step}"
            )
        with self._detector.paused():
            self._framework.save(folder)
        return Written(
            {
                "framework": self._framework.name,
                "step": step,
                "detector": staged(self._detector.state_dict(), "the exporter's state"),
                "rng": staged(rng.capture(), "the random state"),
            }
        )

    def restore(self, folder: Path, world_size: int) -> None:
        """Have the loop entered with the checkpoint `folder`, which the framework loads then.

        Raises:
            CheckpointError: another framework, or another number of ranks, saved it, or this
                rank's file cannot be read.
        """
        with self._ranks.united():
            if world_size != self._ranks.size:
                raise CheckpointError(
                    f"checkpoint {folder.name} was saved by {world_size} rank(s), and "
                    f"{self._ranks.size} train now: {self._framework.name} deals its data out anew "
                    "then, and the position in it is lost"
                )
            rank = self._read(folder)
        take_over(self._detector, rank["detector"])
        self.entry = Entry(folder=folder, step=rank["step"], random=rank["rng"])

    def _read(self, folder: Path) -> dict[str, Any]:
        path = folder / rank_file(self._ranks.rank)
        require_own(path, self._framework.name)
        try:
            rank: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {folder.name} cannot be loaded: {cause(error)}"
            ) from error
        if rank.get("framework") != self._framework.name:
            raise CheckpointError(
                f"checkpoint {folder.name} was not saved by {self._framework.name}; choose another "
                "run folder"
            )
        return rank


class FrameworkGuard:
    """Guards a training whose loop belongs to a framework.

    Args:
        run_folder: holds the run's checkpoints, its control directory and guard.json.
        exporter: the detector of bad steps. Without one every request to recover is honoured.
        run: the run's name; the exporter's where there is one, else by default the folder's.
        settings: as of `TrainingGuard`: `save_every_steps`, `keep`, `max_rollbacks` and so on.

    Raises:
        ConfigError: a setting makes no sense, or `run` is not the exporter's.
    """

    def __init__(
        self,
        run_folder: str | Path,
        *,
        exporter: Detector | None = None,
        run: str | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._settings = Settings(**settings)
        self._folder = Path(run_folder)
        self._name = run_name(run, exporter, self._folder)
        self._exporter = exporter

    def _guarded(self, framework: Framework) -> tuple[GuardedRun, FrameworkState]:
        """The run of `framework`; made when it trains, for frameworks make the ranks themselves."""
        detector: Detector = self._exporter or Unwatched(self._name)
        found = ranks()
        state = FrameworkState(framework, detector, found)
        run = GuardedRun(
            self._folder,
            self._name,
            state=state,
            detector=detector,
            watched=self._exporter is not None,
            ranks=found,
            settings=self._settings,
            remedies=Remedies({}, has_loader=False),
            treatment=Untreated(),
        )
        return run, state


def _framework_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        # At the top lie the ranks' own, which they may be writing.
        if path.is_file() and path.parent != folder:
            yield path
