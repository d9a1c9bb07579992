"""The random number generators of Python, NumPy and torch, as tensors and plain numbers.

Nothing else passes `torch.load(weights_only=True)`, and a checkpoint must never need more than it.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy
import torch

log = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The state of every global generator of this process."""
    version, words, gauss_next = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
        # Asking would initialise CUDA in a run that does not use it.
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
    }


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def restore(state: dict[str, Any]) -> None:
    """Set every global generator to what `capture` gave."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    legacy = state["numpy"]
    numpy.random.set_state(
        (
            legacy["name"],
            legacy["keys"].numpy().astype(numpy.uint32),
            legacy["position"],
            legacy["has_gauss"],
            legacy["cached_gaussian"],
        )
    )
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if state["cuda"] else 0
    if devices < len(state["cuda"]):
        log.warning(
            "the checkpoint holds random states of %d CUDA devices, here are %d: "
            "draws on CUDA will differ from those of the run that saved it",
            len(state["cuda"]),
            devices,
        )
    for device, device_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(device_state, device)
