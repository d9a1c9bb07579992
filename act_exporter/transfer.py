"""The way from a device to the host, without waiting for it."""

from __future__ import annotations

import torch


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
