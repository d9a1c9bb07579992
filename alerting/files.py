"""Files that survive a crash: whole or not there, at any moment. Standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` so that a reader, or the next boot, finds the old text or the new one.

    Args:
        path: the file.
        text: its new content.
        durable: wait for the disk; otherwise only a reader is promised one of the two, and a power
            cut may leave neither.

    Raises:
        OSError: it could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def create_whole(path: Path, text: str, temporary: Path) -> bool:
    """Make `path` with this content unless it is there; of all who try at once exactly one does.

    Args:
        path: the file.
        text: its content, on the disk before the name is there.
        temporary: a name in the same folder that nobody else uses.

    Returns:
        Whether it was made; False where the name exists.

    Raises:
        OSError: it could not be written, or not be made durable; then it may be there all the same.
    """
    with temporary.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        finally:
            temporary.unlink()
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until the disk has what was written into `path`, by whomever."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
