"""The page as HTML: everything that comes from outside is escaped here, and nowhere else."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np

from act_exporter.live.query import SORTS
from act_exporter.live.rows import Row
from act_exporter.live.svg import profile, sparkline
from act_exporter.live.view import ROWS, State, View
from act_exporter.live.words import (
    RULES,
    ago,
    condition,
    consequence,
    happened,
    headline,
    lines,
    named,
    number,
    place,
)

_FOLDER = Path(__file__).parent
_STYLE = (_FOLDER / "page.css").read_text()
_SCRIPT = (_FOLDER / "page.js").read_text()

# Without the script the whole page is loaded again: seldom, since that takes the reader's place.
_RELOAD_SECONDS = 15

# What happened, at most: an incident makes about ten.
_EVENTS = 12

_WORDS: dict[State, tuple[str, str]] = {
    "anomaly": ("✕", "Anomaly"),
    "warning": ("!", "Warning"),
    "waiting": ("…", "Waiting"),
    "well": ("✓", "All well"),
}

_SORTED = {"worst": "the worst first", "depth": "in the order of execution"}


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"style-src 'sha256-{_hash(_STYLE)}'",
        f"script-src 'sha256-{_hash(_SCRIPT)}'",
        "connect-src 'self'",
        "form-action 'self'",
        "img-src data:",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
"""The content security policy: this page's own style and script, and nothing else."""


