"""The table of tensors as HTML, with its form and its pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np

from act_exporter.live.query import SORTS
from act_exporter.live.rows import Row
from act_exporter.live.svg import sparkline
from act_exporter.live.view import ROWS, View
from act_exporter.live.words import RULES, named, number

# A share of a format's largest number that is nothing to look at.
_NO_HEADROOM_NEEDED = 0.001

_SORTED = {"worst": "the worst first", "depth": "in the order of execution"}


def layers_of(view: View) -> str:
    """The table; the form in it is not put anew, or what is typed would be lost."""
    query = view.query
    options = "".join(
        f'<option value="{sort}"{" selected" * (sort == query.sort)}>{_SORTED[sort]}</option>'
        for sort in SORTS
    )
    hold = '<input type="hidden" name="hold" value="1">' if query.hold else ""
    ranked = view.source.rank == "all"
    columns = [
        "Times baseline",
        "Rules broken",
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
    title = f"{named(row.layer)} {row.tensor}: {span(row.absmax)}"
    line = sparkline(row.absmax, view.steps.generation, title, log=True, level=row.baseline)
    cells = [
        number(row.ratio),
        said or "-",
        number(row.peak),
        number(row.baseline),
        number(row.sigma),
        f"{row.nonfinite:,}",
        "&lt; 0.001" if row.headroom < _NO_HEADROOM_NEEDED else number(row.headroom),
        *([number(row.holder)] if ranked else []),
        line,
    ]
    broken = ' class="broken"' if row.is_first or {"hard", "nonfinite"} & row.broken.keys() else ""
    return (
        f'<tr{broken}><th scope="row"><bdi>{name}</bdi></th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>\n"
    )


def span(values: Iterable[float]) -> str:
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
