"""What a user's function gives to `act-exporter doctor`, with a guard's files in their places."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from act_exporter.doctor.checkpoint import load_weights
from act_exporter.doctor.examination import examine
from act_exporter.exceptions import SettingError, one_line
from act_exporter.loading import call, find_function

_NAMES = [name for name in inspect.signature(examine).parameters if name != "on_check"]


def given(
    target: str, *, checkpoint: Path | None = None, batch: Path | None = None
) -> dict[str, Any]:
    """The arguments of `examine`, by name.

    Args:
        target: the user's `module:function`. It returns a model and a batch, or a mapping with
            names of `examine`'s arguments. One with a parameter `batch` is called with the batch
            of the file, or None, and returns what the model takes; of another one the batch is
            replaced by the file's.
        checkpoint: a guard's; the model gets its weights.
        batch: a file that a guard saved, or `torch.save`.

    Raises:
        SettingError: something of it cannot serve; says what.
    """
    function = find_function(target)
    if _takes_batch(function):
        saved = None if batch is None else _read(batch, "cpu")
        found = _arguments(target, call(target, function, batch=saved))
    else:
        found = _arguments(target, call(target, function))
        if batch is not None:
            device = next((p.device for p in found["model"].parameters()), "cpu")
            found["batch"] = _read(batch, device)
    if "batch" not in found:
        raise SettingError(f"{target} returned no batch: return one, or give a file with --batch")
    if checkpoint is not None:
        load_weights(found["model"], checkpoint)
    return found


def _takes_batch(function: Any) -> bool:
    try:
        return "batch" in inspect.signature(function).parameters
    except ValueError:  # one that is written in C
        return False


def _arguments(target: str, returned: Any) -> dict[str, Any]:
    if isinstance(returned, nn.Module):
        returned = {"model": returned}
    elif isinstance(returned, tuple) and len(returned) == 2:
        returned = dict(zip(("model", "batch"), returned, strict=True))
    if not isinstance(returned, Mapping):
        raise SettingError(
            f"{target} returned {type(returned).__name__}; return a model and a batch, or a dict"
            f" with {', '.join(_NAMES)}"
        )
    unknown = [str(name) for name in returned if name not in _NAMES]
    if unknown:
        raise SettingError(
            f"{target} returned a dict with {', '.join(unknown)}; what can be examined is"
            f" {', '.join(_NAMES)}"
        )
    model = returned.get("model")
    if not isinstance(model, nn.Module):
        raise SettingError(f"{target} returned no torch.nn.Module as its model")
    return dict(returned)


def _read(file: Path, device: Any) -> Any:
    try:
        return torch.load(file, weights_only=True, map_location=device)
    except OSError as error:
        raise SettingError(f"batch {file}: {error.strerror}") from error
    except Exception as error:
        raise SettingError(f"batch {file} cannot be read: {one_line(error)}") from error
