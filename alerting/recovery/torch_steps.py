"""The steps of a torch optimizer, changed by remedies.

The optimizer has hooks of this only while there is something to change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class TorchSteps:
    """See `alerting.recovery.treatment.Steps`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rate_factor = 1.0
        self._max_norm = math.inf
        self._hooks: list[Any] = []
        self._scheduled: list[Any] | None = None

    def change(self, *, rate_factor: float, max_norm: float) -> None:
        """See `alerting.recovery.treatment.Steps`."""
        self._rate_factor, self._max_norm = rate_factor, max_norm
        for hook in self._hooks:
            hook.remove()
        self._restore_rates()
        self._hooks = []
        if rate_factor != 1 or max_norm != math.inf:
            self._hooks = [
                self._optimizer.register_step_pre_hook(self._before),
                self._optimizer.register_step_post_hook(self._after),
            ]

    def _before(self, *_: Any) -> None:
        # Of a step that raised, or the rate would be lowered twice.
        self._restore_rates()
        if self._max_norm != math.inf:
            self._clip()
        if self._rate_factor != 1:
            groups = self._optimizer.param_groups
            self._scheduled = [group["lr"] for group in groups]
            for group in groups:
                # A new object, also where it is a tensor: the scheduler's stays as it is.
                group["lr"] = group["lr"] * self._rate_factor

    def _after(self, *_: Any) -> None:
        self._restore_rates()

    def _restore_rates(self) -> None:
        if self._scheduled is not None:
            for group, rate in zip(self._optimizer.param_groups, self._scheduled, strict=False):
                group["lr"] = rate
            self._scheduled = None

    def _clip(self) -> None:
        # A fused optimizer divides the loss scale out itself, in its step.
        scale = getattr(self._optimizer, "grad_scale", None)
        # Sharded over different meshes, they do not go through one operator.
        parts: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
                    parts[mesh].append(parameter)
        norms = []
        for parameters in parts.values():
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not norms:
            return
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        if scale is not None:
            total = total / scale
        for parameters in parts.values():
            clip_grads_with_norm_(parameters, self._max_norm, total)
