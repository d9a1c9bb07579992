"""The remedies in force: what they do to the loader, to the optimizer's steps, and when they end.

The optimizer has hooks of this only while one of them needs it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from alerting.recovery.position import LoaderPosition
from alerting.recovery.remedies import Applied

log = logging.getLogger(__name__)


class Treatment:
    """Each rank has one, and all do the same with it.

    Args:
        optimizer: whose learning rate and gradients are changed.
        position: of the data, to skip in.
        functions: of the callbacks, by name.
        ranks: how many train.

    Attributes:
        position: in the data.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        position: LoaderPosition,
        functions: Mapping[str, Callable[[bool], object]],
        ranks: int,
    ) -> None:
        self._optimizer = optimizer
        self.position = position
        self._functions = functions
        self._ranks = ranks
        self._in_force: list[Applied] = []
        self._hooks: list[Any] = []
        self._scheduled: list[Any] | None = None

    def begin(self, remedies: Iterable[Applied], step: int) -> None:
        """The live state is that after `step` steps now: do what `remedies` says of it."""
        self.end()
        for remedy in remedies:
            if remedy.kind == "skip":
                self._skip(remedy, step)
            elif step < remedy.until:
                log.warning("step %d: %s", step, remedy)
                self._in_force.append(remedy)
                self._call(remedy, True)
        self._hook()

    def step(self, step: int) -> None:
        """Step `step` is done: end what was to hold up to it."""
        over = [remedy for remedy in self._in_force if remedy.until <= step]
        if not over:
            return
        self._in_force = [remedy for remedy in self._in_force if remedy not in over]
        self._hook()
        for remedy in over:
            log.info("step %d: over: %s", step, remedy)
            self._call(remedy, False)

    def end(self) -> None:
        """End all of it: the loop is left, or another state is loaded."""
        over, self._in_force = self._in_force, []
        self._hook()
        for remedy in over:
            self._call(remedy, False)

    def _skip(self, remedy: Applied, step: int) -> None:
        # Other ranks than then share the data otherwise; what is left of a division is skipped too.
        values = remedy.parameters
        taken = -(-values["last_batch"] * values["ranks"] // self._ranks)
        if self.position.taken < taken:
            log.warning("step %d: %s", step, remedy)
            self.position.skip_to(taken)

    def _call(self, remedy: Applied, in_force: bool) -> None:
        if remedy.kind != "callback":
            return
        function = self._functions.get(remedy.parameters["name"])
        if function is None:
            log.warning("%s is in force, and this trainer has no such callback", remedy)
            return
        function(in_force)

    def _hook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore_rates()
        self._hooks = []
        if any(remedy.kind in ("learning-rate", "clip") for remedy in self._in_force):
            self._hooks = [
                self._optimizer.register_step_pre_hook(self._before),
                self._optimizer.register_step_post_hook(self._after),
            ]

    def _before(self, *_: Any) -> None:
        # Of a step that raised, or the rate would be lowered twice.
        self._restore_rates()
        for remedy in self._in_force:
            if remedy.kind == "clip":
                self._clip(remedy.parameters["max_norm"])
            elif remedy.kind == "learning-rate":
                groups = self._optimizer.param_groups
                self._scheduled = [group["lr"] for group in groups]
                for group in groups:
                    # A new object, also where it is a tensor: the scheduler's stays as it is.
                    group["lr"] = group["lr"] * remedy.parameters["factor"]

    def _after(self, *_: Any) -> None:
        self._restore_rates()

    def _restore_rates(self) -> None:
        if self._scheduled is not None:
            for group, rate in zip(self._optimizer.param_groups, self._scheduled, strict=False):
                group["lr"] = rate
            self._scheduled = None

    def _clip(self, max_norm: float) -> None:
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
            clip_grads_with_norm_(parameters, max_norm, total)


class Untreated:
    """Stands in where a framework owns the loop, the data and the optimizer: no remedy is given."""

    def __init__(self) -> None:
        self.position = LoaderPosition(None)

    def begin(self, remedies: Iterable[Applied], step: int) -> None:
        """Nothing holds."""

    def step(self, step: int) -> None:
        """Nothing ends."""

    def end(self) -> None:
        """Nothing to end."""
