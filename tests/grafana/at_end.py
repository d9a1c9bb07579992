"""Panels of what holds at the end of the range: numbers, tables, points."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tests.grafana.canvas import (
    FAINT,
    GRID,
    PALETTE,
    SMALL,
    TEXT,
    Drawn,
    in_unit,
    log_scale,
    plain,
    swatches,
)
from tests.grafana.tables import rows
from tests.grafana.values import look


def stat(axes: Axes, drawn: Drawn) -> None:
    """Large words and numbers on their colour, one above the other."""
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


def table(axes: Axes, drawn: Drawn) -> None:
    """Rows with a head, as many as have room."""
    axes.axis("off")
    width, height = axes.bbox.width, axes.bbox.height
    axes.set(xlim=(0, width), ylim=(height, 0))
    found = rows(drawn.panel, drawn.answers)
    for by in drawn.panel.raw["options"].get("sortBy", []):
        found.sort(key=lambda row, name=by["displayName"]: row.get(name, ""), reverse=by["desc"])
    names = list(dict.fromkeys(name for row in found for name in row))
    looks = {name: look(drawn.panel, name) for name in names}
    cells = [
        {name: looks[name].text(row[name], drawn.view.end) if name in row else "" for name in names}
        for row in found
    ]
    room = {name: max(len(name), *(len(cell[name]) for cell in cells)) + 3 for name in names}
    scale = width / sum(room.values())
    size = min(SMALL, scale / 0.62 / 1.389)
    left = 0.0
    for name in names:
        wide = room[name] * scale
        axes.text(left + 8, 14, name, va="center", size=size, weight="bold", color=FAINT)
        for place, (row, cell) in enumerate(zip(found, cells, strict=True)):
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


def points(axes: Axes, drawn: Drawn) -> None:
    """A point a row, for each pair of columns."""
    table = rows(drawn.panel, drawn.answers)
    named = []
    for place, pair in enumerate(drawn.panel.raw["options"]["series"]):
        x, y = (pair[axis]["matcher"]["options"] for axis in ("x", "y"))
        both = [(row[x], row[y]) for row in table if x in row and y in row]
        axes.scatter(*zip(*both, strict=True), s=34, color=PALETTE[place], alpha=0.75, linewidths=0)
        named.append((pair["name"]["fixed"], PALETTE[place]))
    swatches(axes, named, thick=7)
    if look(drawn.panel).custom["scaleDistribution"]["type"] == "log":
        log_scale(axes)
    axes.yaxis.set_major_formatter(in_unit(look(drawn.panel), drawn.view.end))
    axes.grid(color=GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)
