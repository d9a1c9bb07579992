"""What a checkpoint of a Keras run holds, and the way back to it.

keras.index  keras.data-00000-of-00001   TensorFlow's format: tf.train.load_checkpoint
model/..., optimizer/..., metrics/..., data/...
keras-guard.npz                          the rest: see `tree`
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from alerting.exceptions import CheckpointError, ConfigError
from alerting.files import sync_file
from alerting.recovery import random_state
from alerting.recovery.detector import Detector, take_over
from alerting.recovery.failures import cause
from alerting.recovery.keras_position import KerasPosition
from alerting.recovery.manifest import DataPosition
from alerting.recovery.ranks import Ranks
from alerting.recovery.state import require_own
from alerting.recovery.tree import copied, read_tree, write_tree

TENSORS = "keras"
"""Within a checkpoint: what TensorFlow calls the prefix of a checkpoint's files."""
REST = "keras-guard.npz"


@dataclass(frozen=True, slots=True)
class KerasSnapshot:
    """A copy, in host memory, of a training state at a step boundary.

    Attributes:
        tensors: by name.
        rest: everything else.
    """

    tensors: dict[str, Any]
    rest: dict[str, Any]

    def write(self, folder: Path, ranks: Ranks) -> list[Path]:
        """See `alerting.recovery.state.Snapshot`."""
        with tf.device("CPU"):
            tf.raw_ops.SaveV2(
                prefix=str(folder / TENSORS),
                tensor_names=list(self.tensors),
                shape_and_slices=[""] * len(self.tensors),
                tensors=list(self.tensors.values()),
            )
        files = sorted(folder.glob(f"{TENSORS}.*"))
        for file in files:
            sync_file(file)
        write_tree(folder / REST, self.rest)
        return [*files, folder / REST]


