"""A tree of arrays, numbers, strings, lists, tuples and dicts as one file.

It is an .npz that NumPy reads without pickle: the arrays by number, and under `tree` JSON that says
where each belongs. Nothing in it can run anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from alerting.exceptions import CheckpointError


def write_tree(path: Path, tree: dict[str, Any]) -> None:
    """Write `tree` into `path`, synced.

    Raises:
        CheckpointError: something else is in it.
        OSError: the disk failed.
    """
    arrays: list[NDArray[Any]] = []
    text = json.dumps(_packed(tree, "the state", arrays))
    with path.open("wb") as file:
        numbered: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
        numpy.savez(file, tree=numpy.array(text), **numbered)
        file.flush()
        os.fsync(file.fileno())


def read_tree(path: Path) -> dict[str, Any]:
    """What `write_tree` wrote."""
    with numpy.load(path, allow_pickle=False) as content:
        tree: dict[str, Any] = _unpacked(json.loads(str(content["tree"])), content)
    return tree


def copied(value: Any, where: str) -> Any:
    """A copy of `value`, a tree, that shares nothing with it.

    Args:
        value: what some object's `state_dict` returned.
        where: its place, for the error.

    Raises:
        CheckpointError: something is in it that no file could bring back.
    """
    arrays: list[NDArray[Any]] = []
    packed = _packed(value, where, arrays)
    return _unpacked(packed, {str(number): array.copy() for number, array in enumerate(arrays)})


def _packed(value: Any, where: str, arrays: list[NDArray[Any]]) -> Any:
    """`value` as JSON has it; its arrays go to the end of `arrays`."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        # Pairs: JSON would make strings of its keys.
        pairs = [[key, _packed(item, f"{where}[{key!r}]", arrays)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, tuple | list):
        items = [_packed(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds "
        "arrays, numbers, strings, lists, tuples and dicts only"
    )


def _unpacked(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "array":
        return arrays[str(content)]
    if kind == "dict":
        return {key: _unpacked(item, arrays) for key, item in content}
    return tuple(_unpacked(item, arrays) for item in content)
