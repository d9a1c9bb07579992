"""The remedies in force: what they do to the data, to the optimizer's steps, and when they end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from alerting.recovery.position import Nowhere, Position
from alerting.recovery.remedies import Applied

log = logging.getLogger(__name__)


class Steps(Protocol):
    """The steps of a framework's optimizer."""

    def change(self, *, rate_factor: float, max_norm: float) -> None:
        """From the next step on change them so, in place of what was said before.

        Args:
            rate_factor: the learning rate is multiplied by it; 1 for the scheduled one.
            max_norm: of the gradients, without the loss scale; infinity for any.
        """
        ...


class Treatment:
    """Each rank has one, and all do the same with it.

    Args:
        steps: whose learning rate and gradients are changed.
        position: of the data, to skip in.
        functions: of the callbacks, by name.
        ranks: how many train.

    Attributes:
        position: in the data.
    """

    def __init__(
        self,
        steps: Steps,
        position: Position,
        functions: Mapping[str, Callable[[bool], object]],
        ranks: int,
    ) -> None:
        self._steps = steps
        self.position = position
        self._functions = functions
        self._ranks = ranks
        self._in_force: list[Applied] = []

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
        self._change_steps()

    def step(self, step: int) -> None:
        """Step `step` is done: end what was to hold up to it."""
        over = [remedy for remedy in self._in_force if remedy.until <= step]
        if not over:
            return
        self._in_force = [remedy for remedy in self._in_force if remedy not in over]
        self._change_steps()
        for remedy in over:
            log.info("step %d: over: %s", step, remedy)
            self._call(remedy, False)

    def end(self) -> None:
        """End all of it: the loop is left, or another state is loaded."""
        over, self._in_force = self._in_force, []
        self._change_steps()
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

    def _change_steps(self) -> None:
        # Of a kind there is one: two of the same place replace each other.
        values = {remedy.kind: remedy.parameters for remedy in self._in_force}
        self._steps.change(
            rate_factor=values.get("learning-rate", {}).get("factor", 1.0),
            max_norm=values.get("clip", {}).get("max_norm", math.inf),
        )


class Untreated:
    """Stands in where a framework owns the loop, the data and the optimizer: no remedy is given."""

    def __init__(self) -> None:
        self.position: Position = Nowhere()

    def begin(self, remedies: Iterable[Applied], step: int) -> None:
        """Nothing holds."""

    def step(self, step: int) -> None:
        """Nothing ends."""

    def end(self) -> None:
        """Nothing to end."""
