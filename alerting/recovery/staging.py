"""Copies of small state, made at a step boundary so that training can go on at once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy
import torch

from alerting.exceptions import CheckpointError


def staged(value: Any, where: str) -> Any:
    """A deep copy of `value` on the CPU, of tensors, numbers, strings, lists, tuples and dicts.

    Args:
        value: what some object's `state_dict` returned.
        where: its place, for the error.

    Raises:
        CheckpointError: something else is in it, which `torch.load(weights_only=True)` would
            refuse when the run is resumed, weeks from now.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    # Exact types: a subclass is pickled by its name, which torch.load refuses.
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        # These two subclasses are let through by torch.load and used by torch's own state dicts.
        kind = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({key: staged(item, f"{where}[{key!r}]") for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(staged(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, numpy.generic):
        return value.item()
    for plain in (float, int, str):
        if isinstance(value, plain):
            return plain(value)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds "
        "tensors, numbers, strings, lists and dicts only"
    )
