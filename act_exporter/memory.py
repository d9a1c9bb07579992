"""Memory of the accelerators that this process uses, as torch's own allocator counts it."""

from __future__ import annotations

from typing import Any

import torch


def device_memory() -> dict[str, tuple[float, float]]:
    """Bytes in tensors and bytes that there are, by device; nothing here waits for one.

    Of CUDA (and ROCm) devices with tensors of this process on them; empty where there are none.
    """
    cuda: Any = torch.cuda  # has no types
    if not cuda.is_initialized():
        return {}
    found = {}
    for index in range(cuda.device_count()):
        allocated = float(cuda.memory_allocated(index))
        if allocated:
            limit = float(cuda.get_device_properties(index).total_memory)
            found[f"cuda:{index}"] = allocated, limit
    return found
