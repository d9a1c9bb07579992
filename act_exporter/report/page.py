"""The report as one HTML page that needs nothing else: no script, no font, no picture elsewhere."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from html import escape

from act_exporter.report import words
from act_exporter.report.checkpoints import Saved
from act_exporter.report.incident import Incident
from act_exporter.report.recording import Recording
from act_exporter.report.story import Value
from act_exporter.report.timeline import Event

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and nothing runs, whatever a layer is called."""


Cell = str | tuple[str, str]
"""A table's: a text, or one with another below it."""


def page(title: str, outcome: str, sections: Iterable[str], footer: str) -> str:
    """The whole page.

    Args:
        title: a line.
        outcome: in a few words.
        sections: HTML.
        footer: of what it was made.
    """
    style = importlib.resources.files("act_exporter.report").joinpath("page.css").read_text()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<header>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="outcome">{escape(outcome)}</p>',
            "</header>",
            "<main>",
            *sections,
            "</main>",
            f"<footer><p>{escape(footer)}</p></footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(heading: str, *content: str) -> str:
    """A part of the page, of HTML, under a heading."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *content, "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """A picture with its caption; on a narrow screen it can be scrolled sideways."""
    name = escape(caption.split(".", maxsplit=1)[0])
    return (
        f'<figure><div class="wide" tabindex="0" role="group" aria-label="{name}">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def facts(found: Iterable[tuple[str, str, str]]) -> str:
    """What is read first: a name, a value, and a word on it."""
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{_twofold((value, more))}</dd></div>"
        for name, value, more in found
    )
    return f"<dl>{''.join(cells)}</dl>"


def timeline_table(events: Sequence[Event], began: float) -> str:
    """The timeline; letters are those in the pictures."""
    rows: list[list[Cell]] = [
        [
            event.letter,
            words.after(event.time - began),
            (event.what, event.detail),
            "" if event.step is None else f"{event.step:,}",
            words.clock(event.time),
        ]
        for event in events
    ]
    day = datetime.fromtimestamp(began, UTC)
    names = ["", "from the start", "what", "step", f"UTC, {day:%Y-%m-%d}"]
    return _table("The timeline of the incident", names, rows, numeric={1, 3, 4})


def worst_table(values: Sequence[Value]) -> str:
    """The tensors that went furthest."""
    rows = [
        [
            value.tensor[0],
            value.tensor[1],
            f"{value.step:,}",
            value.nonfinite or words.times(value.ratio),
            words.number(value.absmax),
            words.number(value.baseline),
        ]
        for value in values
    ]
    names = ["layer", "tensor", "worst at step", "against baseline", "absmax", "baseline"]
    return _table("The layers that went furthest", names, rows, numeric={2, 3, 4, 5})


def checkpoint_table(saved: Sequence[Saved], back_to: bool) -> str:
    """The checkpoints, the newest first; `back_to`, whether the run went back to one."""
    rows = [
        [
            one.name,
            f"{one.step:,}",
            one.kind,
            words.clock(one.time),
            one.health,
            f"chosen: {one.why}" if one.chosen else one.why,
        ]
        for one in reversed(saved)
    ]
    why = "why, or why not" if back_to else "why"
    names = ["checkpoint", "step", "kind", "saved, UTC", "health", why]
    marked = {place for place, one in enumerate(reversed(saved)) if one.chosen}
    return _table("The checkpoints", names, rows, numeric={1}, marked=marked)


def incident_table(incidents: Sequence[Incident], recording: Recording, shown: int) -> str:
    """All incidents; `shown` is the number of the one that the page is about."""
    rows = [
        [
            str(number),
            f"{incident.step:,}",
            words.clock(float(recording.time[incident.row]), day=True),
            words.listed(incident),
            incident.verdict or "",
            incident.ending,
        ]
        for number, incident in enumerate(incidents, 1)
    ]
    names = ["incident", "first bad step", "when", "first", "verdict", "how it ended"]
    return _table("The incidents", names, rows, numeric={0, 1}, marked={shown - 1})


def footer(recording: Recording) -> str:
    """Of what the page was made."""
    ranks = recording.ranks
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    parts = [
        f"Made by act-exporter report from {recording.records:,} records of {of},"
        f" {words.clock(float(recording.time[0]), day=True)} to"
        f" {words.clock(float(recording.time[-1]), day=True)}."
    ]
    if recording.skipped:
        skipped = words.plural(recording.skipped, "line")
        parts.append(f"{skipped} skipped: torn by a crash, or no record.")
    if recording.learnt:
        parts.append(
            "The journals have no baselines: they were learnt from the records of healthy steps."
        )
    if math.isnan(recording.numbers["loss"].max(initial=math.nan)) and not any(
        (values == values).any() for values in recording.numbers.values()
    ):
        parts.append("The journals have no loss and no gradient norm.")
    return " ".join(parts)


def _table(
    caption: str,
    names: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    numeric: AbstractSet[int],
    marked: AbstractSet[int] = frozenset(),
) -> str:
    def cells(row: Sequence[Cell]) -> str:
        return "".join(
            f"<td{_number_class(place in numeric)}>{_twofold(cell)}</td>"
            for place, cell in enumerate(row)
        )

    head = "".join(
        f'<th scope="col"{_number_class(place in numeric)}>{escape(name)}</th>'
        if name
        else "<td></td>"
        for place, name in enumerate(names)
    )
    body = "\n".join(
        f"<tr{' class=chosen' if place in marked else ''}>{cells(row)}</tr>"
        for place, row in enumerate(rows)
    )
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f'<caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def _twofold(cell: Cell) -> str:
    text, more = (cell, "") if isinstance(cell, str) else cell
    return escape(text) + (f"<small>{escape(more)}</small>" if more else "")


def _number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""
