"""The way from a device to the host, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from act_exporter.exceptions import StateError


def to_host(tensor: torch.Tensor, events: list[torch.Event]) -> torch.Tensor:
    """`tensor` on the host, complete once the event that this may add to `events` has passed."""
    if tensor.is_cpu:
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    # Of the tensor's device, which need not be the current one.
    event.record(torch.accelerator.current_stream(tensor.device))
    events.append(event)
    return host


def tensors_of(state: Any) -> Any:
    """A state with its arrays as tensors: what `torch.save` and `weights_only` loading know."""
    if isinstance(state, dict):
        return {name: tensors_of(value) for name, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def arrays_of(state: Any, where: str = "exporter state") -> Any:
    """A state with its tensors as arrays, from whatever device.

    Raises:
        StateError: a tensor has no values, or numpy does not know its dtype; says where.
    """
    if isinstance(state, dict):
        return {name: arrays_of(value, f"{where}: {name}") for name, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    try:
        return state.cpu().numpy()
    except (NotImplementedError, TypeError):
        raise StateError(
            f"{where}: a tensor of {state.dtype} on {state.device} is no array"
        ) from None