def page_of(view: View) -> str:
    """The whole page."""
    word = _WORDS[view.state][1]
    reload = (
        ""
        if view.query.hold
        else f'<noscript><meta http-equiv="refresh" content="{_RELOAD_SECONDS}"></noscript>\n'
    )
    body = "\n".join(
        [
            _header(view),
            "<main>",
            _state(view),
            _live("doing", _doing(view)),
            _live("numbers", _numbers(view)),
            _live("depth", _depth(view)),
            _layers(view),
            "</main>",
            _footer(view),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{word}: {escape(named(view.source.run))}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n{reload}<style>{_STYLE}</style>\n</head>\n'
        f"<body{' data-hold' if view.query.hold else ''}>\n{body}\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _live(name: str, inner: str, classes: str = "") -> str:
    """A part that the script puts anew in place of what was."""
    return f'<section id="{name}" data-live class="{classes}">\n{inner}\n</section>'


def _header(view: View) -> str:
    held = (
        f'<a id="hold" href="{escape(view.query.link(hold=False))}">Refresh by itself again</a>'
        if view.query.hold
        else f'<a id="hold" href="{escape(view.query.link(hold=True))}">Hold</a>'
    )
    return (
        f"<header>\n<h1>Run {escape(named(view.source.run))}</h1>\n"
        f'<span>rank {escape(view.source.rank)}</span>\n<span id="generation" data-live>'
        f"generation {view.training.generation}</span>\n"
        f'<span><span id="fresh" data-live>as of {_clock(view.at)} UTC</span> · {held}</span>\n'
        "</header>"
    )


def _state(view: View) -> str:
    sign, word = _WORDS[view.state]
    said = "".join(f"<p>{escape(line)}</p>\n" for line in lines(view))
    return _live(
        "state",
        f'<p class="word" role="status"><span aria-hidden="true">{sign}</span> {word}</p>\n'
        f"<h2>{escape(headline(view))}</h2>\n{said}",
        f"state {view.state}",
    )


def _doing(view: View) -> str:
    """Two lists: what was done, and which conditions hold."""
    told = [(event, happened(event)) for event in reversed(view.events)]
    shown = [(event, text) for event, text in told if text][:_EVENTS]
    events = "".join(
        f"<li><time>{_clock(event.time)}</time> step {event.step:,}: {escape(text)}</li>\n"
        for event, text in shown
    )
    alerts = "".join(
        f"<li><strong>{one.alert.name}</strong> "
        f'<span class="quiet">{escape(consequence(one))}</span><br>'
        f"{escape(condition(view, one))}</li>\n"
        for one in view.holding
    )
    return (
        '<div class="pair">\n<div>\n<h2>What happened, newest first</h2>\n'
        + (f"<ol>\n{events}</ol>" if events else "<p>Nothing since this process began.</p>")
        + f"\n<p>{escape(_recovery(view))}</p>\n</div>\n"
        + "<div>\n<h2>Alert conditions that hold</h2>\n"
        + (f"<ul>\n{alerts}</ul>" if alerts else "<p>None.</p>")
        + "\n</div>\n</div>"
    )


def _recovery(view: View) -> str:
    guard = view.guard
    if guard is None:
        return (
            "No guard in this process: it saves no checkpoints that this page knows of, and is not"
            " rolled back."
        )
    healths = ", ".join(f"{count} {health}" for health, count in guard.healths.items())
    said = f"Checkpoints: {named(healths) or 'none yet'}"
    if guard.last_step is not None and guard.last_success_at is not None:
        age = ago(view.at - guard.last_success_at)
        said += f"; the newest of step {guard.last_step:,.0f}, {age} ago"
    if guard.failures:
        said += f"; {guard.failures:.0f} saves failed"
    said += f". Rollbacks: {guard.rollbacks:.0f}"
    if guard.budget_remaining is not None:
        said += f", {guard.budget_remaining:.0f} left"
    return f"{said}."


def _numbers(view: View) -> str:
    training, steps = view.training, view.steps
    age = ago(view.at - training.finished_at)
    tiles = [
        ("Step", f"{training.step:,}", f"{number(view.rate)} steps/s, last {age} ago"),
    ]
    pictures = [
        ("Loss", "loss", False),
        ("Gradient norm", "grad_norm", True),
        ("Learning rate", "learning_rate", False),
    ]
    cells = [_tile(*tile) for tile in tiles]
    for title, name, log in pictures:
        values = steps.numbers[name]
        now = training.values.get(name, math.nan)
        line = sparkline(
            values,
            steps.generation,
            f"{title} of the last {len(values)} sampled steps: {_span(values)}",
            log=log,
        )
        cells.append(
            f"<div><dt>{title}</dt><dd><strong>{number(now)}</strong>{line}</dd></div>\n"
            if np.isfinite(values).any() or name in training.values
            else _tile(title, "-", "not known")
        )
    overhead = "-" if training.overhead is None else f"{100 * training.overhead:.2f} %"
    most = view.source.max_overhead
    budget = "no budget" if most is None else f"of a budget of {100 * most:g} %"
    cells.append(_tile("Overhead", overhead, f"{budget}, every {training.sample_every}. step"))
    wrong = {stage: count for stage, count in view.source.errors.items() if count}
    which = ", ".join(f"{stage} {count}" for stage, count in wrong.items())
    cells.append(_tile("Errors of the exporter", str(sum(wrong.values())), which or "none"))
    return f'<h2 class="hidden">Numbers of the run</h2>\n<dl>\n{"".join(cells)}</dl>'


def _tile(title: str, value: str, more: str) -> str:
    return (
        f"<div><dt>{title}</dt><dd><strong>{escape(value)}</strong><br>"
        f'<span class="quiet">{escape(more)}</span></dd></div>\n'
    )


def _depth(view: View) -> str:
    title = "<h2>By depth</h2>\n"
    shown = view.profile
    if shown is None:
        return f"{title}<p>There is a profile from the first sampled step on.</p>"
    hard = view.source.thresholds.hard
    first, last = place(view, int(shown.taps[0])), place(view, int(shown.taps[-1]))
    said = [
        f"{len(shown.taps):,} tensors in the order of execution, from {first} to {last}.",
        "A bar goes from the baseline (line) to the largest value of the last minutes;"
        f" dotted: {number(hard)} times the baseline.",
    ]
    if shown.first is not None:
        at = place(view, int(shown.taps[shown.first]))
        said.append(f"First: {at}, number {shown.first + 1:,} of {len(shown.taps):,}.")
    if shown.spike.any():
        top = int(np.flatnonzero(shown.spike)[0])
        said.append(
            f"◆ spikes against the blocks before: {int(shown.spike.sum()):,},"
            f" the first {place(view, int(shown.taps[top]))}."
        )
    if shown.plateau is not None:
        ends = [place(view, int(shown.taps[end])) for end in shown.plateau]
        said.append(f"Shaded: a plateau from {ends[0]} to {ends[1]}.")
    if shown.nonfinite.any():
        said.append(f"✕ NaN or Inf: {int(shown.nonfinite.sum()):,}.")
    words = " ".join(said)
    return (
        f"{title}<figure>{profile(shown, hard, 'Largest absolute value by depth. ' + words)}"
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def _layers(view: View) -> str:
    """The table; the form in it is not put anew, or what is typed would be lost."""
    query = view.query
    options = "".join(
        f'<option value="{sort}"{" selected" * (sort == query.sort)}>{_SORTED[sort]}</option>'
        for sort in SORTS
    )
    hold = '<input type="hidden" name="hold" value="1">' if query.hold else ""
    ranked = view.source.rank == "all"
    columns = [
        "Rules broken",
        "Times baseline",
        "Largest",
        "Baseline",
        "Sigma",
        "Non-finite",
        "Headroom",
    ]
    heads = [*columns, *(["Rank"] if ranked else []), "Last 500 sampled steps"]
    head = "".join(f'<th scope="col">{name}</th>' for name in ["Layer", *heads])
    body = "".join(_row(view, row, ranked) for row in view.rows)
    return (
        '<section id="layers">\n<h2>Layers</h2>\n<form action="/" method="get">\n'
        '<div><label for="find">Name contains</label><input id="find" name="find" maxlength="100"'
        f' value="{escape(query.find)}"></div>\n'
        f'<div><label for="sort">Order</label><select id="sort" name="sort">{options}</select>'
        "</div>\n"
        f'{hold}<button id="show">Show</button>\n</form>\n'
        '<div class="table" id="scroll" role="region" aria-label="Layers" tabindex="0">\n'
        f'<table>\n<caption id="found" data-live>{escape(_found(view))}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n"
        f'<tbody id="rows" data-live>{body}</tbody>\n</table>\n</div>\n'
        f'<nav id="pages" data-live aria-label="Pages of the table">{_pages(view)}</nav>\n'
        "</section>"
    )


def _found(view: View) -> str:
    asked = f" whose name contains “{named(view.query.find)}”" if view.query.find else ""
    if not view.found:
        return f"No tensor{asked}."
    begin = (view.query.page - 1) * ROWS
    return f"{begin + 1:,} to {begin + len(view.rows):,} of {view.found:,} tensors{asked}"


def _row(view: View, row: Row, ranked: bool) -> str:
    name = f"{escape(named(row.layer))} {row.tensor}"
    rules = [f"{RULES[rule]} {count}" for rule, count in row.broken.items()]
    said = " ".join([*(["<strong>first</strong>"] if row.is_first else []), ", ".join(rules)])
    title = f"{named(row.layer)} {row.tensor}: {_span(row.absmax)}"
    line = sparkline(row.absmax, view.steps.generation, title, log=True, level=row.baseline)
    cells = [
        said or "-",
        number(row.ratio),
        number(row.peak),
        number(row.baseline),
        number(row.sigma),
        f"{row.nonfinite:,}",
        number(row.headroom),
        *([number(row.holder)] if ranked else []),
        line,
    ]
    broken = ' class="broken"' if row.is_first or {"hard", "nonfinite"} & row.broken.keys() else ""
    return (
        f'<tr{broken}><th scope="row"><bdi>{name}</bdi></th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>\n"
    )


def _span(values: Iterable[float]) -> str:
    """A line in words."""
    known = np.asarray(list(values), dtype=np.float64)
    finite = known[np.isfinite(known)]
    infinite = int(np.isinf(known).sum())
    said = [f"{number(finite.min())} to {number(finite.max())}"] if finite.size else ["no value"]
    return ", ".join([*said, *([f"not finite in {infinite} steps"] if infinite else [])])


def _pages(view: View) -> str:
    query = view.query
    links = [
        ("first", "First", 1, query.page > 2),
        ("before", "Previous", query.page - 1, query.page > 1),
        ("next", "Next", query.page + 1, query.page < view.pages),
        ("last", "Last", view.pages, query.page < view.pages - 1),
    ]
    shown = [
        f'<a id="{name}" href="{escape(query.link(page=page))}">{text}</a>'
        for name, text, page, there in links
        if there
    ]
    return "\n".join([f"<span>Page {query.page} of {view.pages}</span>", *shown])


def _footer(view: View) -> str:
    return (
        "<footer>\n<p>The conditions are judged by the shipped rules' limits and what the trainer"
        " knows now. Prometheus holds an alert for 6 minutes longer, and it alone judges forecasts,"
        " differences between ranks, and whether messages arrive. Times are UTC.</p>\n"
        '<p><a href="/metrics">/metrics</a></p>\n</footer>'
    )


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))
