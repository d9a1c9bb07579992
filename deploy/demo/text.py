"""What the demo's models are trained on: text as bytes."""

from __future__ import annotations

from pathlib import Path

BYTES = 256
"""The vocabulary."""


def read_text(folder: Path, limit: int = 4_000_000) -> bytes:
    """The Python files below `folder`, joined, at most `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise SystemExit(f"--data {folder}: no Python files in it")
    return b"\n".join(parts)[:limit]
