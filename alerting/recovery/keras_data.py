"""Data for `fit` as a tf.data.Dataset whose iterator can be saved, whatever it was given as."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from alerting.exceptions import ConfigError


def as_dataset(
    x: Any, y: Any, sample_weight: Any, *, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset:
    """The batches of an epoch.

    A dataset is taken as it is. Arrays and a PyDataset are drawn by number, in an order that
    comes of the seed and the epoch: Keras' own pipelines for them shuffle with random numbers
    that nothing brings back.

    Raises:
        ConfigError: it is something whose position cannot be saved.
    """
    given = isinstance(x, tf.data.Dataset | keras.utils.PyDataset)
    if given and (y is not None or sample_weight is not None):
        raise ConfigError(
            f"y and sample_weight go with arrays: a {type(x).__name__} gives them itself, in its "
            "batches of (x, y, sample_weight)"
        )
    if isinstance(x, tf.data.Dataset):
        require_exact(x)
        return x
    if isinstance(x, keras.utils.PyDataset):
        return _of_py_dataset(x, shuffle, seed)
    if hasattr(x, "__next__") or (hasattr(x, "__iter__") and not _is_arrays(x)):
        raise ConfigError(
            f"the position in a {type(x).__name__} cannot be saved, so nothing leads back to it "
            "after a rollback: pass a tf.data.Dataset, a keras.utils.PyDataset or arrays"
        )
    if y is None and sample_weight is not None:
        raise ConfigError("sample_weight without y weighs nothing: pass y")
    arrays = tuple(part for part in (x, y, sample_weight) if part is not None)
    return _of_arrays(arrays, batch_size, shuffle, seed)


def require_exact(dataset: tf.data.Dataset) -> None:
    """Refuse what tf.data does not bring back to the same batches.

    A shuffle that has given all away is gone, and its seeds with it. Where a repetition waits
    behind a batch or a buffer that still has some of it, a checkpoint has no seeds for the next.

    Raises:
        ConfigError: it is empty, or repeats something shuffled with something in between.
    """
    if dataset.cardinality() == 0:
        raise ConfigError("the dataset is empty")
    for part in _parts(dataset):
        if _is(part, "Repeat"):
            below = [p for p in _parts(part)[1:] if not _is(p, "Options")]
            if any(_is(p, "Shuffle") for p in below) and not _is(below[0], "Shuffle"):
                raise ConfigError(
                    "a dataset that is shuffled anew each time cannot be gone back in unless "
                    "repeat() is right behind shuffle(): put batch(), map() and prefetch() after it"
                )


def repeats(dataset: tf.data.Dataset) -> bool:
    """Whether an iterator of it goes through something more than once."""
    return any(_is(part, "Repeat") for part in _parts(dataset))


def _parts(dataset: Any) -> list[Any]:
    """`dataset` and all that it draws from, the last step first."""
    return [dataset, *(part for source in dataset._inputs() for part in _parts(source))]


def _is(dataset: Any, kind: str) -> bool:
    # _RepeatDataset, _ShuffleDataset, _OptionsDataset: tf.data has no public names for them.
    return type(dataset).__name__.strip("_").startswith(kind)


def _is_arrays(x: Any) -> bool:
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _of_arrays(arrays: Any, batch_size: int, shuffle: bool, seed: int) -> tf.data.Dataset:
    tensors = tf.nest.map_structure(_tensor, _plain(arrays))
    lengths = {len(tensor) for tensor in tf.nest.flatten(tensors)}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(f"the arrays have {sorted(lengths)} samples: they need as many each")
    [length] = lengths
    batches = _numbers(length, shuffle, seed).batch(batch_size)
    return (
        batches.map(lambda chosen: tf.nest.map_structure(lambda t: tf.gather(t, chosen), tensors))
        .apply(tf.data.experimental.assert_cardinality(-(-length // batch_size)))
        .prefetch(tf.data.AUTOTUNE)
    )


def _of_py_dataset(x: Any, shuffle: bool, seed: int) -> tf.data.Dataset:
    length = x.num_batches
    if length is None:
        raise ConfigError("the position in an endless PyDataset cannot be saved: give it a length")
    if length == 0:
        raise ConfigError("the PyDataset is empty")
    if type(x).on_epoch_end is not keras.utils.PyDataset.on_epoch_end:
        raise ConfigError(
            f"{type(x).__name__}.on_epoch_end changes the data from epoch to epoch, which cannot "
            "be gone back on: leave the shuffling to fit"
        )
    # Two, as Keras does: an axis by which they differ is another in each batch, as of padded texts.
    first, other = (
        tf.nest.map_structure(tf.convert_to_tensor, _plain(x[number]))
        for number in (0, min(1, length - 1))
    )
    kinds = [tensor.dtype for tensor in tf.nest.flatten(first)]
    shapes = [
        one.shape.most_specific_compatible_shape(another.shape)
        for one, another in zip(tf.nest.flatten(first), tf.nest.flatten(other), strict=True)
    ]

    def fetched(number: Any) -> list[Any]:
        found = tf.nest.flatten(_plain(x[int(number)]))
        return [tf.convert_to_tensor(value) for value in found]

    def batch(number: Any) -> Any:
        tensors = tf.py_function(fetched, [number], kinds)
        for tensor, shape in zip(tensors, shapes, strict=True):
            tensor.set_shape([None, *shape[1:]])
        return tf.nest.pack_sequence_as(first, tensors)

    options = tf.data.Options()
    # What a batch is follows from its number, so there is no other state to save.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return (
        _numbers(length, shuffle, seed)
        .map(batch, num_parallel_calls=x.workers, deterministic=True)
        .apply(tf.data.experimental.assert_cardinality(length))
        .prefetch(max(1, x.max_queue_size))
        .with_options(options)
    )


def _tensor(array: Any) -> Any:
    tensor = tf.convert_to_tensor(array)
    # As `model.fit` has it.
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def _plain(value: Any) -> Any:
    """`value` with tuples for lists, each of which would be one tensor to tf.data."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


def _numbers(length: int, shuffle: bool, seed: int) -> tf.data.Dataset:
    """0 to length - 1, in another order each epoch; its iterator's state is a few numbers."""
    if not shuffle:
        return tf.data.Dataset.range(length)
    epochs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    return epochs.flat_map(
        lambda key: tf.data.Dataset.range(length).map(
            lambda number: tf.random.experimental.index_shuffle(
                number, tf.bitcast(key, tf.int32), length - 1
            )
        )
    )
