"""Where a run stands in a tf.data.Dataset, and the way back there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from alerting.exceptions import CheckpointError, ConfigError
from alerting.recovery.failures import cause
from alerting.recovery.keras_data import repeats
from alerting.recovery.manifest import DataPosition

_NUMBERS = ("epoch", "batch", "over", "taken")


class KerasPosition:
    """The iterator of the epoch under way, and what has been drawn from it.

    It is saved as tf.data saves it, with the contents of its buffers. Near the end of an epoch
    that is not enough: a shuffle that has given all away is gone by then, and with it the seeds of
    the epochs to come, so the state that the iterator had when it was made is saved beside it.

    Attributes:
        taken: see `alerting.recovery.position.Position`.
        batches_a_step: likewise.
        epoch: epochs begun before this one.
        batch: batches taken in it, skipped ones too.
        over: whether its end is behind the run, with what `fit` does there.
        skipping_to: batches are dropped until so many are taken.
    """

    def __init__(self, dataset: tf.data.Dataset | None) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.batch = 0
        self.over = False
        self.taken = 0
        self.batches_a_step = 1
        self.skipping_to = 0
        self._iterator: Any = None
        self._first: Any = None
        self._restored: dict[str, Any] | None = None

    @property
    def data(self) -> DataPosition | None:
        """See `alerting.recovery.position.Position`."""
        if self.dataset is None:
            return None
        return DataPosition(epoch=self.epoch, batch=self.batch, taken=self.taken)

    def skip_to(self, taken: int) -> None:
        """See `alerting.recovery.position.Position`; done when the next batches are drawn."""
        self.skipping_to = taken

    def follow(self, iterator: Any) -> None:
        """Batches come from `iterator` from now on, which nothing was drawn from.

        Where a checkpoint was loaded, it is put where that one's was.

        Raises:
            ConfigError: it cannot be saved.
            CheckpointError: it is of another dataset than the one in the checkpoint.
        """
        if iterator is self._iterator:
            return
        self._iterator = iterator
        restored, self._restored = self._restored, None
        if restored is None:
            self._first = _saved(iterator)
            return
        self._first = restored["first"]
        try:
            _load(iterator, restored["now"])
            # Keras may have put something around ours; the seeds are the same.
            dataset = iterator._dataset
            # One that repeats draws seeds on its way, and holds them itself.
            if not repeats(dataset):
                # Making an iterator draws the seeds of its epoch. This one has, for nothing: set
                # them back to where they were when that epoch began.
                _load(iter(dataset), self._first)
        except tf.errors.OpError as error:
            raise CheckpointError(
                f"the dataset is not the one that was saved: {cause(error)}"
            ) from error

    def next(self) -> Any:
        """The next batch, of the next epoch where this one has ended; None without a dataset.

        Raises:
            ConfigError: the dataset is empty.
        """
        while True:
            batch = self._draw()
            if self.taken > self.skipping_to:
                return batch

    def count(self) -> None:
        """A batch was taken from the iterator, by whomever."""
        self.batch += 1
        self.taken += 1

    def begin_epoch(self, epoch: int) -> None:
        """Stand before the first batch of `epoch`."""
        self.epoch, self.batch, self.over = epoch, 0, False

    def start(self) -> None:
        """Stand before the first batch of the first epoch."""
        self.begin_epoch(0)
        self.taken = self.skipping_to = 0
        if self.dataset is not None:
            self.follow(iter(self.dataset))

    def capture(self) -> tuple[dict[str, int], dict[str, Any]]:
        """The position: numbers, and tensors of the iterator's state."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        numbers["of_epoch"] = self._of_epoch
        if self._iterator is None:
            return numbers, {}
        return numbers, {"first": self._first, "now": _saved(self._iterator)}

    def restore(self, numbers: dict[str, int], tensors: dict[str, Any]) -> None:
        """Stand where `capture` was called, once there is an iterator to follow.

        Raises:
            CheckpointError: there is a dataset now and was none, or the other way round, or it has
                another length.
        """
        if bool(tensors) != (self.dataset is not None):
            raise CheckpointError(
                "it was saved with a dataset and this run has none, or the other way round"
            )
        if numbers["of_epoch"] != self._of_epoch:
            # Its iterator would go on by the old numbers, or fail in the midst of the epoch.
            raise CheckpointError(
                f"it was saved with a dataset of {numbers['of_epoch']} batches, and there are "
                f"{self._of_epoch} now; give the same data, or choose another run folder"
            )
        for name in _NUMBERS:
            setattr(self, name, numbers[name])
        self.skipping_to = self.taken
        self._iterator = None
        self._restored = tensors or None

    def resume(self) -> None:
        """Follow an iterator of its own."""
        if self.dataset is not None and self._iterator is None:
            self.follow(iter(self.dataset))

    @property
    def _of_epoch(self) -> int:
        """Batches of an epoch; negative where there is no end or nobody knows."""
        return 0 if self.dataset is None else int(self.dataset.cardinality())

    def _draw(self) -> Any:
        if self.dataset is None:
            self.count()
            return None
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.begin_epoch(self.epoch + 1)
            self.follow(iter(self.dataset))
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ConfigError("the dataset is empty: it gave no batch in an epoch") from None
        self.count()
        return batch


def _saved(iterator: Any) -> Any:
    try:
        return iterator._serialize_to_tensors()["_STATE"]
    except (tf.errors.OpError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"the position in the dataset cannot be saved: {cause(error)}; leave out what keeps a "
            "state that tf.data cannot save (from_generator, py_function, random operations in "
            "map), or pass a keras.utils.PyDataset"
        ) from error


def _load(iterator: Any, state: Any) -> None:
    iterator._restore_from_tensors({"_STATE": state})
