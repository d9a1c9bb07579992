"""The last 500 sampled steps, for sparklines: written a row a step, read by whoever draws.

Nobody waits for anybody: the training thread writes a row and then counts it, and a reader throws
away the rows that were overwritten while it copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.history import Layers
from act_exporter.rows import Array
from act_exporter.sample import Sample

STEPS = 500
"""Sampled steps that are kept, as many as the rules' window has. 4 bytes a step and tensor: 2 kB
a tensor, 20 MB where a model of 1,200 blocks has 10,000 of them."""

NUMBERS = ("loss", "grad_norm", "learning_rate")
"""The run's numbers that are kept beside the tensors' absmax."""

# One row more than are shown: the oldest one may be in the writer's hands.
_ROWS = STEPS + 1

# What float32 does not reach is drawn at its end.
_LARGEST = float(np.finfo(np.float32).max)

# Notes of a long night: an incident makes about ten.
_NOTES = 60

# Kinds of notes that a page tells of; the others come with each step, tensor or checkpoint.
_TOLD = {"onset", "verdict", "clean", "request", "checkpoint", "rollback", "refused", "halted"}


# Of checkpoints, those that something has caused; what is saved on schedule is no event.
_FOR_PEOPLE = {"backup", "emergency"}


@dataclass(frozen=True, slots=True)
class Event:
    """A note of the exporter or a guard; `act_exporter.records` lists kinds and fields."""

    kind: str
    step: int
    time: float
    generation: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A copy of the last sampled steps, oldest first.

    Attributes:
        step: (steps,) their numbers; a rollback repeats some.
        time: (steps,) when they ended, Unix seconds.
        generation: (steps,) likewise.
        numbers: those of `NUMBERS`, (steps,) each; NaN where nothing was known.
        absmax: (steps, taps asked for); NaN where a tap did not run, infinite where it had
            elements that are not finite.
    """

    step: npt.NDArray[np.int64]
    time: Array
    generation: npt.NDArray[np.int64]
    numbers: Mapping[str, Array]
    absmax: npt.NDArray[np.float32]


class Trail:
    """Keeps them.

    Args:
        taps: how many tensors.
    """

    def __init__(self, taps: int) -> None:
        # Empty and not filled: no memory is taken before there are steps to keep in it.
        self._absmax = np.empty((_ROWS, taps), dtype=np.float32)
        self._step = np.zeros(_ROWS, dtype=np.int64)
        self._time = np.zeros(_ROWS)
        self._generation = np.zeros(_ROWS, dtype=np.int64)
        self._numbers = np.full((_ROWS, len(NUMBERS)), np.nan)
        self._count = 0
        self.events: tuple[Event, ...] = ()
        """What happened, oldest first; replaced, never changed."""

    def sample(self, sample: Sample, layers: Layers, generation: int) -> None:
        """Keep a sampled step that was judged."""
        row = self._count % _ROWS
        absmax = np.minimum(layers.statistics.absmax, _LARGEST)
        self._absmax[row] = np.where(
            sample.nonfinite.any(axis=0), np.inf, np.where(sample.called, absmax, np.nan)
        )
        self._step[row], self._time[row] = sample.step, sample.time
        self._generation[row] = generation
        self._numbers[row] = np.nan
        self._count += 1

    def numbers(self, by_step: Mapping[int, Mapping[str, float]]) -> None:
        """The run's numbers at steps that are kept already; they may come in parts."""
        for step, values in by_step.items():
            # Of two steps with one number, before and after a rollback, the newer one is meant.
            for back in range(1, min(self._count, _ROWS) + 1):
                row = (self._count - back) % _ROWS
                if self._step[row] == step:
                    known = [values.get(name, np.nan) for name in NUMBERS]
                    self._numbers[row] = np.where(np.isnan(known), self._numbers[row], known)
                    break

    def note(self, kind: str, /, step: int, time: float, generation: int, **fields: Any) -> None:
        """Keep what happened, if it is of a kind that a page tells."""
        if kind in _TOLD and (kind != "checkpoint" or fields.get("kind") in _FOR_PEOPLE):
            event = Event(kind, step, time, generation, fields)
            self.events = (*self.events, event)[-_NOTES:]

    def read(self, taps: Sequence[int]) -> Steps:
        """A copy of what is kept of these taps; from any thread."""
        count = self._count
        rows = np.arange(max(0, count - STEPS), count) % _ROWS
        columns = np.asarray(taps, dtype=np.int64)
        step, time, generation = self._step[rows], self._time[rows], self._generation[rows]
        numbers, absmax = self._numbers[rows], self._absmax[np.ix_(rows, columns)]
        # Rows that the writer has taken since, and the one that it may be at.
        lost = max(0, self._count - _ROWS + 1 - max(0, count - STEPS)) if len(rows) else 0
        return Steps(
            step=step[lost:],
            time=time[lost:],
            generation=generation[lost:],
            numbers=dict(zip(NUMBERS, numbers[lost:].T, strict=True)),
            absmax=absmax[lost:],
        )
