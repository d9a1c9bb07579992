"""The diagnosis in words, for somebody who was not there.

Every sentence is of facts in the journals. What kind of fault it is was said by the trainer when it
began; what that means stands here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from act_exporter.diagnosis import meaning
from act_exporter.levels import Tensor
from act_exporter.report.incident import CLEAN_STEPS, HARD, Incident
from act_exporter.report.story import Course, Story, Value


def title(run: str, story: Story) -> str:
    """One line."""
    if story.first is None:
        return f"{run}: no layer, but the run's numbers went bad at step {story.incident.step}"
    return f"{run}: {named(story.first.tensor)} went bad first, at step {story.first.step}"


def diagnosis(story: Story) -> str:
    """A paragraph: what went first, how far, what kind of fault, what followed, what was done."""
    return " ".join(_sentences(story))


def facts(story: Story) -> Iterator[tuple[str, str, str]]:
    """What is read first: a name, a value, and a word on it."""
    first, incident = story.first, story.incident
    when = clock(story.began, day=True)
    if first is None:
        yield "Bad first", "no layer", "loss, gradient or update"
    else:
        rank = f", rank {incident.rank}" if len(story.recording.ranks) > 1 else ""
        yield "Bad first", first.tensor[0], f"its {first.tensor[1]}{rank}"
    yield "At step", f"{incident.step:,}", when
    if first is not None and first.nonfinite:
        yield "How far", first.nonfinite, "among its elements"
    elif first is not None and not math.isnan(first.ratio):
        yield "How far", f"{times(first.ratio)} its baseline", f"absmax {number(first.absmax)}"
    if incident.verdict:
        yield "Kind", incident.verdict, "the trainer's verdict"
    if story.rollback is not None:
        seconds = story.rollback.time - story.began
        step = int(story.rollback.number("resumed_step", 0))
        yield "Rolled back", f"to step {step:,}", f"{after(seconds)} after the first bad step"
    yield "Now", outcome(story), ""


def outcome(story: Story) -> str:
    """In a few words: did it recover?"""
    ending = story.incident.ending
    if ending == "halted":
        return "halted: people must look"
    if ending == "open":
        return "still bad where the journals end"
    if ending == "passed":
        return "it passed by itself"
    done = "rolled back" if ending == "rolled back" else "started again"
    if story.recovered:
        return f"{done}, and clean since"
    if story.after is None or not story.clean:
        return f"{done}, nothing is known since" if story.after is None else f"{done}, bad again"
    return f"{done}, clean for {plural(story.clean, 'sampled step')} so far"


def first_words(story: Story) -> str:
    """Of the first bad step."""
    if story.first is None:
        return "No layer broke a rule; loss, gradient or update did."
    return f"{_capital(named(story.first.tensor))}: {how_far(story.first)}."


def how_far(value: Value) -> str:
    """A value against its baseline."""
    if value.nonfinite:
        return f"{value.nonfinite} among its elements"
    if math.isnan(value.ratio):
        return f"absmax {number(value.absmax)}, with no baseline to hold it against"
    return (
        f"absmax {number(value.absmax)}, {times(value.ratio)} its baseline of "
        f"{number(value.baseline)}"
    )


def number(value: float) -> str:
    """Three digits, or what stands in place of a number."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def times(ratio: float) -> str:
    """A ratio, as a factor."""
    return "-" if math.isnan(ratio) else f"{number(ratio)} times"


