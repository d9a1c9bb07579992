"""All that a run needs to go on as if nothing had happened: what a checkpoint holds.

Model and optimizer go through torch.distributed.checkpoint, everything else into one file a rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from alerting.exceptions import CheckpointError, ConfigError
from alerting.recovery import rng
from alerting.recovery.detector import Detector, take_over
from alerting.recovery.loader_position import LoaderPosition
from alerting.recovery.manifest import DataPosition
from alerting.recovery.ranks import Ranks
from alerting.recovery.staging import staged
from alerting.recovery.state import rank_file, require_own
from alerting.recovery.torch_failures import FAILURES, cause


class Stateful(Protocol):
    """Anything that can be saved and loaded: a scheduler, a scaler, an average of the weights."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take up a state."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy, in host memory, of a training state at a step boundary.

    Attributes:
        sharded: this rank's part of what torch.distributed.checkpoint saves.
        rank: everything else.
    """

    sharded: dict[str, Any]
    rank: dict[str, Any]

    def write(self, folder: Path, ranks: Ranks) -> list[Path]:
        """See `alerting.recovery.state.Snapshot`."""
        alone = ranks.group is None
        try:
            save(self.sharded, checkpoint_id=folder, process_group=ranks.group, no_dist=alone)
        except CheckpointException as error:
            # It is no Exception, and who waits for the writing knows nothing of torch.
            raise CheckpointError(cause(error)) from error
        own = folder / rank_file(ranks.rank)
        with own.open("wb") as file:
            torch.save(self.rank, file)
            file.flush()
            os.fsync(file.fileno())
        # torch.distributed.checkpoint puts the rank into its names.
        metadata = [folder / ".metadata"] if ranks.rank == 0 else []
        return [own, *metadata, *sorted(folder.glob(f"__{ranks.rank}_*"))]


class TrainingState:
    """The live objects of a run, taken and put back together."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        scaler: Stateful | None,
        extra: Mapping[str, Stateful],
        position: LoaderPosition,
        detector: Detector,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others: dict[str, Stateful] = {}
        if scheduler is not None:
            self._others["scheduler"] = scheduler
        self._others |= {f"state[{name!r}]": value for name, value in extra.items()}
        # Last: loading it must not be followed by anything that steps.
        if scaler is not None:
            self._others["scaler"] = scaler
        for name, value in self._others.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(f"{name} has no state_dict and load_state_dict")
        self._position = position
        self._detector = detector
        self._ranks = ranks
        # Its buffers are used again by the next save: first use of fresh memory took 0.5 s for 350
        # MB, a copy into what was used before 0.03 s. Pinned, a copy from a device is faster too.
        on_cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_cuda,
            )
        )

    @property
    def data(self) -> DataPosition | None:
        """See `alerting.recovery.state.State`."""
        return self._position.data

    def start(self) -> None:
        """See `alerting.recovery.state.State`."""
        self._position.start()

    def capture(self, step: int, folder: Path) -> Snapshot:
        """A copy of the state after `step` steps, good until the next one is made.

        Raises:
            CheckpointError: some object's state holds what a checkpoint cannot.
        """
        with self._detector.paused():
            return self._capture(step)

    def _capture(self, step: int) -> Snapshot:
        sharded: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        optimizer = None
        if self._optimizer.state:
            sharded["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer)
        else:
            # Before its first step torch would take one with zero gradients to make a state; that
            # step stays in Adam's counter, and the run would differ from one without a guard.
            optimizer = staged(self._optimizer.state_dict(), "the optimizer's state")
        rank = {
            "step": step,
            "optimizer": optimizer,
            "others": {
                name: staged(value.state_dict(), name) for name, value in self._others.items()
            },
            "position": staged(self._position.state_dict(), "the loader's position"),
            "detector": staged(self._detector.state_dict(), "the exporter's state"),
            "rng": staged(rng.capture(), "the random state"),
        }
        copied = self._stager.stage(sharded)
        # Only with `use_async_staging` is it something else.
        return Snapshot(cast(dict[str, Any], copied), rank)

    def restore(self, folder: Path, world_size: int) -> None:
        """Put back, on each rank, what was captured into the checkpoint `folder`.

        Args:
            folder: the checkpoint's.
            world_size: of the ranks that saved it. With as many now, each gets its own state back.
                With others, the weights are dealt out anew, and a rank goes on from the random
                state, the data and the small state of the rank of its number, counted round.

        Raises:
            CheckpointError: it does not fit these objects, or cannot be read, on some rank. Some
                of them may have been overwritten.
        """
        try:
            with self._detector.paused():
                self._restore(folder, world_size)
        except CheckpointError:
            raise
        except FAILURES as error:
            raise CheckpointError(
                f"checkpoint {folder.name} cannot be loaded: {cause(error)}"
            ) from error

    def _restore(self, folder: Path, world_size: int) -> None:
        ranks, source = self._ranks, self._ranks.rank % world_size
        # In parts: a rank that cannot go on must not leave the others inside the loading.
        with ranks.united():
            own = folder / rank_file(source)
            require_own(own, "torch")
            rank = torch.load(own, weights_only=True, map_location="cpu")
            self._require_objects(folder.name, rank["others"].keys())
            # Gradients of the step that failed must not enter the first one after it.
            self._optimizer.zero_grad(set_to_none=True)
            target, reader = self._sharded_target(folder, rank["optimizer"])
        with ranks.united():
            self._load_sharded(target, reader, rank["optimizer"])
            for name, value in self._others.items():
                value.load_state_dict(rank["others"][name])
            take_over(self._detector, rank["detector"])
            self._optimizer.zero_grad(set_to_none=True)
            self._position.load_state_dict(rank["position"], world_size / ranks.size)
            # After the new iterator, whose making draws from it.
            rng.restore(rank["rng"])
            if source != ranks.rank:
                # Two ranks with one random state would drop the same activations.
                rng.reseed(ranks.rank)

    def _require_objects(self, name: str, saved: Set[str]) -> None:
        for place, missing in (
            (f"checkpoint {name}", self._others.keys() - saved),
            ("this run", saved - self._others.keys()),
        ):
            if missing:
                raise CheckpointError(
                    f"checkpoint {name} does not fit this run: {place} has no "
                    + ", ".join(sorted(missing))
                )

    def _sharded_target(
        self, folder: Path, fresh_optimizer: dict[str, Any] | None
    ) -> tuple[dict[str, Any], FileSystemReader]:
        """The tensors to load into, of the names that the checkpoint has."""
        target: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        # What it holds now may be of fewer parameters than the checkpoint's; emptied, it is made
        # anew for all of them.
        self._optimizer.state.clear()
        if fresh_optimizer is None:
            target["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer)
        reader = FileSystemReader(folder)
        saved = _paths(reader.read_metadata().planner_data)
        if fresh_optimizer is None:
            # A parameter that never had a gradient has no optimizer state in the checkpoint.
            with_state = {path[2] for path in saved if path[:2] == ("optimizer", "state")}
            states = target["optimizer"]["state"]
            target["optimizer"]["state"] = {k: v for k, v in states.items() if k in with_state}
            surplus = with_state - states.keys()
        else:
            surplus = set()
        surplus |= {path[1] for path in saved if path[0] == "model"} - target["model"].keys()
        if surplus:
            # torch.distributed.checkpoint would drop them without a word.
            raise CheckpointError(
                f"checkpoint {folder.name} holds parameters that this model or optimizer lacks: "
                + ", ".join(sorted(map(str, surplus))[:5])
            )
        return target, reader

    def _load_sharded(
        self,
        target: dict[str, Any],
        reader: FileSystemReader,
        fresh_optimizer: dict[str, Any] | None,
    ) -> None:
        group = self._ranks.group
        load(target, storage_reader=reader, process_group=group, no_dist=group is None)
        set_model_state_dict(self._model, target["model"])
        if fresh_optimizer is not None:
            self._optimizer.load_state_dict(fresh_optimizer)
        else:
            set_optimizer_state_dict(
                self._model,
                self._optimizer,
                target["optimizer"],
                options=StateDictOptions(strict=False),
            )


def _paths(planner_data: Any) -> list[tuple[Any, ...]]:
    """The path of each saved value: ("model", name) or ("optimizer", "state", name, key)."""
    return list(planner_data.values())
