"""A fault on purpose: one layer's output is made too large, to see alarm and rollback work.

The output is multiplied by a number. When the fault begins, only its value changes, so nothing is
compiled again in the middle of a run; before, it is 1, which is exact.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from act_exporter.exceptions import SettingError
from act_exporter.instrumentation import Multiplier

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fault:
    """One that waits for its step or is in force."""

    layer: str
    factor: float
    step: int
    steps: int | None
    multiplier: Multiplier
    begun: int | None = None  # the first step that has it
    told: bool = False  # whether the log says that it was injected

    @property
    def in_force(self) -> bool:
        """Whether the layer has run with it, or will: it is known to return a tensor."""
        return self.begun is not None and self.multiplier.found is True


class Faults:
    """The fault that was asked for in one model; at most one at a time.

    Args:
        layers: names of those that can have one.
        multiplied: has the output of one multiplied, see `Instrumentation.fault`.
    """

    def __init__(self, layers: Iterable[str], multiplied: Callable[[str], Multiplier]) -> None:
        self._layers = list(dict.fromkeys(layers))
        self._multiplied = multiplied
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
        self._check(layer)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise SettingError(f"factor={factor!r} is no number")
        if type(step) is not int or step <= finished:
            raise SettingError(f"step={step!r} must be a step to come; {finished} are finished")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise SettingError(f"steps={steps!r} must be a whole number from 1 on, or None")
        if self._fault is not None:
            raise SettingError(f"{self._fault.layer} has a fault already; one at a time")
        self._fault = _Fault(layer, float(factor), step, steps, self._multiplied(layer))
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
        if fault.multiplier.found is False:
            self._remove(fault)
            log.error(
                "the fault of %s has not been injected: no tensor of floats was found in its last"
                " output",
                fault.layer,
            )
            return
        if step < fault.step:
            return
        if fault.begun is None:
            fault.multiplier.set(fault.factor)
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
        fault.multiplier.remove()

    def _check(self, layer: str) -> None:
        if layer in self._layers:
            return
        # A pattern's own fits help more than names that are spelt like it.
        near = fnmatch.filter(self._layers, layer) or difflib.get_close_matches(
            layer, self._layers, n=5, cutoff=0.5
        )
        named = "one of these, for example" if near else "layers are"
        raise SettingError(
            f"layer={layer!r} is no layer of the metrics page; {named}:"
            f" {', '.join(list(near or self._layers)[:5])}"
        )