def plural(count: int, noun: str) -> str:
    """So many of them."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock(time: float, *, day: bool = False) -> str:
    """A time of day in UTC, to the tenth of a second that matters."""
    moment = datetime.fromtimestamp(time, UTC)
    tenth = f"{moment:%H:%M:%S}.{moment.microsecond // 100_000}"
    return f"{moment:%Y-%m-%d} {tenth} UTC" if day else tenth


def after(seconds: float) -> str:
    """How long after the first bad step."""
    if abs(seconds) < 600:
        return f"{seconds:+.1f} s"
    minutes = abs(seconds) / 60
    long = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"{'-' if seconds < 0 else '+'}{long}"


def named(tensor: Tensor) -> str:
    """A tensor in a sentence."""
    layer, side = tensor
    return f"the {side} of {layer}"


def listed(incident: Incident) -> str:
    """What an incident is about, for a list of them."""
    return named(incident.tensor) if incident.tensor else "no layer: loss, gradient or update"


def _sentences(story: Story) -> Iterator[str]:
    incident, first = story.incident, story.first
    when = f"At step {incident.step}, {clock(story.began, day=True)},"
    if first is None:
        yield f"{when} the run's numbers went bad while no layer broke a rule."
    else:
        ranks = story.recording.ranks
        rank = f" on rank {incident.rank}" if len(ranks) > 1 else ""
        yield f"{when} {named(first.tensor)} was the first to go bad{rank}: {how_far(first)}."
    if incident.verdict:
        yield meaning(incident.verdict)
    elif not incident.noted:
        yield (
            "The journal has no word of it from the trainer: it was found in the records, as not "
            f"finite or above {HARD:g} times the baseline."
        )
    yield from _what_followed(story)
    yield from _what_was_done(story)
    yield from _how_it_ended(story)


def _what_followed(story: Story) -> Iterator[str]:
    tensors = len(story.recording.tensors)
    if story.most > 1:
        soon = ""
        if story.spread == 0:
            soon = ", half of them in the same step"
        elif story.spread is not None:
            soon = f", half of them {plural(story.spread, 'sampled step')} later"
        yield f"Up to {story.most} of {tensors} watched tensors were bad at once{soon}."
    said = [
        f"{name} went from {number(course.before)} to {_largest(course)}"
        for name, course in (
            ("the loss", story.numbers["loss"]),
            ("the gradient's norm", story.numbers["grad_norm"]),
        )
        if _moved(course)
    ]
    if said:
        yield _capital(f"{' and '.join(said)}.")


def _moved(course: Course) -> bool:
    known = not (math.isnan(course.before) or math.isnan(course.largest))
    # A tenth is what a batch differs from another one.
    return known and abs(course.largest - course.before) > 0.1 * abs(course.before)


def _largest(course: Course) -> str:
    return "NaN or Inf" if math.isinf(course.largest) else number(course.largest)


def _what_was_done(story: Story) -> Iterator[str]:
    incident = story.incident
    asked = [n for n in incident.notes if n.kind == "request"]
    for note in asked[:1]:
        seconds = note.number("created_at", note.time) - story.began
        what = {"recover": "a rollback", "checkpoint": "a backup"}
        action = what.get(str(note.fields.get("action")), str(note.fields.get("action")))
        yield f"The alert {note.fields.get('alert')} asked for {action} {seconds:.1f} s later."
    for note in incident.notes:
        if note.kind == "checkpoint" and note.fields.get("kind") in ("emergency", "backup"):
            yield f"The state of step {note.step} was kept as {note.fields.get('name')}."
    if story.rollback is not None:
        fields = story.rollback.fields
        lost = int(story.rollback.number("from_step", 0) - story.rollback.number("resumed_step", 0))
        remedies = "; ".join(map(str, fields.get("remedies") or ()))
        yield (
            f"{after(story.rollback.time - story.began)[1:]} after the first bad step the run was "
            f"back at checkpoint {fields.get('resumed_from')}, {plural(lost, 'step')} earlier"
            + (f", with {remedies}." if remedies else ".")
        )
    elif incident.ending == "rolled back" and story.after is not None:
        yield f"The run was rolled back to step {int(story.recording.step[story.after]) - 1}."
    for note in incident.notes:
        if note.kind in ("refused", "halted"):
            yield f"The guard {note.kind}: {note.fields.get('why')}."


def _how_it_ended(story: Story) -> Iterator[str]:
    loss = story.numbers["loss"]
    back = "" if math.isnan(loss.after) else f"; the loss is {number(loss.after)} there"
    if story.incident.ending == "open":
        yield "The journals end before it does."
    elif story.incident.ending == "passed":
        yield f"It passed by itself{back}."
    elif story.after is None:
        yield "No step after it is in the journals."
    elif not story.clean:
        yield "The very next sampled step was bad again."
    elif story.recovered:
        yield f"The run has recovered: {plural(story.clean, 'clean sampled step')} followed{back}."
    else:
        yield (
            f"{_capital(plural(story.clean, 'clean sampled step'))} followed so far{back}; "
            f"{CLEAN_STEPS} are needed to call it over."
        )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