class KerasState:
    """The live objects of a run, taken and put back together; see `alerting.recovery.state.State`.

    Args:
        model: built.
        optimizer: its variables are made here, where they are not there yet.
        extra: by name, further objects with `variables`, or variables.
        position: in the data.
        detector: whose state goes along.

    Raises:
        ConfigError: some of `extra` has no variables, or something that training changes is not
            saved.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        extra: Mapping[str, Any],
        position: KerasPosition,
        detector: Detector,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._extra = dict(extra)
        for name, value in self._extra.items():
            if not (hasattr(value, "variables") or hasattr(value, "assign")):
                raise ConfigError(f"state[{name!r}] is no variable and has no variables")
            if not getattr(value, "built", True):
                # Its variables would be missing in what is saved before its first use.
                raise ConfigError(
                    f"state[{name!r}] is not built: an optimizer is by build(trainable_variables)"
                )
        for forgotten in _forgotten(model, optimizer, self._extra.values()):
            raise ConfigError(
                f"{forgotten} is not among the model's variables and would not be saved: pass it "
                "as state={...}"
            )
        self._position = position
        self._detector = detector
        self._metrics: list[tuple[Any, Any]] = []

    @property
    def data(self) -> DataPosition | None:
        """See `alerting.recovery.state.State`."""
        return self._position.data

    def start(self) -> None:
        """Nothing to do: whoever draws the batches stands there."""

    def capture(self, step: int, folder: Path) -> KerasSnapshot:
        """A copy of the state after `step` steps."""
        groups = self._groups()
        numbers, iterator = self._position.capture()
        with self._detector.paused():
            detector = copied(self._detector.state_dict(), "the exporter's state")
        tensors = {f"data/{name}": tensor for name, tensor in iterator.items()}
        for group, variables in groups.items():
            # Tensors share a variable's memory until its next step, which takes other memory then.
            # They are written as they are, where an array would be copied once more.
            with tf.device("CPU"):
                tensors |= {
                    f"{group}/{name}": tf.identity(tf.convert_to_tensor(variable))
                    for name, variable in variables.items()
                }
        rest = {
            "framework": "Keras",
            "step": step,
            "variables": {group: list(variables) for group, variables in groups.items()},
            "position": numbers,
            "detector": detector,
            "random": random_state.capture(),
        }
        return KerasSnapshot(tensors, rest)

    def restore(self, folder: Path, world_size: int) -> None:
        """See `alerting.recovery.state.State`."""
        require_own(folder / REST, "Keras")
        try:
            rest = read_tree(folder / REST)
            reader = tf.train.load_checkpoint(str(folder / TENSORS))
            # All is read and compared before any of it is changed.
            pairs = self._pairs(folder.name, rest["variables"], reader)
            with self._detector.paused():
                for variable, value in pairs:
                    variable.assign(value)
            metrics = {id(variable) for variable in self._model.metrics_variables}
            self._metrics = [pair for pair in pairs if id(pair[0]) in metrics]
            self._position.restore(rest["position"], _iterator_of(folder, reader))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {folder.name} cannot be loaded: {cause(error)}"
            ) from error
        take_over(self._detector, rest["detector"])
        random_state.restore(rest["random"])

    def put_metrics_back(self) -> None:
        """Once more after `restore`: a fit that begins an epoch sets them to nothing."""
        for variable, value in self._metrics:
            variable.assign(value)

    def _pairs(self, name: str, saved: dict[str, list[str]], reader: Any) -> list[tuple[Any, Any]]:
        """Each variable with its value.

        By their order: names that Keras makes up count the layers of the process, and a model that
        is built a second time has others. What a variable is in its layer or optimizer must be the
        same: Adadelta has as many of each shape as Adam, and would take its moments for its own.
        """
        groups, pairs = self._groups(), []
        for group in sorted(groups.keys() | saved.keys()):
            variables, names = groups.get(group, {}), saved.get(group, [])
            if len(variables) != len(names):
                raise CheckpointError(
                    f"checkpoint {name} does not fit this run: it has {len(names)} variables of "
                    f"{group}, and this run has {len(variables)}"
                )
            for (own, variable), its in zip(variables.items(), names, strict=True):
                value = reader.get_tensor(f"{group}/{its}")
                if tuple(variable.shape) != value.shape:
                    raise CheckpointError(
                        f"checkpoint {name} does not fit this run: {group}/{its} has the shape "
                        f"{value.shape}, and {own} here {tuple(variable.shape)}"
                    )
                if _meaning(own) != _meaning(its):
                    raise CheckpointError(
                        f"checkpoint {name} does not fit this run: in place of {own} it has "
                        f"{group}/{its}"
                    )
                pairs.append((variable, value))
        return pairs

    def _groups(self) -> dict[str, dict[str, Any]]:
        """All variables by what they belong to and by name; each once."""
        found = {
            "model": self._model.variables,
            "optimizer": self._optimizer.variables,
            "metrics": self._model.metrics_variables,
            # What draws without a seed of its own.
            "random": [global_seed_generator().state],
            **{f"state/{name}": getattr(v, "variables", [v]) for name, v in self._extra.items()},
        }
        seen: set[int] = set()
        return {group: _named(variables, seen) for group, variables in found.items()}


def build(model: Any, optimizer: Any, dataset: tf.data.Dataset | None = None) -> None:
    """Make the variables that training would make at its first step, so that they can be loaded.

    Raises:
        ConfigError: the model's cannot be made without being called.
    """
    if dataset is not None:
        spec = keras.tree.map_structure(
            lambda tensor: keras.KerasTensor(tuple(tensor.shape), tensor.dtype.name),
            dataset.element_spec,
        )
        model._symbolic_build(data_batch=spec)
    if not model.built:
        raise ConfigError("the model has no variables yet: call it on a batch first")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    # Made at its first use otherwise, of Python's random numbers, which go on as if it had been.
    words = random.getstate()
    global_seed_generator()
    random.setstate(words)


def _forgotten(model: Any, optimizer: Any, extra: Iterable[Any]) -> Iterator[str]:
    """What is kept as an attribute and changes in training, and Keras counts as no variable."""
    known = {
        id(optimizer),
        *(id(part) for v in extra for part in (v, *getattr(v, "variables", []))),
    }
    for layer in model._flatten_layers():
        # Keras' own have tables that do not change, and the optimizer of a loop that has another.
        if type(layer).__module__.startswith("keras."):
            continue
        for name, value in vars(layer).items():
            kept = value.state if isinstance(value, tf.random.Generator) else value
            if name == "optimizer" or id(kept) in known:
                continue
            if isinstance(kept, tf.Variable | keras.optimizers.Optimizer):
                yield f"{type(layer).__name__}.{name}"


def _meaning(name: str) -> str:
    """The last word of a variable's name, without the numbers that Keras gives."""
    words: list[str] = re.findall("[A-Za-z]+", name)
    return words[-1] if words else ""


def _named(variables: Iterable[Any], seen: set[int]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for variable in variables:
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        name = base = getattr(variable, "path", None) or variable.name
        again = 1
        while name in named:
            again += 1
            name = f"{base}-{again}"
        named[name] = variable
    return named


def _iterator_of(folder: Path, reader: Any) -> dict[str, Any]:
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith("data/")]
    with tf.device("CPU"):
        return {
            name.removeprefix("data/"): tf.raw_ops.RestoreV2(
                prefix=str(folder / TENSORS),
                tensor_names=[name],
                shape_and_slices=[""],
                dtypes=[tf.variant],
            )[0]
            for name in names
        }
