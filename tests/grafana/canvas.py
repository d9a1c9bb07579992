"""What all panels are drawn on and with: axes, their scales, swatches below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from tests.grafana.dashboards import Panel
from tests.grafana.queries import Series, View
from tests.grafana.values import Look

PALETTE = [
    *("#56a64b", "#e0b400", "#3274d9", "#ff780a", "#e02f44"),
    *("#8f3bb8", "#1f9e9e", "#b0721e", "#6d1f62", "#7c8b99"),
]
"""Of lines whose colour is not chosen, in turn."""

TEXT, FAINT, GRID = "#24292e", "#6e7378", "#e9ebee"
SMALL, TINY = 9.5, 8.0
"""Points of text at the 100 pixels an inch that pictures have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An annotation: from, to, its colour and its title."""

    begin: float
    end: float
    color: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What a panel is drawn from; answers are of its queries, in their order."""

    panel: Panel
    view: View
    answers: Sequence[Sequence[Series]]
    marks: Sequence[Mark]

    @property
    def series(self) -> list[Series]:
        """Of all queries."""
        return [series for answer in self.answers for series in answer]


def time_axis(axes: Axes, drawn: Drawn) -> None:
    """Time to the right, over all of the range, with the annotations on it."""
    start, end = drawn.view.start, drawn.view.end
    axes.set_xlim(start, end)
    ticks = max(3, round(axes.bbox.width / 130))
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 3, 5, 6, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}")
    )
    for mark in drawn.marks:
        axes.axvline(mark.begin, color=mark.color, linewidth=1, linestyle=(0, (3, 3)), alpha=0.9)
        # As long as it lasts a bar at the bottom, where Grafana has it too.
        axes.axvspan(mark.begin, mark.end, 0, 0.015, color=mark.color, alpha=0.5, linewidth=0)
    plain(axes)


def swatches(
    axes: Axes, named: Sequence[tuple[str, str]], *, thick: float = 2.5, below: float = 46
) -> None:
    """Names beside their colours, under the axes, as many as have room in two lines.

    Args:
        axes: above them.
        named: name and colour of each.
        thick: points of a swatch.
        below: pixels from the axes to the first line.
    """
    width, height = axes.bbox.width, axes.bbox.height
    x, y = 0.0, -below / height
    second = y - 18 / height
    for number, (name, color) in enumerate(named):
        need = (len(name) * 6.3 + 34) / width
        more = 70 / width if y == second and number < len(named) - 1 else 0
        if x and x + need + more > 1:
            if y == second:
                rest = f"+ {len(named) - number} more"
                axes.text(x, y, rest, transform=axes.transAxes, size=TINY, color=FAINT)
                return
            x, y = 0.0, second
        swatch(axes, x, y, color, thick)
        axes.text(x + 19 / width, y, name, transform=axes.transAxes, size=TINY, color=TEXT)
        x += need


def swatch(axes: Axes, x: float, y: float, color: str, thick: float = 2.5) -> None:
    """A piece of a line, beside a name at (`x`, `y`) of the axes' own measure."""
    middle = y + 5 / axes.bbox.height
    axes.plot(
        [x, x + 14 / axes.bbox.width],
        [middle, middle],
        color=color,
        linewidth=thick,
        transform=axes.transAxes,
        clip_on=False,
        solid_capstyle="butt",
    )


def log_scale(axes: Axes) -> None:
    """Upwards by powers of ten."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Within a decade or so its powers alone would be a tick or none.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 30 * low else (1.0,)))
    axes.yaxis.set_minor_locator(FixedLocator([]))


def in_unit(own: Look, now: float) -> FuncFormatter:
    """Of ticks, as Grafana writes their values."""
    return FuncFormatter(lambda value, _: own.text(float(value), now))


def plain(axes: Axes) -> None:
    """Without frame and ticks."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(labelsize=TINY, length=0, colors=FAINT)
