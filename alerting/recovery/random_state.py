"""The random number generators of Python and NumPy, as arrays and plain numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy


def capture() -> dict[str, Any]:
    """The state of both global generators of this process."""
    version, words, gauss_next = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": {
            "version": version,
            "words": numpy.array(words, dtype=numpy.int64),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "name": str(name),
            "keys": numpy.asarray(keys).astype(numpy.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
    }


def restore(state: dict[str, Any]) -> None:
    """Set both to what `capture` gave."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    legacy = state["numpy"]
    numpy.random.set_state(
        (
            legacy["name"],
            numpy.asarray(legacy["keys"]).astype(numpy.uint32),
            legacy["position"],
            legacy["has_gauss"],
            legacy["cached_gaussian"],
        )
    )
