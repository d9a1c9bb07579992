"""The random number generators of Python, NumPy and torch, as tensors and plain numbers.

Nothing else passes `torch.load(weights_only=True)`, and a checkpoint must never need more than it.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist

from alerting.recovery import random_state

log = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The state of every global generator of this process."""
    state = random_state.capture()
    for generator, words in (("python", "words"), ("numpy", "keys")):
        state[generator][words] = torch.from_numpy(state[generator][words])
    return {
        **state,
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _devices()],
    }


def _devices() -> list[int]:
    """The CUDA devices of this process."""
    # Asking would initialise CUDA in a run that does not use it.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    if dist.is_available() and dist.is_initialized():
        # One a rank; the others' would be given memory here by being asked.
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


def restore(state: dict[str, Any]) -> None:
    """Set every global generator to what `capture` gave."""
    random_state.restore(state)
    torch.set_rng_state(state["torch"])
    devices = _devices() if state["cuda"] else []
    if len(devices) < len(state["cuda"]):
        log.warning(
            "the checkpoint holds random states of %d CUDA devices, here are %d: "
            "draws on CUDA will differ from those of the run that saved it",
            len(state["cuda"]),
            len(devices),
        )
    for device, device_state in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(device_state, device)


def reseed(rank: int) -> None:
    """Part ways with the other ranks that were given the same state."""
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
