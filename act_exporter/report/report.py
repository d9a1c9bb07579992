"""The report itself: what is shown of an incident, or of a run's health, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from act_exporter.report import page, words
from act_exporter.report.checkpoints import checkpoints
from act_exporter.report.drawing import Draw, svg
from act_exporter.report.incident import HARD, Incident
from act_exporter.report.pictures import View, draw_course, draw_profile
from act_exporter.report.recording import Recording
from act_exporter.report.story import Story, worst_of
from act_exporter.report.timeline import timeline

# Rows of a run in health: as many as the trainer's own window has.
_HEALTHY_ROWS = 500

# Rows before an incident whose maximum is what was usual.
_BEFORE_ROWS = 5

_BLANK = "Blank is what did not run, or had no baseline yet."

_COURSE_HEIGHT, _PROFILE_HEIGHT = 6.6, 3.6  # inches


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What there is to show.

    Attributes:
        title: a line.
        outcome: in a few words.
        text: a paragraph.
        pictures: what draws them, and their heights in inches.
        html: the whole page.
    """

    title: str
    outcome: str
    text: str
    pictures: list[tuple[Draw, float]]
    html: str


def of_incident(
    story: Story, incidents: Sequence[Incident], recording: Recording, number: int
) -> Report:
    """The report of an incident.

    Args:
        story: of it.
        incidents: all of the run.
        recording: the whole run, of which the story's may be a part.
        number: the incident's, from 1 on.
    """
    closely = story.recording
    events = timeline(story)
    view = View(
        recording=closely,
        window=story.window,
        events=events,
        first=story.first.tensor if story.first else None,
        origin=story.incident.row,
    )
    rows = {
        "before": slice(max(story.incident.row - _BEFORE_ROWS, 0), max(story.incident.row, 1)),
        "at the first bad step": slice(story.incident.row, story.incident.row + 1),
        "at its worst": slice(story.incident.row, story.incident.end),
    }
    if story.after is not None and story.clean:
        rows["after it"] = slice(story.after, story.after + min(story.clean, _BEFORE_ROWS))
    pictures = _pictures(view, rows)
    title, text, outcome = (
        words.title(closely.run, story),
        words.diagnosis(story),
        words.outcome(story),
    )
    letters = "; ".join(f"{event.letter} {event.what}" for event in events if event.letter)
    parts = [
        page.section(
            "What happened",
            page.facts(words.facts(story)),
            page.paragraph(text, "diagnosis"),
        ),
        page.section("Timeline", page.timeline_table(events, story.began)),
        page.section(
            "Step by step",
            page.figure(
                _svg(pictures[0], "course", f"Course of {title}. {text}"),
                f"Loss, gradient norm, and each watched tensor against its baseline. {letters}."
                f" {_BLANK}",
            ),
        ),
        page.section(
            "Over depth",
            page.figure(
                _svg(pictures[1], "profile", f"Profile over depth. {words.first_words(story)}"),
                "Each watched tensor against its baseline, before, at and after. Crosses at the"
                f" upper edge are NaN or Inf; the rule asks for {HARD:g} times.",
            ),
        ),
        page.section("The layers that went furthest", page.worst_table(story.worst)),
        _checkpoints(story, closely),
    ]
    if len(incidents) > 1:
        parts.append(
            page.section(
                "All incidents of the run", page.incident_table(incidents, recording, number)
            )
        )
    return Report(
        title=title,
        outcome=outcome,
        text=text,
        pictures=pictures,
        html=page.page(title, outcome, parts, page.footer(recording)),
    )


def of_health(recording: Recording) -> Report:
    """The report of a run without an incident."""
    count = len(recording.step)
    window = max(count - _HEALTHY_ROWS, 0), count
    view = View(recording=recording, window=window, events=[], first=None, origin=None)
    pictures = _pictures(view, {"in the last sampled steps": slice(*window)})
    worst = worst_of(recording, *window)
    title = f"{recording.run}: no incident"
    text = (
        f"In {words.plural(count, 'sampled step')}, up to step {int(recording.step[-1])}, no layer"
        f" was above {HARD:g} times its baseline and nothing was NaN or Inf."
    )
    if worst:
        text += (
            f" In the last {window[1] - window[0]} of them the largest against its baseline was"
            f" {words.named(worst[0].tensor)}: {words.how_far(worst[0])}."
        )
    parts = [
        page.section("How it is", page.paragraph(text, "diagnosis well")),
        page.section(
            "Step by step",
            page.figure(
                _svg(pictures[0], "course", text),
                f"Loss, gradient norm, and each watched tensor against its baseline. {_BLANK}",
            ),
        ),
        page.section(
            "Over depth",
            page.figure(
                _svg(pictures[1], "profile", text), "Each watched tensor against its baseline."
            ),
        ),
        page.section("The layers that went furthest", page.worst_table(worst)),
    ]
    saved = checkpoints(recording.notes, None)
    if saved:
        parts.append(page.section("Checkpoints", page.checkpoint_table(saved, back_to=False)))
    return Report(
        title=title,
        outcome="healthy",
        text=text,
        pictures=pictures,
        html=page.page(title, "healthy", parts, page.footer(recording)),
    )


def _pictures(view: View, rows: dict[str, slice]) -> list[tuple[Draw, float]]:
    return [
        (lambda figure: draw_course(figure, view), _COURSE_HEIGHT),
        (lambda figure: draw_profile(figure, view, rows), _PROFILE_HEIGHT),
    ]


def _svg(picture: tuple[Draw, float], name: str, alternative: str) -> str:
    draw, height = picture
    return svg(draw, name=name, height=height, alternative=escape(alternative))


def _checkpoints(story: Story, recording: Recording) -> str:
    saved = checkpoints(recording.notes, story.rollback)
    if not saved:
        return page.section(
            "Checkpoints", page.paragraph("The journals tell of no checkpoint: no guard was there.")
        )
    text = "There was no rollback."
    if story.rollback is not None:
        chosen = story.rollback.fields.get("resumed_from")
        text = (
            f"The run went back to {chosen}: the newest one that was healthy, whole, of its own"
            " line, and old enough to be from before the first bad step."
        )
    return page.section(
        "Checkpoints",
        page.paragraph(text),
        page.checkpoint_table(saved, back_to=story.rollback is not None),
    )
