"""What was usual for each tensor: its baselines as the journal has them, or learnt from records."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from act_exporter.baseline import Baseline
from act_exporter.history import Thresholds
from act_exporter.levels import BASELINE_STEPS, Tensor
from act_exporter.records import Note
from act_exporter.report.piece import Floats, Marks

# Rows whose median stands in where nothing has settled: as many as a baseline is agreed on by.
_STAND_IN_ROWS = 2 * BASELINE_STEPS


class Levels:
    """Baselines of one rank over time.

    Args:
        changes: Unix seconds and the (tensors,) baselines from then on, by time; NaN for none.
        learnt: whether they are not the trainer's own.
    """

    def __init__(self, changes: Sequence[tuple[float, Floats]], *, learnt: bool) -> None:
        self._changes = list(changes)
        self.learnt = learnt

    @property
    def last(self) -> Floats:
        """(tensors,) those known at last."""
        return self._changes[-1][1]

    def ratio(self, absmax: Floats, time: npt.NDArray[np.float64]) -> Floats:
        """(rows, tensors) absmax over the baseline that was in force; `time` goes up."""
        ratio = np.full_like(absmax, np.nan)
        starts = np.searchsorted(time, [at for at, _ in self._changes])
        for (_, level), first, last in zip(
            self._changes, starts, [*starts[1:], len(time)], strict=True
        ):
            np.divide(absmax[first:last], level, out=ratio[first:last])
        return ratio


def noted(notes: Sequence[Note], tensors: Sequence[Tensor]) -> Levels | None:
    """The baselines that the trainer told of in `notes`, by time; None where it told of none."""
    columns = {tensor: column for column, tensor in enumerate(tensors)}
    changes: list[tuple[float, Floats]] = []
    now = np.full(len(tensors), np.nan, np.float32)
    for note in notes:
        tensor = (note.fields.get("layer"), note.fields.get("tensor"))
        if note.kind != "baseline" or tensor not in columns:
            continue
        if not changes or changes[-1][0] != note.time:
            now = now.copy()
            changes.append((note.time, now))
        now[columns[tensor]] = note.number("absmax")
    return Levels(changes, learnt=False) if changes else None


def learnt(absmax: Floats, marks: Marks, tensors: Sequence[Tensor]) -> Levels:
    """Baselines from the records of one rank, by the rule by which a trainer learns them.

    Where nothing has settled, as in a run of a few steps, it is the median of the steps before the
    first one that was not finite.

    Args:
        absmax: (rows, tensors), in the order of training.
        marks: (rows, tensors), what was not finite.
        tensors: their names.
    """
    kinds = [f"{re.sub(r'[0-9]+', '#', layer)} {tensor}" for layer, tensor in tensors]
    baseline = Baseline(kinds, BASELINE_STEPS)
    hard = Thresholds().hard
    sick = np.asarray(marks.any(axis=1))
    for row in np.flatnonzero(~sick):
        values = absmax[row].astype(np.float64)
        with np.errstate(invalid="ignore"):
            above = values > hard * baseline.values
        if not above.any():
            baseline.add(values, np.isfinite(values), None)
        if not np.isnan(baseline.values).any():
            break
    level = baseline.values.astype(np.float32)
    missing = np.flatnonzero(np.isnan(level))
    healthy = absmax[: int(np.argmax(sick)) if sick.any() else None][:_STAND_IN_ROWS]
    for column in missing:
        values = healthy[:, column][np.isfinite(healthy[:, column]) & (healthy[:, column] > 0)]
        level[column] = np.median(values) if values.size else np.nan
    return Levels([(-np.inf, level)], learnt=True)
