"""What runs here, for those who must find out why a checkpoint loads differently elsewhere."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

DISTRIBUTIONS = ("act-exporter", "torch", "keras", "tensorflow", "tensorflow-cpu", "numpy")
"""That read or write what a checkpoint holds."""


@functools.cache
def versions() -> dict[str, str]:
    """Versions by name; a distribution that is not installed as one (a source tree) is left out."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
