"""The run's step, from the optimizers' own counts of `step` calls.

Each optimizer that owns parameters of the model has a count; the run's step is the largest of
them. Their sum would count a run with two optimizers twice, and one with an optimizer a parameter
hundreds of times. An explicit `set` (a guard, a callback) ends the counting for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Steps:
    """Counts the steps of one model's optimizers and sees their learning rate.

    Args:
        model: whose parameters make an optimizer one of this run's.
        on_step: called with the new step, in the training thread, when a step has ended.
    """

    def __init__(self, model: nn.Module, on_step: Callable[[int], None]) -> None:
        self.explicit = False
        self.paused = False  # checkpoint code steps optimizers to make their state
        self.learning_rate: float | None = None  # the largest of the last step
        self._model = weakref.ref(model)
        self._on_step = on_step
        self._start = 0
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._largest = 0
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def set(self, step: int) -> None:
        """The run has finished `step`; counts start from here unless this is said again."""
        self.explicit = True
        self.restart(step)

    def restart(self, step: int) -> None:
        """Go on counting from `step` (a restored state)."""
        self._start = step
        self._largest = 0
        self._counts.clear()

    def close(self) -> None:
        """Stop counting."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.paused or not self._owns(optimizer):
            return
        self.learning_rate = _learning_rate(optimizer)
        if self.explicit:
            return
        # One that is new joins the step under way, or a run that changes its optimizer would
        # stand still until the new one has caught up.
        joined = max(self._largest - 1, 0)
        self._counts[optimizer] = self._counts.get(optimizer, joined) + 1
        if self._counts[optimizer] > self._largest:
            self._largest = self._counts[optimizer]
            self._on_step(self._start + self._largest)

    def _owns(self, optimizer: Optimizer) -> bool:
        # Looked up at every call until it is ours: parameters may join model or optimizer late.
        model = self._model()
        if optimizer not in self._ours and model is not None:
            own = {id(parameter) for parameter in model.parameters()}
            groups = optimizer.param_groups
            if any(id(parameter) in own for group in groups for parameter in group["params"]):
                self._ours.add(optimizer)
        return optimizer in self._ours


def _learning_rate(optimizer: Optimizer) -> float | None:
    """The largest over the groups; None where it lives on a device, where reading it would wait."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    if any(isinstance(rate, torch.Tensor) and not rate.is_cpu for rate in rates):
        return None
    return max((float(rate) for rate in rates), default=None)
