"""Panels drawn by matplotlib: a function for each kind, on axes that are the panel's inside."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from tests.grafana.dashboards import Panel
from tests.grafana.queries import Series, View
from tests.grafana.tables import rows
from tests.grafana.values import COLORS, Look, look

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


def draw(axes: Axes, drawn: Drawn) -> None:
    """Draw one panel's inside; a panel without data says so, as Grafana does.

    Raises:
        KeyError: the panel is of a kind that is not drawn.
    """
    kind = _KINDS[drawn.panel.type]
    if drawn.series or drawn.panel.type == "stat":
        kind(axes, drawn)
    else:
        axes.axis("off")
        none = drawn.panel.raw["fieldConfig"]["defaults"].get("noValue", "No data")
        axes.text(0.5, 0.5, none, ha="center", va="center", color=FAINT, fontsize=SMALL)


def _stat(axes: Axes, drawn: Drawn) -> None:
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    shown = drawn.series or [None]
    mode = drawn.panel.raw["options"]["textMode"]
    height = 1 / len(shown)
    for place, series in enumerate(shown):
        own = look(drawn.panel, series.name if series else "")
        value = series.values[-1] if series else None
        middle = 1 - (place + 0.5) * height
        color = own.background(value)
        axes.axhspan(middle - height / 2 + 0.01, middle + height / 2 - 0.01, color=color)
        none = drawn.panel.raw["fieldConfig"]["defaults"]["noValue"]
        said = none if value is None else own.text(value, drawn.view.end)
        lines = {"value": [said], "name": [series.name if series else none]}.get(
            mode, [series.name, said] if series else [said]
        )
        for number, line in enumerate(lines):
            above = ((len(lines) - 1) / 2 - number) * height * 0.42
            large = number == len(lines) - 1
            room = axes.bbox.width / max(len(line), 1) / 1.389 / 0.62
            size = min(room, axes.bbox.height * height / 1.389 * (0.36 if large else 0.24), 24)
            weight = "bold" if large else "normal"
            position = (0.5, middle + above)
            axes.text(
                *position, line, ha="center", va="center", color="white", size=size, weight=weight
            )


def _timeseries(axes: Axes, drawn: Drawn) -> None:
    defaults = look(drawn.panel)
    _time_axis(axes, drawn)
    log = defaults.custom.get("scaleDistribution", {}).get("type") == "log"
    legend = []
    by_name: dict[str, Series] = {}
    for place, series in enumerate(drawn.series):
        own = look(drawn.panel, series.name)
        by_name[series.name] = series
        color = own.color or PALETTE[place % len(PALETTE)]
        times, values = _with_gaps(series, drawn.view.interval, positive=log)
        width = own.custom["lineWidth"]
        dashed = own.custom.get("lineStyle", {}).get("fill") == "dash"
        style = (0, (4, 3)) if dashed else "solid"
        axes.plot(times, values, color=color, linewidth=1.3 * width, linestyle=style)
        lonely = _lonely(values)
        axes.plot([times[at] for at in lonely], [values[at] for at in lonely], ".", color=color)
        if own.custom.get("fillBelowTo") in by_name:
            low = by_name[own.custom["fillBelowTo"]]
            floors = dict(zip(low.times, low.values, strict=True))
            floor = [floors.get(at, math.nan) for at in times]
            axes.fill_between(times, floor, values, color=color, alpha=0.18, linewidth=0)
        if width or "fillBelowTo" in own.custom:
            legend.append((series, color, bool(width)))
    if log:
        _log_scale(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _linear_limits(axes, [value for series in drawn.series for value in series.values])
        soft = defaults.custom.get("axisSoftMax")
        if soft is not None:
            axes.set_ylim(top=max(axes.get_ylim()[1], soft))
    axes.yaxis.set_major_formatter(_in_unit(defaults, drawn.view.end))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    if defaults.custom.get("thresholdsStyle", {}).get("mode") == "dashed+area":
        _thresholds(axes, defaults)
    _legend(axes, drawn, legend)


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Within a decade or so its powers alone would be a tick or none.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 30 * low else (1.0,)))
    axes.yaxis.set_minor_locator(FixedLocator([]))


def _linear_limits(axes: Axes, values: Sequence[float]) -> None:
    """From 0, unless all values are far from it; what hardly changes must look like it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) < 0:
        return
    low, high = min(finite), max(finite)
    if low < 0.6 * high or high - low < 0.05 * high or not high:
        axes.set_ylim(0, high * 1.08 or 1)


