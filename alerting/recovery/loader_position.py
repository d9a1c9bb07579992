"""Where a run stands in its loader, and the way back there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from alerting.exceptions import CheckpointError, ConfigError
from alerting.recovery import rng
from alerting.recovery.manifest import DataPosition
from alerting.recovery.staging import staged

log = logging.getLogger(__name__)


class LoaderPosition:
    """Draws batches from a loader, epoch after epoch, and returns to any batch of the past.

    A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) is asked for
    its state. Any other iterable is brought back by repetition: the random state from before the
    epoch's iterator was made is set again, an iterator is made, and as many batches are skipped.
    A DataLoader that shuffles then yields the same batches, bit for bit; one that keeps a shuffle
    buffer of its own needs a state of its own, and what persistent workers draw inside their own
    processes does not come back.

    Attributes:
        taken: batches of all epochs that were taken, skipped ones too.
        batches_a_step: how many of them the loop takes each step.
    """

    def __init__(self, loader: Iterable[Any] | None) -> None:
        if isinstance(loader, Iterator):
            raise ConfigError(
                "the loader is an iterator, which cannot go back after a rollback: pass the "
                "DataLoader or another iterable that makes a new iterator each time"
            )
        if loader is not None and _length(loader) == 0:
            raise ConfigError("the loader is empty")
        self._loader = loader
        if getattr(loader, "use_stateful_dataloader", False):
            # Tried: after a rollback within an epoch it gave other batches.
            raise ConfigError(
                "Accelerate's use_stateful_dataloader does not lead back to the same batches: "
                "leave it off, then they are skipped to"
            )
        # Accelerate's loader has the methods even where it keeps no state.
        self._stateful = not hasattr(loader, "base_dataloader") and (
            hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        )
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._batch = 0
        self.taken = 0
        self.batches_a_step = 1
        self._epoch_rng: dict[str, Any] = {}
        self._epoch_generators: list[torch.Tensor] = []
        self._epoch_reused = False

    @property
    def data(self) -> DataPosition | None:
        """The position for people, or None without a loader."""
        if self._loader is None:
            return None
        return DataPosition(epoch=self._epoch, batch=self._batch, taken=self.taken)

    def start(self) -> None:
        """Stand before the first batch of the first epoch."""
        self._begin_epoch(0)
        self.taken = 0

    def next(self) -> Any:
        """The next batch, of the next epoch where this one has ended; None without a loader.

        Raises:
            ConfigError: the loader is empty.
        """
        if self._loader is None or self._iterator is None:
            return None
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._begin_epoch(self._epoch + 1)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ConfigError("the loader is empty: it gave no batch in an epoch") from None
        self._batch += 1
        self.taken += 1
        return batch

    def skip_to(self, taken: int) -> None:
        """Draw and drop batches until `taken` are taken; an epoch's end is no hindrance.

        Raises:
            ConfigError: the loader is empty.
        """
        while self._loader is not None and self.taken < taken:
            self.next()

    def state_dict(self) -> dict[str, Any]:
        """The position, of tensors and plain values; empty without a loader."""
        if self._loader is None:
            return {}
        state: dict[str, Any] = {"epoch": self._epoch, "batch": self._batch, "taken": self.taken}
        if self._stateful:
            state["loader"] = staged(self._loader.state_dict(), "the loader's state")  # type: ignore[attr-defined]
        else:
            state["epoch_rng"] = self._epoch_rng
            state["epoch_generators"] = self._epoch_generators
            state["epoch_reused"] = self._epoch_reused
            state["generators"] = [g.get_state() for g in self._generators()]
        return state

    def load_state_dict(self, state: dict[str, Any], ranks_ratio: float = 1) -> None:
        """Stand where `state_dict` was taken, with a new iterator.

        The global random state is left wherever making and skipping took it: set it afterwards.

        Args:
            state: what `state_dict` gave.
            ranks_ratio: how many ranks shared the data when it was saved, over how many do now:
                where each takes twice as many samples an epoch, half as many batches are behind it.

        Raises:
            CheckpointError: the loader is not the one that was saved.
        """
        if bool(state) != (self._loader is not None) or ("loader" in state) != self._stateful:
            raise CheckpointError(
                "the checkpoint was saved with another kind of loader (none, with a state_dict, "
                "or without one)"
            )
        if not state:
            return
        # Checkpoints of before remedies lack it.
        self.taken = int(state.get("taken", 0) * ranks_ratio)
        if self._stateful:
            if ranks_ratio != 1:
                log.warning("other ranks share the data now: some of it comes twice or never")
            self._loader.load_state_dict(state["loader"])  # type: ignore[union-attr]
            self._begin_epoch(state["epoch"])
            self._batch = state["batch"]
            return
        if state["epoch_reused"] and not self._workers_live():
            iter(self._loader)  # type: ignore[arg-type]
        elif self._workers_live() and not state["epoch_reused"]:
            self._loader._iterator = None  # type: ignore[union-attr]
        rng.restore(state["epoch_rng"])
        self._set_generators(state["epoch_generators"])
        self._begin_epoch(state["epoch"])
        # What is left of a division is seen twice rather than never.
        batch = int(state["batch"] * ranks_ratio)
        for skipped in range(batch):
            try:
                next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                raise CheckpointError(
                    f"the loader ended after {skipped} batches where the checkpoint had taken "
                    f"{batch}: it is not the loader that was saved"
                ) from None
        self._batch = batch
        self._set_generators(state["generators"])

    def _begin_epoch(self, epoch: int) -> None:
        if self._loader is None:
            return
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        if not self._stateful:
            self._epoch_reused = self._workers_live()
            # Making an iterator draws from these, and so does its first batch.
            self._epoch_rng = rng.capture()
            self._epoch_generators = [g.get_state() for g in self._generators()]
        self._iterator = iter(self._loader)
        self._epoch, self._batch = epoch, 0

    def _workers_live(self) -> bool:
        """Whether `iter(loader)` will reuse the persistent workers of the epoch before.

        A DataLoader then draws one random number fewer than when it makes them.
        """
        persistent = getattr(self._loader, "persistent_workers", False)
        return bool(persistent) and getattr(self._loader, "_iterator", None) is not None

    def _generators(self) -> list[torch.Generator]:
        """The loader's own generators: a DataLoader's and its samplers'."""
        loader = self._loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        found = (
            getattr(owner, "generator", None)
            for owner in (
                loader,
                getattr(loader, "sampler", None),
                batch_sampler,
                getattr(batch_sampler, "sampler", None),
            )
        )
        unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
        return list(unique.values())

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        generators = self._generators()
        if len(generators) != len(states):
            raise CheckpointError(
                f"the loader has {len(generators)} random generators of its own, the checkpoint "
                f"was saved with {len(states)}"
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        # No length, as that of a stream or of a DataLoader over one.
        return None
