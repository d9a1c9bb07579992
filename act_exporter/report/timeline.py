"""What happened in an incident, one thing after the other, with the clock's time and the step."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from act_exporter.records import Note
from act_exporter.report.checkpoints import checkpoints
from act_exporter.report.incident import CLEAN_STEPS
from act_exporter.report.story import Story
from act_exporter.report.words import first_words, plural

_ASKED = {"recover": "a rollback was asked for", "checkpoint": "a backup was asked for"}
_MADE = {"emergency": "emergency checkpoint", "backup": "backup"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line of the timeline.

    Attributes:
        time: Unix seconds.
        step: which, or None.
        what: in a few words.
        detail: in a sentence or two.
        row: where pictures have it, or None.
        letter: what they call it, or "".
    """

    time: float
    step: int | None
    what: str
    detail: str = ""
    row: int | None = None
    letter: str = ""


def timeline(story: Story) -> list[Event]:
    """The events, by time; those in the window of the pictures have letters."""
    first, last = story.window
    letters = iter(string.ascii_uppercase)
    events = []
    for event in sorted(_events(story), key=lambda event: event.time):
        drawn = event.row is not None and first <= event.row < last
        events.append(replace(event, letter=next(letters, "") if drawn else "", row=event.row))
    return [event if event.letter else replace(event, row=None) for event in events]


def _events(story: Story) -> Iterator[Event]:
    recording, incident = story.recording, story.incident
    yield Event(
        time=story.began,
        step=incident.step,
        what="first bad step",
        detail=first_words(story),
        row=incident.row,
    )
    for saved in checkpoints(recording.notes, story.rollback):
        if saved.chosen:
            yield Event(
                time=saved.time,
                step=saved.step,
                what="the checkpoint is saved that the run will go back to",
                detail=saved.name,
                row=_row_at(story, saved.time),
            )
    for note in incident.notes:
        yield from _of_note(story, note)
    if story.after is not None and story.clean:
        after = story.after
        yield _at_row(story, after, "first clean step", "")
        if story.passed is not None and story.passed != after:
            what = "clean at the step at which it went bad before"
            yield _at_row(story, story.passed, what, "")
        if story.clean >= CLEAN_STEPS:
            what = f"{CLEAN_STEPS} sampled steps without a bad one"
            yield _at_row(story, after + CLEAN_STEPS - 1, what, "The anomaly is over.")


def _of_note(story: Story, note: Note) -> Iterator[Event]:
    fields = note.fields
    at: dict[str, Any] = {"time": note.time, "step": note.step, "row": _row_at(story, note.time)}
    if note.kind == "request":
        asked = note.number("created_at", note.time)
        yield Event(
            time=asked,
            step=None,
            what=_ASKED.get(str(fields.get("action")), f"asked for: {fields.get('action')}"),
            detail=(
                f"For the alert {fields.get('alert')}, by the receiver's clock; the trainer took "
                f"it up after step {note.step}, {note.time - asked:.1f} s later."
            ),
            row=_row_at(story, asked),
        )
    elif note.kind == "checkpoint" and fields.get("kind") in _MADE:
        detail = f"{fields.get('name')}, in {note.number('seconds'):.1f} s."
        yield Event(what=_MADE[str(fields["kind"])], detail=detail, **at)
    elif note.kind == "rollback" and "resumed_from" in fields:
        resumed = int(note.number("resumed_step", note.step))
        back = int(note.number("from_step", resumed)) - resumed
        at["step"] = resumed
        detail = f"To {fields['resumed_from']}, {plural(back, 'step')} back."
        yield Event(what="rolled back", detail=detail, **at)
        for remedy in fields.get("remedies") or ():
            yield Event(what="remedy", detail=str(remedy), **at)
    elif note.kind == "rollback" and story.rollback is None and story.after is not None:
        if story.incident.ending == "rolled back":
            yield Event(what="rolled back", detail=f"To generation {fields.get('to')}.", **at)
        elif story.incident.ending == "began again":
            yield Event(what="the trainer was started again", **at)
    elif note.kind in ("refused", "halted"):
        yield Event(what=note.kind, detail=f"{fields.get('why')}.", **at)


def _at_row(story: Story, row: int, what: str, detail: str) -> Event:
    recording = story.recording
    step, time = int(recording.step[row]), float(recording.time[row])
    return Event(time=time, step=step, what=what, detail=detail, row=row)


def _row_at(story: Story, time: float) -> int:
    """The last row that had ended then."""
    return max(int(np.searchsorted(story.recording.time, time, side="right")) - 1, 0)