def _thresholds(axes: Axes, defaults: Look) -> None:
    """Lines and areas, which leave the scale to the values."""
    low, high = axes.get_ylim()
    ends = [least for least, _ in defaults.steps[1:]] + [math.inf]
    for (least, color), end in zip(defaults.steps, ends, strict=True):
        bottom, top = max(least, low), min(end, high)
        if COLORS[color] == "none" or bottom >= top:
            continue
        axes.axhspan(bottom, top, color=COLORS[color], alpha=0.09, linewidth=0)
        border = least if math.isfinite(least) else end
        axes.axhline(border, color=COLORS[color], linewidth=1, linestyle=(0, (6, 4)))
    axes.set_ylim(low, high)


def _legend(axes: Axes, drawn: Drawn, shown: list[tuple[Series, str, bool]]) -> None:
    """Below, as many as have room in two lines; or beside it, with last and largest values."""
    options = drawn.panel.raw["options"]["legend"]
    width, height = axes.bbox.width, axes.bbox.height
    if options["placement"] == "right":
        shown = sorted(shown, key=lambda each: -max(each[0].values))
        axes.text(
            1.235, 1.0, "Last *", transform=axes.transAxes, ha="right", size=TINY, color=FAINT
        )
        axes.text(1.29, 1.0, "Max", transform=axes.transAxes, ha="right", size=TINY, color=FAINT)
        for place, (series, color, _) in enumerate(shown):
            y = 1 - (place + 1) * 19 / height
            own = look(drawn.panel, series.name)
            axes.plot(
                [1.015, 1.027], [y + 6 / height] * 2, color=color, linewidth=3, **_outside(axes)
            )
            axes.text(1.033, y, series.name, transform=axes.transAxes, size=TINY, color=TEXT)
            for x, value in ((1.235, series.values[-1]), (1.29, max(series.values))):
                said = own.text(value, drawn.view.end)
                axes.text(x, y, said, transform=axes.transAxes, ha="right", size=TINY, color=TEXT)
        return
    x, y = 0.0, -(30 + 16) / height
    for number, (series, color, line) in enumerate(shown):
        need = (len(series.name) * 6.3 + 34) / width
        last_line = y < -(30 + 30) / height
        if x and x + need + (70 / width if last_line and number < len(shown) - 1 else 0) > 1:
            if last_line:
                rest = f"+ {len(shown) - number} more"
                axes.text(x, y, rest, transform=axes.transAxes, size=TINY, color=FAINT)
                return
            x, y = 0.0, y - 18 / height
        ends = [x, x + 14 / width]
        thick = 2.5 if line else 6
        axes.plot(ends, [y + 5 / height] * 2, color=color, linewidth=thick, **_outside(axes))
        name = series.name
        axes.text(x + 19 / width, y, name, transform=axes.transAxes, size=TINY, color=TEXT)
        x += need


def _outside(axes: Axes) -> dict[str, Any]:
    return {"transform": axes.transAxes, "clip_on": False, "solid_capstyle": "butt"}


def _state_timeline(axes: Axes, drawn: Drawn) -> None:
    _time_axis(axes, drawn)
    step = drawn.view.interval
    names = [series.name for series in drawn.series]
    for place, series in enumerate(drawn.series):
        own = look(drawn.panel, series.name)
        for at, value in zip(series.times, series.values, strict=True):
            color = own.background(value)
            axes.broken_barh([(at, step)], (place - 0.36, 0.72), facecolors=color, linewidth=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=TINY)
    colors = dict.fromkeys(
        (word["text"], word["color"]) for word in look(drawn.panel).words.values()
    )
    x, height = 0.0, axes.bbox.height
    for said, color in colors:
        y = -46 / height
        ends = [x, x + 12 / axes.bbox.width]
        axes.plot(ends, [y + 5 / height] * 2, color=COLORS[color], linewidth=7, **_outside(axes))
        start = x + 17 / axes.bbox.width
        axes.text(start, y, said, transform=axes.transAxes, size=TINY, color=TEXT)
        x += (len(said) * 7 + 40) / axes.bbox.width


def _heatmap(axes: Axes, drawn: Drawn) -> None:
    _time_axis(axes, drawn)
    options = drawn.panel.raw["options"]
    ordered = sorted(
        drawn.series, key=lambda each: [int(n) for n in re.findall(r"^\d+", each.name)] + [0]
    )
    step = drawn.view.interval
    cells, values = [], []
    for place, series in enumerate(ordered):
        for at, value in zip(series.times, series.values, strict=True):
            left, right = at - step / 2, at + step / 2
            cells.append([(left, place), (right, place), (right, place + 1), (left, place + 1)])
            values.append(value)
    colors = options["color"]
    # Grafana turns the schemes with two ends round: blue is low.
    scheme = colors["scheme"] + ("_r" if colors["scheme"].startswith("Rd") else "")
    mesh = PolyCollection(cells, array=values, cmap=scheme, linewidths=0, antialiased=False)
    mesh.set_clim(colors["min"], colors["max"])
    axes.add_collection(mesh)
    upside_down = options["yAxis"]["reverse"]
    axes.set_ylim((len(ordered), 0) if upside_down else (0, len(ordered)))
    ticks = [place + 0.5 for place in range(len(ordered))]
    axes.set_yticks(ticks, [series.name for series in ordered], fontsize=TINY)
    inside = axes.inset_axes((0.0, -62 / axes.bbox.height, 0.22, 10 / axes.bbox.height))
    bar = axes.figure.colorbar(mesh, cax=inside, orientation="horizontal")
    bar.outline.set_visible(False)
    inside.tick_params(labelsize=TINY, length=2, color=FAINT, labelcolor=FAINT)


