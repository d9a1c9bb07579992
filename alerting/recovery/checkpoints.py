"""The checkpoint store: RUN_FOLDER/checkpoints, one folder a checkpoint.

    step-00000500-g0/            step 500 of generation 0
        manifest.json            written last
        health.json              replaced when the verdict changes
        health-operator.json     what a person says over it, if somebody did
        pinned.json              where a person wants it to stay
        rank-00000.pt  .metadata  __0_0.distcp
    .saving-step-00001000-g0/    not published yet
    .deleting-step-00000000-g0/  half of it may be gone
    deletions.log                a line for each that was deleted

What it did not write itself it neither reads, counts nor deletes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from alerting.exceptions import CheckpointError
from alerting.files import sync_folder
from alerting.recovery.health import HealthRecord, read_health, verdict
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.manifest import (
    FILE as MANIFEST_FILE,
)
from alerting.recovery.manifest import (
    ForeignManifestError,
    Kind,
    StoredFile,
    read_manifest,
)
from alerting.recovery.pins import is_pinned

log = logging.getLogger(__name__)

SAVING = ".saving-"
DELETING = ".deleting-"
DELETIONS = "deletions.log"
_PIECE_BYTES = 1 << 20
"""Read at once while hashing: large enough to be as fast as the disk, small enough for a bar."""


class CheckpointStore:
    """One run's checkpoints on disk.

    Args:
        path: the folder.
        on_verdict: told of each verdict that has changed.
    """

    def __init__(
        self,
        path: Path,
        on_verdict: Callable[[Checkpoint, HealthRecord], None] = lambda *_: None,
    ) -> None:
        self.path = path
        self._on_verdict = on_verdict
        self._last_number = 0
        self._said: set[tuple[str, str]] = set()

    def open(self, *, begun: bool) -> None:
        """Make the folder, or find what a former process left in it.

        Args:
            begun: whether the run has been trained before, so that there must be a checkpoint.

        Raises:
            CheckpointError: it is something else's, or its checkpoints are gone or unreadable.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{self.path} is a file; checkpoints need a folder") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error}") from error
        for condemned in self.path.glob(f"{DELETING}*"):
            if is_pinned(condemned):
                # It is whole: pins are looked for before anything is removed.
                self._spare(condemned)
        found = self._scan(strict=True)
        foreign = self._foreign()
        if not found:
            # Before anything is cleared away, which a person may want to look at.
            self._require_unused(foreign, begun=begun)
        for name in foreign:
            log.warning("%s is not a checkpoint of this guard; left alone", self.path / name)
        for prefix, what in ((SAVING, "unfinished save"), (DELETING, "unfinished deletion")):
            for leftover in self.path.glob(f"{prefix}*"):
                log.warning("removing the %s %s of a former process", what, leftover.name)
                shutil.rmtree(leftover, ignore_errors=True)
        self._last_number = max((c.manifest.number for c in found), default=0)

    def all(self) -> list[Checkpoint]:
        """Every checkpoint with a readable manifest, oldest first, with its health of now."""
        return self._scan(strict=False)

    def next_number(self) -> int:
        """A number higher than every former one's."""
        self._last_number += 1
        return self._last_number

    def new_name(self, step: int, generation: int, kind: Kind) -> str:
        """A name that is free: a step is saved again after resuming from before a corrupt one."""
        mark = "" if kind in ("periodic", "final") else f"-{kind}"
        base = f"step-{step:08d}-g{generation}{mark}"
        name, again = base, 1
        while (self.path / name).exists():
            again += 1
            name = f"{base}-{again}"
        return name

    def unpublished(self, name: str) -> Path:
        """Where the checkpoint `name` is written."""
        return self.path / f"{SAVING}{name}"

    def publish(self, name: str, health: HealthRecord) -> Checkpoint:
        """Give a finished checkpoint its name.

        Raises:
            CheckpointError, OSError: it is not finished, or the disk failed.
        """
        folder = self.path / name
        unpublished = self.unpublished(name)
        health.write(unpublished)
        unpublished.rename(folder)
        sync_folder(self.path)
        manifest = read_manifest(folder)
        if manifest is None:
            raise CheckpointError(f"{folder} was published without its {MANIFEST_FILE}")
        return Checkpoint(folder=folder, manifest=manifest, health=health)

    def mark(self, checkpoint: Checkpoint, health: HealthRecord) -> HealthRecord:
        """Record a verdict, unless a worse one stands; the one that stands afterwards."""
        former = self._health(checkpoint.folder)
        if not health.replaces(former):
            return former
        log.log(
            logging.INFO if health.health == "confirmed" else logging.WARNING,
            "checkpoint %s is %s: %s",
            checkpoint.name,
            health.health,
            health.reason,
        )
        health.write(checkpoint.folder)
        self._on_verdict(checkpoint, health)
        return health

    def delete(self, checkpoint: Checkpoint, reason: str) -> None:
        """Delete it, with a line in the deletion log before anything is lost.

        One that was pinned since it was read stays.

        Raises:
            OSError: the log or the checkpoint could not be changed.
        """
        self._log_deletion(checkpoint.name, f"{checkpoint.health.health} {reason}")
        # Renamed first: half of a checkpoint must never lie under a checkpoint's name, and nobody
        # can pin it from here on.
        condemned = self.path / f"{DELETING}{checkpoint.name}"
        checkpoint.folder.rename(condemned)
        if is_pinned(condemned):
            self._spare(condemned)
            return
        shutil.rmtree(condemned)
        log.info("deleted checkpoint %s: %s", checkpoint.name, reason)

    def _spare(self, condemned: Path) -> None:
        name = condemned.name.removeprefix(DELETING)
        condemned.rename(self.path / name)
        sync_folder(self.path)
        log.info("checkpoint %s is not deleted: it was pinned meanwhile", name)
        self._log_deletion(name, "not deleted: it was pinned meanwhile")

    def _log_deletion(self, name: str, words: str) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with (self.path / DELETIONS).open("a", encoding="utf-8") as file:
            file.write(f"{moment} {name} {words}\n")
            file.flush()
            os.fsync(file.fileno())

    def _scan(self, *, strict: bool) -> list[Checkpoint]:
        found = []
        for folder in self.path.iterdir():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            try:
                manifest = read_manifest(folder)
            except ForeignManifestError:
                if strict:
                    raise
                continue
            except CheckpointError as error:
                self._warn_once("checkpoint %s is not used: %s", folder.name, error)
                continue
            if manifest is None:
                continue
            health, pinned = self._health(folder), is_pinned(folder)
            # Not where the guard deletes it while somebody else looks.
            if folder.exists():
                found.append(
                    Checkpoint(folder=folder, manifest=manifest, health=health, pinned=pinned)
                )
        return sorted(found, key=lambda c: c.manifest.number)

    def _health(self, folder: Path) -> HealthRecord:
        try:
            return read_health(folder)
        except CheckpointError as error:
            # With the verdict lost, going further back costs some steps, trusting it the run.
            if folder.exists():
                self._warn_once("checkpoint %s counts as suspect: %s", folder.name, error)
            return verdict("suspect", f"its health is unknown: {error}")

    def _warn_once(self, sentence: str, name: str, error: CheckpointError) -> None:
        # The folder is read at every save.
        if (name, str(error)) not in self._said:
            self._said.add((name, str(error)))
            log.warning(sentence, name, error)

    def _require_unused(self, foreign: list[str], *, begun: bool) -> None:
        names = sorted(path.parent.name for path in self.path.glob(f"*/{MANIFEST_FILE}"))
        mangled = [name for name in names if not name.startswith(".")]
        if mangled:
            raise CheckpointError(
                f"{self.path} holds {', '.join(mangled[:3])}, and none of them has a manifest that "
                "can be read; bring the checkpoints back, or choose another run folder"
            )
        if foreign:
            raise CheckpointError(
                f"{self.path} holds {', '.join(foreign[:3])}, which this guard did not write, and "
                "no checkpoint of its own; choose another run folder"
            )
        if begun:
            raise CheckpointError(
                f"{self.path} holds no checkpoint, although this run has begun; bring the "
                "checkpoints back, or choose another run folder"
            )

    def _foreign(self) -> list[str]:
        # What has a manifest is ours: one of another program is refused while scanning.
        return sorted(
            entry.name
            for entry in self.path.iterdir()
            if not entry.name.startswith(".")
            and entry.name != DELETIONS
            and not (entry / MANIFEST_FILE).exists()
        )


def stored_file(path: Path, progress: Callable[[int], None] = lambda _: None) -> StoredFile:
    """Size and hash of `path` as it is on disk; `progress` is told of each piece's bytes."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
            progress(size)
    return StoredFile(bytes=path.stat().st_size, sha256=digest.hexdigest())


def difference(
    checkpoint: Checkpoint,
    progress: Callable[[int], None] = lambda _: None,
    *,
    first: int = 0,
    every: int = 1,
) -> str | None:
    """Which file of it is not as the manifest says, and how; None where it is whole.

    Args:
        checkpoint: nothing of it is changed.
        progress: told of each piece's bytes when it has been read.
        first: begin with this file,
        every: and read each so manieth: the share of one of several readers.
    """
    for name, stored in list(checkpoint.manifest.files.items())[first::every]:
        path = checkpoint.folder / name
        try:
            # Sizes first: a truncated file of 100 GB need not be read.
            size = path.stat().st_size
            if size != stored.bytes:
                return f"{name} has {size} bytes, its manifest says {stored.bytes}"
            if stored_file(path, progress).sha256 != stored.sha256:
                return f"{name} does not have the hash that its manifest gives"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None
