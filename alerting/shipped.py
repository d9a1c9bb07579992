"""Where the files lie that operators import; this package reads some of them itself."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def shipped(path: str) -> Path:
    """A shipped file or folder, by its path in the repository.

    A wheel has them once, inside of the exporter's package, which is not imported for that.
    """
    packaged = _ROOT / "act_exporter" / "_assets" / path
    return packaged if packaged.exists() else _ROOT / path