def _xychart(axes: Axes, drawn: Drawn) -> None:
    table = rows(drawn.panel, drawn.answers)
    width, height = axes.bbox.width, axes.bbox.height
    at = 0.0
    for place, pair in enumerate(drawn.panel.raw["options"]["series"]):
        x, y = (pair[axis]["matcher"]["options"] for axis in ("x", "y"))
        both = [(row[x], row[y]) for row in table if x in row and y in row]
        color = PALETTE[place]
        axes.scatter(*zip(*both, strict=True), s=34, color=color, alpha=0.75, linewidths=0)
        name, below = pair["name"]["fixed"], -50 / height
        ends = [at, at + 12 / width]
        axes.plot(ends, [below + 5 / height] * 2, color=color, linewidth=7, **_outside(axes))
        axes.text(at + 17 / width, below, name, transform=axes.transAxes, size=TINY, color=TEXT)
        at += (len(name) * 7 + 40) / width
    if look(drawn.panel).custom["scaleDistribution"]["type"] == "log":
        _log_scale(axes)
    axes.yaxis.set_major_formatter(_in_unit(look(drawn.panel), drawn.view.end))
    axes.grid(color=GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)


def _table(axes: Axes, drawn: Drawn) -> None:
    axes.axis("off")
    width, height = axes.bbox.width, axes.bbox.height
    axes.set(xlim=(0, width), ylim=(height, 0))
    table = rows(drawn.panel, drawn.answers)
    for by in drawn.panel.raw["options"].get("sortBy", []):
        table.sort(key=lambda row, name=by["displayName"]: row.get(name, ""), reverse=by["desc"])
    names = list(dict.fromkeys(name for row in table for name in row))
    looks = {name: look(drawn.panel, name) for name in names}
    cells = [
        {name: looks[name].text(row[name], drawn.view.end) if name in row else "" for name in names}
        for row in table
    ]
    room = {name: max(len(name), *(len(cell[name]) for cell in cells)) + 3 for name in names}
    scale = width / sum(room.values())
    size = min(SMALL, scale / 0.62 / 1.389)
    left = 0.0
    for name in names:
        wide = room[name] * scale
        axes.text(left + 8, 14, name, va="center", size=size, weight="bold", color=FAINT)
        for place, (row, cell) in enumerate(zip(table, cells, strict=True)):
            top = 28 + place * 27
            if top + 27 > height:
                break
            value = row.get(name)
            filled = looks[name].custom["cellOptions"]["type"] == "color-background"
            color = looks[name].background(value) if filled and isinstance(value, float) else "none"
            axes.fill_between([left, left + wide], top + 1, top + 26, color=color, linewidth=0)
            ink = TEXT if color == "none" else "white"
            axes.text(left + 8, top + 14, cell[name], va="center", size=size, color=ink)
        left += wide


def _time_axis(axes: Axes, drawn: Drawn) -> None:
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
    _plain(axes)


def _plain(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(labelsize=TINY, length=0, colors=FAINT)


def _in_unit(own: Look, now: float) -> FuncFormatter:
    return FuncFormatter(lambda value, _: own.text(float(value), now))


def _with_gaps(series: Series, step: float, *, positive: bool) -> tuple[list[float], list[float]]:
    """Times and values, with a NaN where samples are missing; a log scale has no place for 0."""
    times: list[float] = []
    values: list[float] = []
    for at, value in zip(series.times, series.values, strict=True):
        if times and at - times[-1] > 1.5 * step:
            times.append(at - step)
            values.append(math.nan)
        times.append(at)
        values.append(value if value > 0 or not positive else math.nan)
    return times, values


def _lonely(values: Sequence[float]) -> list[int]:
    """Places of values without a neighbour, of which no line would tell."""
    known = [False, *map(math.isfinite, values), False]
    return [
        at for at in range(len(values)) if known[at + 1] and not known[at] and not known[at + 2]
    ]


_KINDS: dict[str, Callable[[Axes, Drawn], None]] = {
    "heatmap": _heatmap,
    "stat": _stat,
    "state-timeline": _state_timeline,
    "table": _table,
    "timeseries": _timeseries,
    "xychart": _xychart,
}
