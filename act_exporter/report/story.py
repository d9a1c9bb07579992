"""One incident in facts: what words, pictures and tables say, before anybody says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.levels import Tensor
from act_exporter.records import Note
from act_exporter.report.incident import CLEAN_STEPS, HARD, Incident
from act_exporter.report.piece import INF, NAN, Floats
from act_exporter.report.recording import Recording

WORST = 10
"""Layers in the table: what one screen holds."""

# Rows that are shown before and after an incident: at least so many, for a short one, and this
# share of its own length, for a long one.
_LEAST_AROUND, _SHARE_AROUND = 40, 0.5

# Rows whose median says what the loss was like.
_USUAL_ROWS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One tensor at one step.

    Attributes:
        tensor: which.
        step: the step.
        absmax: of its finite elements; NaN where it had none.
        baseline: NaN where there is none.
        ratio: absmax over baseline; likewise.
        nonfinite: "NaN", "Inf" or "NaN and Inf" where elements were not finite, else "".
    """

    tensor: Tensor
    step: int
    absmax: float
    baseline: float
    ratio: float
    nonfinite: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One of the run's numbers: before the incident, the largest in it, and after it.

    NaN where it is not known, infinite where it was not finite.
    """

    before: float
    largest: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """An incident of a run.

    Attributes:
        recording: the run, a row a sampled step.
        incident: which.
        first: the tensor that went bad first, at the first bad step; None where no layer did.
        worst: the tensors that went furthest in it, the worst first.
        spread: rows from the first bad one until half of the tensors were bad; None if never.
        most: how many tensors were bad at once.
        numbers: the run's, by name.
        rollback: the guard's account of it, where there is one.
        after: the first row after the incident, or None where there is none.
        clean: rows from there on without anything bad.
        window: the first row that is drawn, and the one after the last.
    """

    recording: Recording
    incident: Incident
    first: Value | None
    worst: list[Value]
    spread: int | None
    most: int
    numbers: dict[str, Course]
    rollback: Note | None
    after: int | None
    clean: int
    window: tuple[int, int]

    @property
    def began(self) -> float:
        """When the first bad step ended, Unix seconds."""
        return float(self.recording.time[self.incident.row])

    @property
    def recovered(self) -> bool:
        """Whether the run was clean for as long as a trainer needs to forget an anomaly."""
        return self.clean >= CLEAN_STEPS or self.incident.ending == "passed"

    @property
    def passed(self) -> int | None:
        """The row at which the run was clean at the step of the first bad one again, or None."""
        if self.after is None:
            return None
        steps = self.recording.step[self.after : self.after + self.clean]
        at = np.flatnonzero(steps >= self.incident.step)
        return self.after + int(at[0]) if at.size else None


def tell(recording: Recording, incident: Incident) -> Story:
    """Find out what there is to say of `incident`."""
    bad = recording.bad(HARD)
    rows = np.flatnonzero(bad[incident.row : incident.end].any(axis=1))
    if incident.ending == "passed":
        # The clean stretch that ended it is what came after it.
        incident = replace(incident, end=incident.row + int(rows.max(initial=0)) + 1)
    counts = bad[incident.row : incident.end].sum(axis=1)
    half = np.flatnonzero(counts * 2 >= len(recording.tensors))
    first = None
    if incident.tensor in recording.tensors:
        first = value_at(recording, incident.row, recording.tensors.index(incident.tensor))
    after = incident.end if incident.end < len(recording.step) else None
    around = max(_LEAST_AROUND, int(_SHARE_AROUND * (incident.end - incident.row)))
    return Story(
        recording=recording,
        incident=incident,
        first=first,
        worst=worst_of(recording, incident.row, incident.end),
        spread=int(half[0]) if half.size else None,
        most=int(counts.max(initial=0)),
        numbers={
            name: _course(values, incident, after) for name, values in recording.numbers.items()
        },
        rollback=next(
            (n for n in incident.notes if n.kind == "rollback" and "resumed_from" in n.fields),
            None,
        ),
        after=after,
        clean=0 if after is None else _clean_rows(recording, np.asarray(bad.any(axis=1)), after),
        window=(
            max(incident.row - around, 0),
            min(incident.end + around, len(recording.step)),
        ),
    )


def value_at(recording: Recording, row: int, column: int) -> Value:
    """One tensor at one row."""
    mark = recording.marks[row, column]
    absmax, ratio = float(recording.absmax[row, column]), float(recording.ratio[row, column])
    return Value(
        tensor=recording.tensors[column],
        step=int(recording.step[row]),
        absmax=absmax,
        # That of its time, and of the rank that was furthest above it.
        baseline=absmax / ratio if ratio > 0 else float(recording.baseline[column]),
        ratio=ratio,
        nonfinite=" and ".join(word for bit, word in ((NAN, "NaN"), (INF, "Inf")) if mark & bit),
    )


def worst_of(recording: Recording, first: int, last: int) -> list[Value]:
    """The tensors that went furthest between two rows, each where it did; the worst first."""
    badness = np.nan_to_num(recording.ratio[first:last], nan=0.0)
    # What was not finite is worse than any number.
    badness[recording.marks[first:last] > 0] = np.inf
    rows = badness.argmax(axis=0)
    largest = badness[rows, np.arange(badness.shape[1])]
    order = np.lexsort((rows, -largest))
    chosen = [int(column) for column in order if largest[column] > 0][:WORST]
    return [value_at(recording, first + int(rows[column]), column) for column in chosen]


def _course(values: Floats, incident: Incident, after: int | None) -> Course:
    before = values[max(incident.row - _USUAL_ROWS, 0) : incident.row]
    within = values[incident.row : incident.end]
    later = values[after : after + _USUAL_ROWS] if after is not None else values[:0]
    return Course(
        before=_joined(np.median, before),
        largest=_joined(np.max, within),
        after=_joined(np.median, later),
    )


def _joined(join: Callable[[Floats], Any], values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(join(known)) if known.size else math.nan


def _clean_rows(recording: Recording, bad: npt.NDArray[np.bool_], after: int) -> int:
    ended = bad[after:] | (recording.go[after:] != recording.go[after])
    return int(np.argmax(ended)) if ended.any() else len(ended)
