"""A fault on purpose: one layer's output is made too large, to see alarm and rollback work.

A forward hook multiplies the output by a tensor of one element. When the fault begins, only its
value changes, so nothing is compiled again in the middle of a run; before, it is 1, which is exact.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from act_exporter.exceptions import SettingError
from act_exporter.hooks import Unwatched
from act_exporter.layers import ModuleTap

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fault:
    """One that waits for its step or is in force."""

    layer: str
    factor: float
    step: int
    steps: int | None
    hook: _FaultHook
    handle: RemovableHandle
    begun: int | None = None  # the first step that has it
    told: bool = False  # whether the log says that it was injected

    @property
    def in_force(self) -> bool:
        """Whether the layer has run with it, or will: it is known to return a tensor."""
        return self.begun is not None and self.hook.found is True


class Faults:
    """The fault that was asked for in one model; at most one at a time.

    Args:
        taps: whose layers can have one.
    """

    def __init__(self, taps: Sequence[ModuleTap]) -> None:
        self._modules = {tap.layer: tap.module for tap in taps}
        self._fault: _Fault | None = None

    @property
    def factors(self) -> dict[str, float]:
        """Layer to the factor that its output has now, 1 while the fault waits; empty without.

        It waits too until the layer has run once since it was asked for.
        """
        fault = self._fault
        if fault is None:
            return {}
        return {fault.layer: fault.factor if fault.in_force else 1.0}

    def arm(
        self, layer: str, factor: float, step: int, steps: int | None, *, finished: int
    ) -> None:
        """Have one begin at `step`; the last finished step is `finished`.

        Raises:
            SettingError: as `Exporter.inject_fault`.
        """
        module = self._module(layer)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise SettingError(f"factor={factor!r} is no number")
        if type(step) is not int or step <= finished:
            raise SettingError(f"step={step!r} must be a step to come; {finished} are finished")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise SettingError(f"steps={steps!r} must be a whole number from 1 on, or None")
        if self._fault is not None:
            raise SettingError(f"{self._fault.layer} has a fault already; one at a time")
        home = next(module.parameters(), torch.empty(0)).device
        with torch.inference_mode(False):
            # Filled with other values later, and float32 whatever the model has: of one element
            # only the value counts, and the output keeps its own format.
            multiplier = torch.ones((), dtype=torch.float32, device=home)
        # Before the hook that watches the same output, which must see it.
        hook = _FaultHook(multiplier)
        handle = module.register_forward_hook(hook, prepend=True)
        # A graph that was compiled without the hook would go on without it.
        torch.compiler.reset()
        self._fault = _Fault(layer, float(factor), step, steps, hook, handle)
        log.warning(
            "a fault is armed: the output of %s times %g from step %d on, %s",
            layer,
            factor,
            step,
            "until a rollback" if steps is None else f"until step {step + steps} begins",
        )
        self.begin(finished + 1)

    def begin(self, step: int) -> None:
        """Step `step` is under way."""
        fault = self._fault
        if fault is None:
            return
        if fault.hook.found is False:
            self._remove(fault)
            log.error(
                "the fault of %s has not been injected: in the last output torch's pytree found no"
                " tensor of floats",
                fault.layer,
            )
            return
        if step < fault.step:
            return
        if fault.begun is None:
            fault.hook.multiplier.fill_(fault.factor)
            fault.begun = step
        if fault.in_force and not fault.told:
            fault.told = True
            log.warning(
                "injected fault: the output of %s times %g from step %d on",
                fault.layer,
                fault.factor,
                fault.begun,
            )
        if fault.steps is not None and step >= fault.begun + fault.steps:
            self.end(f"step {step} begins")

    def resume(self, finished: int) -> None:
        """The run goes on after step `finished` of an earlier process."""
        if self._fault is not None and self._fault.step <= finished:
            self.end(f"the run goes on after step {finished}")
        self.begin(finished + 1)

    def end(self, reason: str) -> None:
        """Leave nothing of it in the model; without one do nothing."""
        fault = self._fault
        if fault is None:
            return
        self._remove(fault)
        log.warning(
            "the fault of %s has %s: %s",
            fault.layer,
            "ended" if fault.in_force else "not been injected",
            reason,
        )

    def _remove(self, fault: _Fault) -> None:
        self._fault = None
        fault.hook.multiplier.fill_(1.0)
        fault.handle.remove()

    def _module(self, layer: str) -> nn.Module:
        module = self._modules.get(layer)
        if module is not None:
            return module
        # A pattern's own fits help more than names that are spelt like it.
        near = fnmatch.filter(self._modules, layer) or difflib.get_close_matches(
            layer, self._modules, n=5, cutoff=0.5
        )
        named = "one of these, for example" if near else "layers are"
        raise SettingError(
            f"layer={layer!r} is no layer of the metrics page; {named}:"
            f" {', '.join(list(near or self._modules)[:5])}"
        )


class _FaultHook:
    """A forward hook; a class, not a closure, so that a hooked model can be copied and pickled.

    Attributes:
        multiplier: of one element.
        found: whether the last output had a tensor to multiply; None before the first in training.
            Never read in a forward, so that no graph depends on it.
    """

    def __init__(self, multiplier: torch.Tensor) -> None:
        self.multiplier = multiplier
        self.found: bool | None = None

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        # The module's own mode, which recomputation in backward has too; gradients are off there.
        if not module.training:
            return output
        parts, structure = tree_flatten(output)
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                # A copy: backward needs the value of this step, when the next may have begun.
                parts[index] = part * self.multiplier.to(part.device, copy=True)
                self.found = True
                return tree_unflatten(parts, structure)
        self.found = False
        return output
