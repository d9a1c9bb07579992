"""A guard's checkpoint, of which the model's weights are taken.

What a `TrainingGuard` saves is torch.distributed.checkpoint's format, with the model below "model";
any checkpoint of that form will do.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from act_exporter.exceptions import SettingError, one_line

_NAMED = 5
"""Names in an error: more are read by nobody."""


def load_weights(model: nn.Module, folder: Path) -> None:
    """Give `model` the weights and buffers of a checkpoint; of the optimizer nothing is read.

    The checkpoint's index is a pickle, as torch makes it: one from a stranger can run code.

    Raises:
        SettingError: it is no such checkpoint, or another model's.
    """
    if not (folder / ".metadata").is_file():
        raise SettingError(
            f"{folder} is no checkpoint of a TrainingGuard: it has no .metadata; give one of the"
            " folders in RUN_FOLDER/checkpoints"
        )
    reader = FileSystemReader(folder)
    target = get_model_state_dict(model)
    try:
        with warnings.catch_warnings():
            # That one process is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            _require_same(folder, reader, target.keys())
            load({"model": target}, storage_reader=reader, no_dist=True)
    except SettingError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise SettingError(f"{folder} cannot be loaded: {_cause(error)}") from error
    set_model_state_dict(model, target)


def _require_same(folder: Path, reader: FileSystemReader, own: object) -> None:
    paths = (reader.read_metadata().planner_data or {}).values()
    saved = {str(path[1]) for path in paths if len(path) > 1 and path[0] == "model"}
    wanted = set(map(str, own))  # type: ignore[call-overload]
    for owner, names in (("the checkpoint", wanted - saved), ("the model", saved - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:_NAMED])
            raise SettingError(f"{folder} is of another model: {owner} has no {listed}")


def _cause(error: BaseException) -> str:
    """What is behind torch's traceback of each rank, in one line."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return one_line(error)
