"""What the guard needs of whatever watches the activations.

`alerting` never imports `act_exporter`: this protocol is all that the two have in common, and any
object with these members serves, another team's monitor too.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)


class Notes(Protocol):
    """What a detector may have besides, where it keeps a journal."""

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write down what the guard did; called on rank 0, between steps.

        The kinds are "request" (id, action, alert, created_at), "checkpoint" (name, step, kind,
        health, why, seconds), "health" (name, health, why), "rollback" (onset, from_step,
        resumed_from, resumed_step, why, remedies), "refused" (id, action, why) and "halted"
        (onset, why): strings, numbers, None, and lists of strings.
        """
        ...


class Detector(Protocol):
    """The trainer's own record of bad steps; one with `Notes` is told what the guard did."""

    @property
    def run(self) -> str:
        """The run's name: the `run` label of its metrics."""
        ...

    @property
    def registry(self) -> CollectorRegistry:
        """Where the guard registers its metric families."""
        ...

    def step(self, step: int) -> None:
        """The run has finished step `step`, or stands at it after a resume."""
        ...

    def onset(self) -> int | None:
        """First bad step of the present anomaly, or None.

        Bad is a step at which a tap broke the hard rule or was non-finite. Everything saved while
        this is not None is suspect, so a detector must forget an isolated spike after a clean
        stretch, and forgets everything at `reset`.
        """
        ...

    def reset(self, generation: int) -> None:
        """Forget onset, peaks and consecutive counts: the run goes on from a checkpoint."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """While inside, nothing is counted: saving and loading make phantom optimizer steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Its state, of tensors, numbers, strings, lists and dicts only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        ...


def take_over(detector: Detector, state: dict[str, Any]) -> None:
    """Give `detector` what its `state_dict` gave when a checkpoint was saved."""
    if not state:
        return
    try:
        detector.load_state_dict(state)
    except Exception as error:
        # What it has learnt is worth some hundred steps, never the checkpoint.
        log.warning("the exporter's state is not taken over, it learns anew: %s", error)


class Unwatched:
    """Stands in where no detector was given: it sees nothing and keeps nothing."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.registry = CollectorRegistry()

    def step(self, step: int) -> None:
        """Nothing to tell."""

    def onset(self) -> int | None:
        """Never one."""
        return None

    def reset(self, generation: int) -> None:
        """Nothing to forget."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing to pause."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""
