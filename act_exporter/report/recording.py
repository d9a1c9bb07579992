"""One run as its journals have it: all ranks, one row a sampled step, in the order of training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.levels import Tensor
from act_exporter.records import Note
from act_exporter.report.levels import Levels, learnt, noted
from act_exporter.report.piece import NUMBERS, Floats, Marks, Piece, Rows

Steps = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A run. Its steps come again after a rollback or a restart: rows go by time.

    Attributes:
        run: the run's name.
        ranks: whose journals there are.
        tensors: of the columns, in the order of execution where the journals have it.
        step: (rows,) the sampled steps.
        time: (rows,) when they ended, Unix seconds.
        generation: (rows,).
        go: (rows,) how often before it the run was sent back or began again.
        absmax: (rows, tensors) the largest of any rank; NaN where it did not run.
        marks: (rows, tensors) what was not finite on any rank, see `piece.NAN`.
        ratio: (rows, tensors) the largest of absmax over baseline of any rank; NaN without one.
        baseline: (tensors,) the last one known, of the first rank that has it.
        levels: baselines over time, by rank.
        numbers: (rows,) each of `piece.NUMBERS`: NaN where it is not known, infinite where it was
            not finite.
        notes: by time, all but the run's numbers.
        by_rank: the rows of each rank, which tell whose a value is.
        records: lines that were read.
        skipped: lines that could not be.
        width: sampled steps that a row is the maximum of; 1 but for very large journals.
    """

    run: str
    ranks: list[int]
    tensors: list[Tensor]
    step: Steps
    time: Times
    generation: Steps
    go: Steps
    absmax: Floats
    marks: Marks
    ratio: Floats
    baseline: Floats
    levels: dict[int, Levels] = field(repr=False)
    numbers: dict[str, Floats]
    notes: list[Note]
    by_rank: list[Rows] = field(repr=False)
    records: int
    skipped: int
    width: int

    @property
    def learnt(self) -> bool:
        """Whether baselines are from the records, since the journals have none."""
        return any(level.learnt for level in self.levels.values())

    def bad(self, hard: float) -> npt.NDArray[np.bool_]:
        """(rows, tensors) what was not finite, or above so many baselines."""
        with np.errstate(invalid="ignore"):
            bad: npt.NDArray[np.bool_] = (self.marks > 0) | (self.ratio > hard)
        return bad

    def rank_of(self, row: int, column: int) -> int:
        """Which rank had what was not finite, or else the largest value, there."""
        found = []
        for rows in self.by_rank:
            at = np.flatnonzero(
                (rows.step == self.step[row]) & (rows.generation == self.generation[row])
            )
            found += [
                (rows.marks[i, column] > 0, np.nan_to_num(rows.absmax[i, column]), -rows.rank)
                for i in at
            ]
        return -max(found)[2] if found else self.ranks[0]


def joined(pieces: Sequence[Piece], run: str, whole: Recording | None = None) -> Recording:
    """Put the records and notes of one run together, of pieces in any order.

    Args:
        pieces: the files.
        run: the run's name.
        whole: the run, of which this is a part: its tensors and baselines hold here too.
    """
    notes = sorted(
        (note for piece in pieces for note in piece.notes if note.run == run),
        key=lambda note: note.time,
    )
    parts = [rows for piece in pieces for rows in piece.rows if rows.run == run]
    tensors = whole.tensors if whole else _ordered(parts, notes)
    ranks = sorted({rows.rank for rows in parts})
    by_rank = [_one_rank([p for p in parts if p.rank == rank], tensors) for rank in ranks]
    levels = (whole and whole.levels) or {
        rows.rank: noted([note for note in notes if note.rank == rows.rank], tensors)
        or learnt(rows.absmax, rows.marks, tensors)
        for rows in by_rank
    }
    starts = _starts(by_rank[0])
    merged, ratio, go = _all_ranks(by_rank, levels, starts)
    known = np.array([level.last for level in levels.values()])
    first = np.argmax(~np.isnan(known), axis=0)
    return Recording(
        run=run,
        ranks=ranks,
        tensors=tensors,
        step=merged.step,
        time=merged.time,
        generation=merged.generation,
        go=go,
        absmax=merged.absmax,
        marks=merged.marks,
        ratio=ratio,
        baseline=known[first, np.arange(len(tensors))],
        levels=levels,
        numbers=_numbers(pieces, run, starts, merged.step, go),
        notes=notes,
        by_rank=by_rank,
        records=sum(piece.records for piece in pieces),
        skipped=sum(piece.skipped for piece in pieces),
        width=max(piece.width for piece in pieces),
    )


def cut(piece: Piece, first: float, last: float) -> Piece:
    """The records of that time, in Unix seconds, and everything else."""
    kept = []
    for rows in piece.rows:
        within = (rows.time >= first) & (rows.time <= last)
        if within.any():
            kept.append(_chosen(rows, np.flatnonzero(within)))
    return replace(piece, rows=kept)


