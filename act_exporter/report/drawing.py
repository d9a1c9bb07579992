"""Figures on a page, whose ink they take on, and in a file."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure, SubFigure

from act_exporter.report.pictures import AFTER, AT, BAD, BEFORE, FAINT, INK, NONFINITE

_WIDTH = 10.5  # inches

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    # Names of layers may have dollars.
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "path",
}

_PAGE = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    BAD: "var(--bad)",
    BEFORE: "var(--before)",
    AT: "var(--at)",
    AFTER: "var(--after)",
    NONFINITE: "var(--nonfinite)",
}
"""What a page has in place of colours: see page.css."""

Draw = Callable[[Figure | SubFigure], None]
"""Draws one picture into a figure."""


def svg(draw: Draw, *, name: str, height: float, alternative: str) -> str:
    """A picture as an element of a page.

    Args:
        draw: draws it.
        name: of no other picture of the page.
        height: inches.
        alternative: what it shows, in words, for those who do not see it; safe in HTML.
    """
    written = io.StringIO()
    with _styled(), mpl.rc_context({"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    element = written.getvalue()
    element = element[element.index("<svg") :]
    # Its own style would be the whole page's.
    element = re.sub(r"<style.*?</style>", "", element, flags=re.DOTALL)
    for pattern in (r'(\bid=")', r'(href="#)', r"(url\(#)"):
        element = re.sub(pattern, rf"\1{name}-", element)
    for colour, own in _PAGE.items():
        element = element.replace(colour, own)
    return element.replace("<svg ", f'<svg role="img" aria-label="{alternative}" ', 1)


def png(file: Path, title: str, text: str, pictures: Sequence[tuple[Draw, float]]) -> None:
    """One picture of all, on white, with a title and a paragraph above.

    Args:
        file: where to.
        title: a line.
        text: a paragraph.
        pictures: what draws each, and its height in inches.

    Raises:
        OSError: it could not be written.
    """
    lines = textwrap.wrap(text, 125)
    head = 0.65 + 0.19 * len(lines)
    heights = [head, *(height for _, height in pictures)]
    with _styled():
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        top = parts[0]
        top.text(0.01, 1 - 0.15 / head, title, va="top", fontsize=13, fontweight="bold")
        top.text(0.01, 1 - 0.5 / head, "\n".join(lines), va="top", fontsize=9.5, linespacing=1.35)
        for part, (draw, _) in zip(parts[1:], pictures, strict=True):
            draw(part)
        figure.savefig(file, format="png", dpi=110)


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # A layer's name may have letters that no font at hand has.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
