"""A scene: one fault, played on as many runs as it takes, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.experiment import Experiment, Loss


class Stage:
    """Where a scene is played.

    Args:
        folder: of the scene's runs.
        thorough: all of it, where a part takes seconds and all takes minutes.
    """

    def __init__(self, folder: Path, *, thorough: bool) -> None:
        self.thorough = thorough
        self._folder = folder
        self._experiments: list[Experiment] = []

    def experiment(self, **settings: Any) -> Experiment:
        """A new run."""
        number = len(self._experiments)
        self._experiments.append(Experiment(self._folder / f"run-{number}", **settings))
        return self._experiments[-1]

    def loss(self) -> Loss:
        """What all runs together have lost."""
        return sum((experiment.loss() for experiment in self._experiments), Loss())


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One fault.

    Attributes:
        fault: in words.
        play: plays it and says what happened; raises AssertionError where that is wrong.
        quick: it takes seconds.
        damages: checkpoints that the scene itself damages, one a run, so that they are lost.
    """

    fault: str
    play: Callable[[Stage], str]
    quick: bool
    damages: int

    def require(self, loss: Loss) -> None:
        """Refuse a loss that no fault may cause.

        Raises:
            AssertionError: says which.
        """
        assert loss.bitwise, f"not bitwise the run to which nothing happened: {loss}"
        assert loss.untrusted == 0, f"resumed from what may not be resumed from: {loss}"
        assert loss.checkpoints == self.damages, f"{self.damages} damaged: {loss}"


SCENES: list[Scene] = []
"""In the order of the table."""


def scene(
    fault: str, *, quick: bool = True, damages: int = 0
) -> Callable[[Callable[[Stage], str]], Callable[[Stage], str]]:
    """Have the function played under this name."""

    def add(play: Callable[[Stage], str]) -> Callable[[Stage], str]:
        SCENES.append(Scene(fault=fault, play=play, quick=quick, damages=damages))
        return play

    return add