def _ordered(parts: Iterable[Rows], notes: Iterable[Note]) -> list[Tensor]:
    """The tensors, in the order of execution; those of which nothing is known as they came."""
    depth = {
        (note.fields.get("layer"), note.fields.get("tensor")): note.number("depth", math.inf)
        for note in notes
        if note.kind == "depth"
    }
    found = dict.fromkeys(itertools.chain.from_iterable(rows.tensors for rows in parts))
    return sorted(found, key=lambda tensor: depth.get(tensor, math.inf))


def _one_rank(parts: list[Rows], tensors: list[Tensor]) -> Rows:
    """The rows of one rank, by time, with a column for each of `tensors`."""
    parts = sorted(parts, key=lambda rows: rows.time[0])
    count = sum(len(rows.step) for rows in parts)
    absmax = np.full((count, len(tensors)), np.nan, np.float32)
    marks = np.zeros((count, len(tensors)), np.uint8)
    places = {tensor: column for column, tensor in enumerate(tensors)}
    row = 0
    for rows in parts:
        columns = [places[tensor] for tensor in rows.tensors]
        absmax[row : row + len(rows.step), columns] = rows.absmax
        marks[row : row + len(rows.step), columns] = rows.marks
        row += len(rows.step)
    whole = Rows(
        run=parts[0].run,
        rank=parts[0].rank,
        tensors=tensors,
        step=np.concatenate([rows.step for rows in parts]),
        time=np.concatenate([rows.time for rows in parts]),
        generation=np.concatenate([rows.generation for rows in parts]),
        absmax=absmax,
        marks=marks,
    )
    if (np.diff(whole.time) >= 0).all():
        return whole
    return _chosen(whole, np.argsort(whole.time, kind="stable"))


def _chosen(rows: Rows, which: Steps) -> Rows:
    return replace(
        rows,
        step=rows.step[which],
        time=rows.time[which],
        generation=rows.generation[which],
        absmax=rows.absmax[which],
        marks=rows.marks[which],
    )


def _starts(rows: Rows) -> Times:
    """When each go at the steps but the first began: between the rows where they go back.

    Half-way, since ranks go back at the same boundary and not in the same millisecond.
    """
    back = (np.diff(rows.step) <= 0) | (np.diff(rows.generation) != 0)
    at = np.flatnonzero(back)
    starts: Times = (rows.time[at] + rows.time[at + 1]) / 2
    return starts


def _all_ranks(
    by_rank: list[Rows], levels: Mapping[int, Levels], starts: Times
) -> tuple[Rows, Floats, Steps]:
    """One row a step and go, the maxima over ranks; with ratios and goes."""
    gos = [np.searchsorted(starts, rows.time) for rows in by_rank]
    ratios = [levels[rows.rank].ratio(rows.absmax, rows.time) for rows in by_rank]
    if len(by_rank) == 1:
        return by_rank[0], ratios[0], gos[0]
    go = np.concatenate(gos)
    step = np.concatenate([rows.step for rows in by_rank])
    order = np.lexsort((step, go))
    first = np.flatnonzero(np.append(True, np.diff(step[order]) | np.diff(go[order])))
    chosen = order[first]

    def over_ranks(join: np.ufunc, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        several: npt.NDArray[Any] = join.reduceat(np.concatenate(parts)[order], first, axis=0)
        return several

    merged = Rows(
        run=by_rank[0].run,
        rank=by_rank[0].rank,
        tensors=by_rank[0].tensors,
        step=step[chosen],
        time=over_ranks(np.minimum, [rows.time for rows in by_rank]),
        generation=over_ranks(np.maximum, [rows.generation for rows in by_rank]),
        absmax=over_ranks(np.fmax, [rows.absmax for rows in by_rank]),
        marks=over_ranks(np.bitwise_or, [rows.marks for rows in by_rank]),
    )
    return merged, over_ranks(np.fmax, ratios), go[chosen]


def _numbers(
    pieces: Sequence[Piece], run: str, starts: Times, step: Steps, go: Steps
) -> dict[str, Floats]:
    """The run's numbers by row, of the first rank that tells them; the largest of several."""
    found = {name: np.full(len(step), np.nan, np.float32) for name in NUMBERS}
    told = [piece.numbers[run] for piece in pieces if run in piece.numbers]
    if not told:
        return found
    table = np.concatenate(told)
    table = table[table[:, 2] == table[:, 2].min()]
    # A number of a step that is in no row goes to the next one: of several steps, the last has it.
    base = int(max(step.max(), table[:, 0].max())) + 1
    keys = go * base + step
    at = np.searchsorted(keys, np.searchsorted(starts, table[:, 3]) * base + table[:, 0])
    within = at < len(step)
    for column, name in enumerate(NUMBERS, table.shape[1] - len(NUMBERS)):
        np.fmax.at(found[name], at[within], table[within, column].astype(np.float32))
    return found
