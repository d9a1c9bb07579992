"""Keeps the batch that broke a layer: RUN_FOLDER/batches, a file a rank and first bad step.

    step-00000440-rank-00000.pt           torch.load(file, weights_only=True) gives the batch
    step-00000440-rank-00000-micro-1.pt   of several micro-batches each has a file

Batches may be private: only the trainer's own user can read them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

from alerting.files import sync_folder
from alerting.recovery.detector import Detector
from alerting.recovery.failures import cause
from alerting.recovery.staging import staged

log = logging.getLogger(__name__)

FOLDER = "batches"

# A detector that copies statistics from a device, or joins those of ranks, sees a bad step up to
# some steps later.
_STEPS_HELD = 4
_STEPS_KEPT = 3
"""On the disk: the anomaly, and two before it; one that comes again must not fill the disk."""


class Batches:
    """The batches of one rank's last steps, one of which may turn out to be the first bad one.

    Nothing in it raises, and files are written behind training's back. Batches are held and not
    copied, until one is saved: a loop that writes into its batch has what it made of it saved.

    Args:
        folder: where to; made when the first one is saved.
        limit: bytes that the batches of a step may have to be held and saved; 0 for no saving.
        detector: knows the first bad step.
        rank: of this process.
    """

    def __init__(self, folder: Path, limit: int, detector: Detector, rank: int) -> None:
        self._folder = folder
        self._limit = limit
        self._detector = detector
        self._rank = rank
        self._held: deque[tuple[int, list[Any], int]] = deque(maxlen=_STEPS_HELD)
        self._handled: int | None = None
        self._told = False  # that batches cannot be held; of a kind that all steps have, once
        self._executor: ThreadPoolExecutor | None = None

    def hold(self, step: int, batches: Sequence[Any]) -> None:
        """Step `step` is about to be taken with these; they are held for as long as may matter."""
        if not self._limit:
            return
        try:
            plain = [_plain(batch) for batch in batches]
            size = sum(map(_bytes, plain))
            # What is too large is not held either: it may lie on a device.
            self._held.append((step, plain if size <= self._limit else [], size))
        except Exception as error:
            if not self._told:
                log.warning("step %d: its batch is not held: %s", step, cause(error))
            self._told = True

    def look(self) -> None:
        """After a step: save the batch of the first bad one, where that has just been seen."""
        if not self._limit:
            return
        try:
            onset = self._detector.onset()
            if onset != self._handled:
                self._handled = onset
                if onset is not None:
                    self._save(onset)
        except Exception as error:
            log.warning("the batch of the first bad step is not saved: %s", cause(error))

    def close(self) -> None:
        """Wait for what is being written."""
        self._held.clear()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _save(self, step: int) -> None:
        found = next((held for held in reversed(self._held) if held[0] == step), None)
        if found is None:
            log.warning("step %d was bad, and its batch is no longer at hand", step)
            return
        _, batches, size = found
        if not batches:
            log.warning(
                "step %d was bad, and its batch is not saved: %d bytes are more than"
                " save_batch_bytes, %d",
                *(step, size, self._limit),
            )
            return
        # Copied now: the loop may use its tensors again.
        copies = [staged(batch, "the batch") for batch in batches]
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="act-batch")
        self._executor.submit(self._write, step, copies)

    def _write(self, step: int, batches: list[Any]) -> None:
        base = f"step-{step:08d}-rank-{self._rank:05d}"
        many = len(batches) > 1
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._clear_away()
            for number, batch in enumerate(batches, 1):
                path = self._folder / (f"{base}-micro-{number}.pt" if many else f"{base}.pt")
                _write_whole(path, batch)
                log.warning("step %d was bad, and its batch is saved as %s", step, path)
        except Exception as error:
            log.warning("step %d was bad, and its batch is not saved: %s", step, cause(error))

    def _clear_away(self) -> None:
        """Leave room for the files of one more step."""
        own = f"step-*-rank-{self._rank:05d}*"
        for leftover in self._folder.glob(f".{own}.tmp"):
            leftover.unlink()
        files = sorted(self._folder.glob(f"{own}.pt"), key=lambda path: path.stat().st_mtime)
        steps = list(dict.fromkeys(path.name.partition("-rank-")[0] for path in reversed(files)))
        kept = set(steps[: _STEPS_KEPT - 1])
        for path in files:
            if path.name.partition("-rank-")[0] not in kept:
                path.unlink()


def _plain(value: Any) -> Any:
    """The same of plain dicts, tuples, lists and tensors.

    What a tokenizer returns is none of them, and `torch.load(weights_only=True)` reads no arrays.
    """
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_bytes, value))
    return 0


def _write_whole(path: Path, batch: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            torch.save(batch, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
