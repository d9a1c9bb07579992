"""A checkpoint's manifest: what it holds, where it comes from, and how to tell that it is whole.

Written last, so a folder with a manifest is complete; what changes later (its health) lies in a
file of its own.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from alerting.exceptions import CheckpointError
from alerting.files import write_atomically
from alerting.recovery.documents import Document
from alerting.recovery.remedies import Applied, read_applied

FORMAT = "act-checkpoint"
VERSION = 1
FILE = "manifest.json"

Kind = Literal["periodic", "final", "backup", "emergency"]
"""Only periodic and final ones are ever resumed from without a person's word: a backup or an
emergency checkpoint is made because something looks wrong."""
RESUMABLE: tuple[Kind, ...] = ("periodic", "final")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Size in bytes and SHA-256 (hexadecimal) of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Where in the data the run stands: epochs begun before this one, batches taken in it.

    Attributes:
        taken: batches of all epochs that a rank has taken, those that were skipped too.
    """

    epoch: int
    batch: int
    taken: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What one checkpoint is.

    Attributes:
        name: the folder's name.
        kind: why it was made.
        number: rises with every checkpoint of the run folder; step numbers repeat after a
            rollback and clocks jump, so this alone says which is newer.
        step: optimizer steps finished.
        generation: of the run when it was saved.
        parent: the checkpoint that this line of training last saved or resumed from, or None.
        ancestors: the parent's ancestors that existed then, newest first. The line can be followed
            although old checkpoints between are deleted.
        world_size: ranks that saved it.
        data: position in the data, or None without a loader.
        remedies: what the rollback that this generation began with has changed, also what is over.
        versions: of Python, of torch and of what else wrote it, by name.
        created_at: Unix seconds.
        files: each file but the manifest and the health, by path relative to the folder.
    """

    name: str
    kind: Kind
    number: int
    step: int
    generation: int
    parent: str | None
    ancestors: tuple[str, ...]
    world_size: int
    data: DataPosition | None
    versions: dict[str, str]
    created_at: float
    files: dict[str, StoredFile]
    remedies: tuple[Applied, ...] = ()

    def write(self, folder: Path) -> None:
        """Write it into `folder`, synced."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        write_atomically(folder / FILE, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None where there is none, so the folder is not one of ours.

    Raises:
        ForeignManifestError: another program or another version of this one wrote it.
        CheckpointError: it is mangled.
    """
    try:
        document = Document.read(folder / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        document.require_format(FORMAT, VERSION)
    except CheckpointError as error:
        raise ForeignManifestError(str(error)) from None
    files = document.part("files")
    versions = document.part("versions")
    data = document.part("data") if document.optional("data", dict) else None
    manifest = Manifest(
        name=document.get("name", str),
        kind=cast(Kind, document.choice("kind", get_args(Kind))),
        number=document.get("number", int),
        step=document.get("step", int),
        generation=document.get("generation", int),
        parent=document.optional("parent", str),
        ancestors=document.names("ancestors"),
        world_size=document.get("world_size", int),
        data=_read_position(data) if data else None,
        versions={name: versions.get(name, str) for name in versions.keys()},  # noqa: SIM118
        created_at=document.get("created_at", float),
        files={
            path: StoredFile(
                bytes=files.part(path).get("bytes", int), sha256=files.part(path).get("sha256", str)
            )
            for path in files.keys()  # noqa: SIM118 (a Document is no mapping)
        },
        remedies=read_applied(document),
    )
    if manifest.name != folder.name:
        raise CheckpointError(f"{document.path} is the manifest of {manifest.name!r}")
    return manifest


def _read_position(data: Document) -> DataPosition:
    return DataPosition(
        epoch=data.get("epoch", int),
        batch=data.get("batch", int),
        # Manifests of before remedies lack it.
        taken=data.optional("taken", int) or 0,
    )


class ForeignManifestError(CheckpointError):
    """A manifest that this version of this program did not write."""
