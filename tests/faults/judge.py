"""Whether a checkpoint may be resumed from, told without the code that is under test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

TRUSTED = ("pending", "confirmed")


def is_whole(folder: Path) -> bool:
    """Whether each file is what the manifest says."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        contents = {name: (folder / name).read_bytes() for name in files}
    except (OSError, ValueError):
        return False
    return bool(files) and all(
        len(content) == files[name]["bytes"]
        and hashlib.sha256(content).hexdigest() == files[name]["sha256"]
        for name, content in contents.items()
    )


def may_be_resumed(folder: Path) -> bool:
    """Whether it is published, whole and trusted."""
    if folder.name.startswith(".") or not is_whole(folder):
        return False
    try:
        return json.loads((folder / "health.json").read_bytes())["health"] in TRUSTED
    except (OSError, ValueError):
        return False


def is_lost(folder: Path) -> bool:
    """Whether it is gone, not whole, or will never be used since it is said to be corrupt."""
    try:
        verdict = json.loads((folder / "health.json").read_bytes())["health"]
    except (OSError, ValueError):
        verdict = None
    return verdict == "corrupt" or not is_whole(folder)


def published(folder: Path) -> set[str]:
    """Names of the checkpoints in a folder of them, whole or not."""
    return {p.parent.name for p in folder.glob("*/manifest.json") if p.parent.name[0] != "."}


def deleted(folder: Path) -> set[str]:
    """Names of those that were deleted on purpose, and were not corrupt."""
    log = folder / "deletions.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return {name for _, name, health, *_ in lines if health != "corrupt"}
