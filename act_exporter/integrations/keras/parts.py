"""The layers of a Keras model, each once, and their names.

A name is the way to a layer through the model: the names that a Sequential or functional model has
for its layers, elsewhere the attributes that hold them. Keras numbers unnamed layers through the
whole process (`dense_17`, by what was made before); here they are numbered among their siblings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.models import Functional
from keras.src.utils.naming import to_snake_case

# What a layer has of Keras' and TensorFlow's own, beside its author's attributes.
_BOOKKEEPING = {"_layers", "_tracker", "_functional"}


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of a model.

    Attributes:
        layer: the layer.
        composite: whether there are layers in it.
    """

    layer: keras.Layer
    composite: bool

    @property
    def is_leaf(self) -> bool:
        """Whether it is not taken apart."""
        return not self.composite or self.has_matrix

    @property
    def has_matrix(self) -> bool:
        """Whether it has a weight of two dimensions or more itself; an RNN has its cell's."""
        own = self.layer.weights
        if self.composite:
            own = (*self.layer._trainable_variables, *self.layer._non_trainable_variables)
        return any(len(variable.shape) >= 2 for variable in own)

    @property
    def is_embedding(self) -> bool:
        """Whether it looks up rows of a matrix."""
        return self.has_matrix and "embedding" in type(self.layer).__name__.lower()

    @property
    def is_projection(self) -> bool:
        """Whether it multiplies by a matrix or convolves."""
        return self.has_matrix and not self.is_embedding


def walk(model: keras.Model) -> Iterator[tuple[str, Part]]:
    """Each layer in the model once, by the first way that leads to it."""
    seen = {id(model)}

    def walk(layer: keras.Layer, prefix: str) -> Iterator[tuple[str, Part]]:
        for own, child in _children(layer):
            if id(child) in seen:
                continue
            seen.add(id(child))
            inside = list(walk(child, f"{prefix}{own}."))
            yield prefix + own, Part(child, bool(inside))
            yield from inside

    return walk(model, "")


def _children(layer: keras.Layer) -> list[tuple[str, keras.Layer]]:
    """Name and layer of all directly inside, each once."""
    if isinstance(layer, keras.layers.RNN):
        return []  # kernels for GPUs compute what its cell would, and never call it
    if not isinstance(layer, keras.Sequential | Functional):
        return _attributes(layer)
    layers = [own for own in layer.layers if not isinstance(own, keras.layers.InputLayer)]
    named = {own.name for own in layers}
    counts: Counter[str] = Counter()
    found = []
    for own in layers:
        base = base_name(own)
        # Keras' own numbers begin without one: a 0 was written by hand, as those beside it were.
        if _is_named(own) or f"{base}_0" in named:
            found.append((own.name, own))
            continue
        found.append((f"{base}_{counts[base]}" if counts[base] else base, own))
        counts[base] += 1
    return found


def base_name(layer: keras.Layer) -> str:
    """Its name without a number at the end."""
    return re.sub(r"_\d+$", "", layer.name) or layer.name


def _is_named(layer: keras.Layer) -> bool:
    """Whether the user has named it, and not Keras by its class."""
    return bool(base_name(layer) != to_snake_case(type(layer).__name__))


def _attributes(layer: keras.Layer) -> list[tuple[str, keras.Layer]]:
    inside = {id(own): own for own in layer._flatten_layers(include_self=False, recursive=False)}
    found: dict[int, str] = {}
    for attribute, value in vars(layer).items():
        if attribute in _BOOKKEEPING or attribute.startswith("_self_"):
            continue
        for path, own in _layers_in(attribute, value):
            if id(own) in inside and id(own) not in found:
                # A private attribute says less than a name that was given.
                private = path.startswith("_")
                found[id(own)] = own.name if private and _is_named(own) else path.lstrip("_")
    return [(name, inside[number]) for number, name in found.items()]


def _layers_in(path: str, value: Any) -> Iterator[tuple[str, keras.Layer]]:
    if isinstance(value, keras.Layer):
        yield path, value
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _layers_in(f"{path}.{key}", own)
    elif isinstance(value, list | tuple):
        for number, own in enumerate(value):
            yield from _layers_in(f"{path}.{number}", own)
