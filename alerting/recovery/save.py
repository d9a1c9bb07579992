"""One save: the copies are made at the step boundary, the files are written behind training's back.

Each rank writes its own files and says what they are; rank 0 writes the manifest, last. The folder
is complete and synced when the save is done; its name is given by the training thread, at a
boundary.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Executor, Future
from pathlib import Path

from alerting.files import sync_folder
from alerting.recovery.checkpoints import stored_file
from alerting.recovery.manifest import Manifest, StoredFile
from alerting.recovery.ranks import Ranks
from alerting.recovery.state import Snapshot


class Save:
    """A save under way.

    Args:
        snapshot: this rank's part of the state, copied already.
        draft: the manifest, but for the files.
        folder: where to; it is there, and empty.
        ranks: of the writing threads.
        executor: runs the writing.
    """

    def __init__(
        self, snapshot: Snapshot, draft: Manifest, folder: Path, ranks: Ranks, executor: Executor
    ) -> None:
        self.manifest = draft
        began = time.monotonic()
        self._written: Future[float] = executor.submit(
            _write, snapshot, draft, folder, ranks, began
        )

    @property
    def done(self) -> bool:
        """Whether this rank's `result` returns at once."""
        return self._written.done()

    def result(self) -> float:
        """Wait for the files; the seconds that the save took. Raises what failed, on any rank."""
        return self._written.result()


def _write(snapshot: Snapshot, draft: Manifest, folder: Path, ranks: Ranks, began: float) -> float:
    with ranks.united():
        own = snapshot.write(folder, ranks)
        files = {str(path.relative_to(folder)): stored_file(path) for path in own}
        sync_folder(folder)
    parts = ranks.gather(files)
    ranks.lead(lambda: _complete(draft, parts, folder))
    return time.monotonic() - began


def _complete(draft: Manifest, parts: list[dict[str, StoredFile]], folder: Path) -> None:
    files = {name: stored for part in parts for name, stored in part.items()}
    dataclasses.replace(draft, files=files).write(folder)
