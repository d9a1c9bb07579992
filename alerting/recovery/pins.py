"""Pins: a person's word that a checkpoint is to stay, whatever the retention would delete.

The pin is a file in the checkpoint's own folder, so one rename decides between a pin and a deletion
of the same moment: a pin that was there before goes along and is found, one that comes after finds
no folder to be written into.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from alerting.exceptions import CheckpointError
from alerting.files import sync_folder, write_atomically
from alerting.recovery.documents import Document

FILE = "pinned.json"


def pin(folder: Path, reason: str) -> None:
    """Pin the checkpoint in `folder`; a former pin's reason is replaced.

    Raises:
        OSError: it could not be written, or the checkpoint was deleted meanwhile.
    """
    content = {"reason": reason, "at": time.time()}
    write_atomically(folder / FILE, json.dumps(content, indent=1) + "\n")


def unpin(folder: Path) -> bool:
    """Take the pin away; whether there was one.

    Raises:
        OSError: it could not be removed.
    """
    try:
        (folder / FILE).unlink()
    except FileNotFoundError:
        return False
    sync_folder(folder)
    return True


def is_pinned(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is pinned; a mangled pin holds too."""
    return (folder / FILE).exists()


def read_reason(folder: Path) -> str:
    """Why the checkpoint in `folder` is pinned; "" where nothing readable says so."""
    try:
        return Document.read(folder / FILE).get("reason", str)
    except (FileNotFoundError, CheckpointError):
        return ""
