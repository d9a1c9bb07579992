"""The run's step, from the optimizers' own counts of `step` calls.

Each optimizer that owns parameters of the model has a count; the run's step is the largest of
them. Their sum would count a run with two optimizers twice, and one with an optimizer a parameter
hundreds of times. An explicit `set` (a guard, a callback) ends the counting for good.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from act_exporter.changes import learning_rate
from act_exporter.graphs import capturing
from act_exporter.updates import Updates


class Steps:
    """Counts the steps of one model's optimizers and sees their learning rate.

    Args:
        model: whose parameters make an optimizer one of this run's.
        on_step: called with the new step, in the training thread, when a step has ended.
        on_error: told of anything that went wrong while an optimizer was looked at.
        updates: told when a step of one of the model's optimizers begins and ends, if it is given.
    """

    def __init__(
        self,
        model: nn.Module,
        on_step: Callable[[int], None],
        on_error: Callable[[str, Exception], None],
        updates: Updates | None = None,
    ) -> None:
        self.explicit = False
        self.paused = False  # checkpoint code steps optimizers to make their state
        self.learning_rate: float | None = None  # the largest of the last step
        self._model = weakref.ref(model)
        self._on_step = on_step
        self._on_error = on_error
        self._updates = updates
        self._start = 0
        # By identity: an optimizer may define equality and so have no hash.
        self._counts: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._largest = 0
        # Optimizers, by identity, whose `step` is under way. One that calls its base class's `step`
        # in its own runs the hooks of both: two beginnings and two ends, of one step.
        self._begun: set[int] = set()
        # Kept out of a compiled optimizer step, or the history would be compiled too.
        disable: Any = torch.compiler.disable  # has no types
        self._handles = [
            register_optimizer_step_pre_hook(disable(self._began)),
            register_optimizer_step_post_hook(disable(self._stepped)),
        ]

    def set(self, step: int) -> None:
        """The run has finished `step`; counts start from here unless this is said again."""
        self.explicit = True
        self.restart(step)

    def restart(self, step: int) -> None:
        """Go on counting from `step` (a restored state)."""
        self._start = step
        self._largest = 0
        self._counts = {key: (optimizer, 0) for key, (optimizer, _) in self._counts.items()}

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def _began(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            self._begun.add(id(optimizer))
            updates = self._updates
            if updates is None or not updates.wanted or self.paused or capturing():
                return
            if self._owns(optimizer):
                updates.begin(optimizer)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._on_error("step", error)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            if id(optimizer) not in self._begun:
                return
            self._begun.discard(id(optimizer))
            if self.paused or capturing() or not self._owns(optimizer):
                return
            # Before the step's end, which hands it on.
            if self._updates is not None:
                self._updates.end(optimizer)
            self.learning_rate = _learning_rate(optimizer)
            if self.explicit:
                return
            reference, count = self._counts[id(optimizer)]
            self._counts[id(optimizer)] = reference, count + 1
            if count + 1 > self._largest:
                self._largest = count + 1
                self._on_step(self._start + self._largest)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._on_error("step", error)

    def _owns(self, optimizer: Optimizer) -> bool:
        known = self._counts.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return True
        # Looked up at every call until it is ours: parameters may join model or optimizer late.
        model = self._model()
        if model is None:
            return False
        own = {id(parameter) for parameter in model.parameters()}
        groups = optimizer.param_groups
        if not any(id(parameter) in own for group in groups for parameter in group["params"]):
            return False
        # One that is new joins the step under way, or a run that changes its optimizer would
        # stand still until the new one has caught up.
        self._counts[id(optimizer)] = weakref.ref(optimizer), max(self._largest - 1, 0)
        return True


def _learning_rate(optimizer: Optimizer) -> float | None:
    """The largest over the groups, of those that are numbers on the host; None without any."""
    rates = [learning_rate(group) for group in optimizer.param_groups]
    return max((rate for rate in rates if rate is not None), default=None)
