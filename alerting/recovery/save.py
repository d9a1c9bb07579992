"""One save: the copies are made at the step boundary, the files are written behind training's back.

The folder is complete, synced and has its manifest when the save is done; its name is given by the
training thread, at a boundary.
"""

from __future__ import annotations

import dataclasses
import os
import time
from concurrent.futures import Executor, Future, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from alerting.files import sync_folder
from alerting.recovery.checkpoints import stored_file
from alerting.recovery.manifest import Manifest
from alerting.recovery.training_state import RANK_FILE, Snapshot


class Save:
    """A save under way."""

    def __init__(self, manifest: Manifest, written: Future[float]) -> None:
        self.manifest = manifest
        self._written = written

    @classmethod
    def begin(cls, snapshot: Snapshot, draft: Manifest, folder: Path, executor: Executor) -> Save:
        """Copy the live tensors and start writing into the new folder `folder`.

        Args:
            snapshot: the state; its live tensors may change as soon as this returns.
            draft: the manifest, but for the files.
            folder: must not exist.
            executor: runs the writing.
        """
        began = time.monotonic()
        folder.mkdir()
        # Stages a copy before it returns; without a process group, as there is one rank.
        begun = async_save(snapshot.sharded, checkpoint_id=folder, no_dist=True)
        tensors = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
        return cls(draft, executor.submit(_write, tensors, snapshot.rank, draft, folder, began))

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._written.done()

    def result(self) -> float:
        """Wait for the files; the seconds that the save took. Raises what went wrong."""
        return self._written.result()


def _write(
    tensors: Future[Any], rank: dict[str, Any], draft: Manifest, folder: Path, began: float
) -> float:
    try:
        with (folder / RANK_FILE).open("wb") as file:
            torch.save(rank, file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        # Nobody may clear the folder away while the tensors are still being written into it.
        wait([tensors])
    tensors.result()
    files = {
        str(path.relative_to(folder)): stored_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    sync_folder(folder)
    dataclasses.replace(draft, files=files).write(folder)
    return time.monotonic() - began
