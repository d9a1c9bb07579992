"""Where a run went wrong: its incidents, by the trainer's own notes or, without those, by records.

An incident begins with the first bad step and ends when the run is rolled back, begins again, or
was clean for as long as the trainer asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from act_exporter.history import Thresholds
from act_exporter.levels import Tensor
from act_exporter.records import Note
from act_exporter.report.reading import RECORDS_LIMIT, read_closely
from act_exporter.report.recording import Recording

HARD = Thresholds().hard
CLEAN_STEPS = Thresholds().clean_steps

# Rows before and after an incident that are read again: for the pictures, and a clean stretch.
_AROUND_ROWS = 2 * CLEAN_STEPS

Ending = Literal["open", "passed", "rolled back", "began again", "halted"]


@dataclass(slots=True, kw_only=True)
class Incident:
    """One anomaly.

    Attributes:
        step: the first bad step.
        row: the row of it.
        end: the first row that is no longer part of it; the number of rows while it lasts.
        tensor: which went bad first; None where no layer did.
        rank: of that.
        rule: "hard" or "nonfinite"; None likewise.
        verdict: what kind of fault it is by the trainer, None where it has not said.
        ending: how it ended.
        noted: whether the trainer told of it; else it was found in the records.
        notes: all that was told from a while before it to the beginning of the next.
    """

    step: int
    row: int
    end: int
    tensor: Tensor | None = None
    rank: int = 0
    rule: str | None = None
    verdict: str | None = None
    ending: Ending = "open"
    noted: bool = True
    notes: list[Note] = field(default_factory=list)


def find_incidents(recording: Recording) -> list[Incident]:
    """The incidents of a run, the first one first."""
    noted = list(_Following(recording).incidents())
    found = [
        incident
        for incident in _in_records(recording)
        # Told of as a number's jump only, it is not told of.
        if not any(other.tensor and _overlap(incident, other) for other in noted)
    ]
    incidents = sorted([*noted, *found], key=lambda incident: (incident.row, incident.end))
    _share_notes(incidents, recording)
    return incidents


def most_telling(incidents: Sequence[Incident]) -> int:
    """The number, from 1 on, of the one to show: the last that was more than a number's jump."""
    serious = [
        number
        for number, incident in enumerate(incidents, 1)
        if incident.tensor is not None or incident.ending in ("rolled back", "halted")
    ]
    return serious[-1] if serious else len(incidents)


def look_closely(
    places: Sequence[Path], recording: Recording, incident: Incident
) -> tuple[Recording, Incident]:
    """The run around an incident, a row for each sampled step, and the incident in it.

    One that is too long for that stays as it was read.

    Args:
        places: of the journals.
        recording: the run.
        incident: of it.
    """
    first = max(incident.row - _AROUND_ROWS, 0)
    last = min(incident.end + _AROUND_ROWS, len(recording.step) - 1)
    records = (last - first) * recording.width * len(recording.tensors) * len(recording.ranks)
    if recording.width == 1 or records > RECORDS_LIMIT:
        return recording, incident
    began, time = recording.time[incident.row], recording.time
    closely = read_closely(places, recording, float(time[first]), float(time[last]))
    found = find_incidents(closely)
    return closely, min(found, key=lambda other: abs(closely.time[other.row] - began))


class _Following:
    """Follows the notes of a run."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._now: Incident | None = None
        self._standing: set[int] = set()  # ranks whose onset is not over
        self._generation = int(recording.generation[0])

    def incidents(self) -> Iterator[Incident]:
        for note in self._recording.notes:
            before = self._now
            self._take(note)
            if before is not None and self._now is None:
                yield before
        if self._now is not None:
            yield self._now

    def _take(self, note: Note) -> None:
        if note.kind in ("onset", "verdict"):
            self._see(note)
        elif note.kind == "clean":
            self._standing.discard(note.rank)
            if not self._standing:
                self._end("passed", note)
        elif note.kind == "halted":
            self._end("halted", note)
        elif note.kind == "rollback" and "to" in note.fields:
            known, self._generation = self._generation, int(note.number("to", self._generation))
            # At a mere start it is the same one.
            self._end("rolled back" if self._generation > known else "began again", note)

    def _see(self, note: Note) -> None:
        verdict, layer = note.fields.get("verdict"), note.fields.get("layer")
        if layer is None and verdict is None:
            if not self._standing:
                self._end("passed", note)
            return
        row = self._row_of(note)
        if self._now is None:
            count = len(self._recording.step)
            self._now = Incident(step=note.step, row=row, end=count, rank=note.rank)
        now = self._now
        now.verdict = now.verdict or verdict
        if layer is None:
            return
        self._standing.add(note.rank)
        # Of several ranks the first; of a fault that began with a number, its first layer.
        if now.tensor is None or row < now.row:
            now.tensor = (str(layer), str(note.fields.get("tensor", "output")))
            now.rank, now.rule = note.rank, note.fields.get("rule")
        now.row, now.step = min((now.row, now.step), (row, note.step))

    def _end(self, ending: Ending, note: Note) -> None:
        if self._now is not None:
            self._now.ending = ending
            after = np.searchsorted(self._recording.time, note.time, side="right")
            self._now.end = max(int(after), self._now.row + 1)
        self._now = None
        self._standing.clear()

    def _row_of(self, note: Note) -> int:
        """The row of the step that a note names, of the last go at it before the note."""
        recording = self._recording
        before = int(np.searchsorted(recording.time, note.time, side="right"))
        at = np.flatnonzero(recording.step[:before] >= note.step)
        same = at[recording.go[at] == recording.go[before - 1]] if at.size else at
        return int(same[0]) if same.size else max(before - 1, 0)


def _in_records(recording: Recording) -> Iterator[Incident]:
    """By what records have: rows with something bad, and fewer than `CLEAN_STEPS` between them."""
    bad = recording.bad(HARD)
    rows = np.flatnonzero(bad.any(axis=1))
    apart = (np.diff(rows) > CLEAN_STEPS) | (np.diff(recording.go[rows]) != 0)
    for several in np.split(rows, np.flatnonzero(apart) + 1):
        if not several.size:
            continue
        first, last = int(several[0]), int(several[-1])
        # The first in the order of execution: what comes after it is its consequence.
        column = int(np.argmax(bad[first]))
        end = min(last + CLEAN_STEPS, len(recording.step))
        ending: Ending = "passed" if last + CLEAN_STEPS < len(recording.step) else "open"
        back = np.flatnonzero(recording.go[last:end] != recording.go[last])
        if back.size:
            end = last + int(back[0])
            further = recording.generation[end] > recording.generation[last]
            ending = "rolled back" if further else "began again"
        yield Incident(
            step=int(recording.step[first]),
            row=first,
            end=end,
            tensor=recording.tensors[column],
            rank=recording.rank_of(first, column),
            rule="nonfinite" if recording.marks[first, column] else "hard",
            ending=ending,
            noted=False,
        )


def _overlap(one: Incident, other: Incident) -> bool:
    return one.row < other.end and other.row < one.end


def _share_notes(incidents: Sequence[Incident], recording: Recording) -> None:
    """Give each incident its notes: until the next one begins."""
    starts = [float(recording.time[incident.row]) for incident in incidents]
    for incident, start, following in zip(incidents, starts, [*starts, math.inf][1:], strict=True):
        incident.notes = [note for note in recording.notes if start <= note.time < following]
