"""One journal file as columns: what each tensor's absmax was at each sampled step.

A day of journals is ten million lines, so that no object is made of a line that is not a note, and
a file can be read as maxima over several sampled steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from act_exporter.levels import Tensor
from act_exporter.records import Note, parsed
from act_exporter.report.lines import lines_of

Floats = npt.NDArray[np.float32]
Marks = npt.NDArray[np.uint8]

NAN, INF = 1, 2
"""Bits of a mark: the tensor had NaN, or infinities."""

NUMBERS = ("loss", "grad_norm", "learning_rate")
"""The run's numbers that are drawn."""

# Lines whose objects are in memory at once.
_TOGETHER = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Sampled steps, or groups of them, of one rank of one run.

    Attributes:
        run: the run's name.
        rank: the process' rank.
        tensors: of the columns, in the order in which they first came.
        step: (rows,) the last step of each.
        time: (rows,) Unix seconds, likewise.
        generation: (rows,).
        absmax: (rows, tensors) the largest; NaN where the tensor did not run or has none.
        marks: (rows, tensors) what was not finite, see `NAN` and `INF`.
    """

    run: str
    rank: int
    tensors: list[Tensor]
    step: npt.NDArray[np.int64]
    time: npt.NDArray[np.float64]
    generation: npt.NDArray[np.int64]
    absmax: Floats
    marks: Marks


@dataclass(slots=True)
class Piece:
    """What a file holds.

    Attributes:
        rows: the records, by run and rank.
        numbers: by run, a row each: step, generation, rank, time, and `NUMBERS`, NaN where one is
            missing and infinite where it was not finite.
        notes: all others.
        records: how many there were.
        skipped: lines that are neither record nor note: torn by a crash, or not ours.
        width: sampled steps that a row is of.
    """

    rows: list[Rows] = field(default_factory=list)
    numbers: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    records: int = 0
    skipped: int = 0
    width: int = 1


def read_piece(file: Path, width: int = 1) -> Piece:
    """Read a journal, plain or compressed, whole or torn; one that was deleted holds nothing.

    Args:
        file: its name without `.gz`.
        width: sampled steps that become one row, their maxima.
    """
    reading = _Reading()
    try:
        for lines in lines_of(file, reading.miss):
            reading.add(lines)
    except FileNotFoundError:
        pass  # deleted meanwhile, as its time had come
    return reading.piece(width)


def _loaded(lines: list[bytes]) -> Iterator[Any]:
    """What each line is in JSON; None where it is none."""
    for start in range(0, len(lines), _TOGETHER):
        several = lines[start : start + _TOGETHER]
        # As one array they take half the time. Torn ones may make other elements of it, or fewer.
        loaded = _json(b"[%b]" % b",".join(several))
        if loaded is None or len(loaded) != len(several):
            loaded = [_json(line) for line in several]
        yield from loaded


def _json(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None


class _Reading:
    """Gathers what lines say."""

    def __init__(self) -> None:
        self.records = 0
        self.skipped = 0
        self._notes: list[Note] = []
        self._numbers: dict[str, array[float]] = {}
        self._series: dict[tuple[str, int], _Series] = {}
        self._open = _Series()  # of the step whose records are being read

    def add(self, lines: list[bytes]) -> None:
        # A loop of ten million turns: names are looked up once, and nothing is called that need
        # not be.
        series = self._open
        columns, column, values, mark = series.parts()
        records = 0
        for said, line in zip(_loaded(lines), lines, strict=True):
            try:
                if "note" in said:
                    self._note(said, line)
                    continue
                if (
                    said["step"] != series.at[0]
                    or said["time"] != series.at[1]
                    or said["rank"] != series.at[2]
                ):
                    series = self._begun(said)
                    columns, column, values, mark = series.parts()
                value = said["absmax"]
                bad = said["nan"] or said["posinf"] or said["neginf"]
                place = columns.get((said["layer"], said["tensor"]))
                if place is None:
                    place = series.column_of(said["layer"], said["tensor"])
                values(value if type(value) is not str else float(value))
                column(place)
                if bad:
                    mark(said)
                records += 1
            # No JSON, no object, a name missing, no number where one must be.
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
                self.skipped += 1
        self.records += records
        self._open = series

    def miss(self) -> None:
        """The rest of the file is damaged."""
        self.skipped += 1

    def piece(self, width: int) -> Piece:
        return Piece(
            rows=[
                series.rows(run, rank, width)
                for (run, rank), series in self._series.items()
                if series.columns
            ],
            numbers={
                run: np.array(values).reshape(-1, 4 + len(NUMBERS))
                for run, values in self._numbers.items()
            },
            notes=self._notes,
            records=self.records,
            skipped=self.skipped,
            width=width,
        )

    def _begun(self, said: dict[str, Any]) -> _Series:
        """Where the records of the step go that begins with this one."""
        run, rank = said["run"], said["rank"]
        series = self._series.get((run, rank))
        if series is None:
            if not isinstance(run, str) or type(rank) is not int:
                raise TypeError
            series = self._series[run, rank] = _Series()
        series.begin(said["generation"], said["step"], said["time"], rank)
        return series

    def _note(self, said: dict[str, Any], line: bytes) -> None:
        if said["note"] == "training":
            row = [said["step"], said["generation"], said["rank"], said["time"]]
            row += [_number(said[name]) if name in said else math.nan for name in NUMBERS]
            # Made first: all of them are numbers, or none is taken.
            self._numbers.setdefault(str(said["run"]), array("d")).extend(array("d", row))
            return
        note = parsed(line)
        if not isinstance(note, Note):
            raise TypeError
        self._notes.append(note)


class _Series:
    """The records of one rank of one run.

    Attributes:
        at: step, time and rank of the row that is open.
        columns: of the tensors.
    """

    def __init__(self) -> None:
        self.at: tuple[float, float, int] = (math.nan, math.nan, -1)
        self.columns: dict[Tensor, int] = {}
        self._generation, self._step, self._time = array("q"), array("q"), array("d")
        self._first = array("q")  # record of each row
        self._column, self._absmax = array("q"), array("d")
        self._marks: list[tuple[int, int]] = []  # record and mark

    def begin(self, generation: int, step: int, time: float, rank: int) -> None:
        array("q", (generation, step))  # both are numbers, or none is taken
        self._time.append(time)
        self._generation.append(generation)
        self._step.append(step)
        self._first.append(len(self._column))
        self.at = (step, time, rank)

    def parts(
        self,
    ) -> tuple[
        dict[Tensor, int],
        Callable[[int], None],
        Callable[[float], None],
        Callable[[dict[str, Any]], None],
    ]:
        """Columns of the known tensors, and what takes a record's column, value and mark."""
        return self.columns, self._column.append, self._absmax.append, self._mark

    def column_of(self, layer: Any, tensor: Any) -> int:
        """That of a tensor which has not come before."""
        if not (isinstance(layer, str) and isinstance(tensor, str)):
            raise TypeError
        return self.columns.setdefault((layer, tensor), len(self.columns))

    def rows(self, run: str, rank: int, width: int) -> Rows:
        shape = (len(self._step), len(self.columns))
        absmax = np.full(shape, np.nan, np.float32)
        marks = np.zeros(shape, np.uint8)
        count = np.diff(np.append(np.array(self._first), len(self._column)))
        row, column = np.repeat(np.arange(len(count)), count), np.array(self._column)
        with np.errstate(over="ignore"):  # float64's, beyond what float32 has
            absmax[row, column] = np.array(self._absmax)
        for record, mark in self._marks:
            marks[row[record], column[record]] = mark
        marks[np.isinf(absmax)] |= INF
        absmax[np.isinf(absmax)] = np.nan
        step, generation = np.array(self._step), np.array(self._generation)
        starts = _groups(step, generation, width)
        last = np.append(starts[1:], len(step)) - 1
        if width > 1:
            absmax = np.fmax.reduceat(absmax, starts, axis=0)
            marks = np.bitwise_or.reduceat(marks, starts, axis=0)
        return Rows(
            run=run,
            rank=rank,
            tensors=list(self.columns),
            step=step[last],
            time=np.array(self._time)[last],
            generation=generation[last],
            absmax=absmax,
            marks=marks,
        )

    def _mark(self, said: dict[str, Any]) -> None:
        infinite = said["posinf"] or said["neginf"]
        mark = (NAN if said["nan"] else 0) | (INF if infinite else 0)
        self._marks.append((len(self._column) - 1, mark))


def _number(value: float | str) -> float:
    return value if math.isfinite(float(value)) else math.inf  # type: ignore[return-value]


def _groups(
    step: npt.NDArray[np.int64], generation: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.int64]:
    """Where the rows begin that so many sampled steps become; none is of two goes at a step."""
    if width == 1 or len(step) < 2:
        return np.arange(len(step))
    interval = max(int(np.median(np.abs(np.diff(step)))), 1)
    # By the step itself, so that several ranks' rows are of the same steps.
    block = step // (width * interval)
    new = (np.diff(block) != 0) | (np.diff(generation) != 0) | (np.diff(step) < 0)
    return np.append(0, np.flatnonzero(new) + 1)
