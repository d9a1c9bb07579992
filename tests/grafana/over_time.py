"""Panels with time to the right: lines, bars, coloured cells."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from tests.grafana.canvas import (
    FAINT,
    GRID,
    PALETTE,
    TEXT,
    TINY,
    Drawn,
    in_unit,
    log_scale,
    swatch,
    swatches,
    time_axis,
)
from tests.grafana.queries import Series
from tests.grafana.values import COLORS, Look, look


def timeseries(axes: Axes, drawn: Drawn) -> None:
    """Lines, bands between two of them, thresholds."""
    defaults = look(drawn.panel)
    time_axis(axes, drawn)
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
            legend.append((series, color))
    if log:
        log_scale(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _linear_limits(axes, [value for series in drawn.series for value in series.values])
        soft = defaults.custom.get("axisSoftMax")
        if soft is not None:
            axes.set_ylim(top=max(axes.get_ylim()[1], soft))
    axes.yaxis.set_major_formatter(in_unit(defaults, drawn.view.end))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    if defaults.custom.get("thresholdsStyle", {}).get("mode") == "dashed+area":
        _thresholds(axes, defaults)
    _legend(axes, drawn, legend)


def state_timeline(axes: Axes, drawn: Drawn) -> None:
    """Bars, a row a series."""
    time_axis(axes, drawn)
    step = drawn.view.interval
    names = [series.name for series in drawn.series]
    for place, series in enumerate(drawn.series):
        own = look(drawn.panel, series.name)
        for at, value in zip(series.times, series.values, strict=True):
            color = own.background(value)
            axes.broken_barh([(at, step)], (place - 0.36, 0.72), facecolors=color, linewidth=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=TINY)
    words = look(drawn.panel).words.values()
    named = dict.fromkeys((word["text"], COLORS[word["color"]]) for word in words)
    swatches(axes, list(named), thick=7)


def heatmap(axes: Axes, drawn: Drawn) -> None:
    """Coloured cells, a row a series, in the order of the numbers that names begin with."""
    time_axis(axes, drawn)
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


def _linear_limits(axes: Axes, values: Sequence[float]) -> None:
    """From 0, unless all values are far from it; what hardly changes must look like it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) < 0:
        return
    low, high = min(finite), max(finite)
    if low < 0.75 * high or high - low < 0.05 * high or not high:
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


def _legend(axes: Axes, drawn: Drawn, shown: list[tuple[Series, str]]) -> None:
    """Below, or beside with each line's last and largest value, the largest on top."""
    if drawn.panel.raw["options"]["legend"]["placement"] != "right":
        swatches(axes, [(series.name, color) for series, color in shown])
        return
    height = axes.bbox.height
    columns = {"Last *": 1.235, "Max": 1.29}
    for name, x in columns.items():
        axes.text(x, 1, name, transform=axes.transAxes, ha="right", size=TINY, color=FAINT)
    for place, (series, color) in enumerate(sorted(shown, key=lambda each: -max(each[0].values))):
        y = 1 - (place + 1) * 19 / height
        swatch(axes, 1.015, y, color)
        axes.text(1.033, y, series.name, transform=axes.transAxes, size=TINY, color=TEXT)
        for x, value in zip(columns.values(), (series.values[-1], max(series.values)), strict=True):
            said = look(drawn.panel, series.name).text(value, drawn.view.end)
            axes.text(x, y, said, transform=axes.transAxes, ha="right", size=TINY, color=TEXT)


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
