"""Pictures of the dashboards:  python -m tests.grafana.pictures [-o docs/images]

Plays the recorded incident (about a minute) and draws each dashboard's panels with matplotlib, in
their places, from its own queries' answers. They are no screenshots: Grafana cannot be installed on
the project's machines.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from deploy.demo.servers import REPOSITORY
from tests.grafana.canvas import FAINT, SMALL, TEXT, TINY, Drawn, Mark
from tests.grafana.dashboards import Dashboard, Panel, load
from tests.grafana.drawing import draw
from tests.grafana.queries import View
from tests.grafana.recorded import RUN, Recording, record
from tests.grafana.values import COLORS

FOLDER = REPOSITORY / "docs" / "images"
CAPTION = (
    "drawn by matplotlib from the dashboard's own queries on a recorded run;"
    " Grafana draws them differently"
)

WIDTH = 1_600
"""Pixels; twice what a README has."""
GAP = 8
COLUMN = (WIDTH - GAP) / 24
ROW = 38
"""Of one unit of a panel's height, as in Grafana, its gap to the next one included."""
TITLE = 30
HEAD = 106
"""For the dashboard's title, the caption, its variables and the names of the marks."""
DOTS = 100
"""An inch."""
CONTEXT_SECONDS = 20.0
"""Of the recording, before the fault and after the rollback."""

# Pixels around the inside of a panel: left, right, below, above.
_MARGINS = {
    "stat": (0, 0, 0, TITLE),
    "table": (8, 8, 8, TITLE),
    "timeseries": (74, 16, 66, TITLE + 8),
    "state-timeline": (24, 16, 56, TITLE + 4),
    "heatmap": (24, 16, 84, TITLE + 4),
    "xychart": (74, 16, 58, TITLE + 8),
}
_SIDE_LEGEND = 0.24
"""Of the panel's width."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="default: docs/images")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, record(Path(work)) as recording:
        for dashboard in load():
            picture(recording, dashboard, folder / f"dashboard-{dashboard.name}.png")


def picture(recording: Recording, dashboard: Dashboard, path: Path) -> None:
    """Draw one dashboard as it is first seen, with collapsed rows as their titles."""
    one = next(variable for variable in dashboard.variables if variable.name == "run")
    chosen: Mapping[str, list[str]] = {} if one.multi else {"run": [RUN]}
    start = max(recording.start, recording.fault - CONTEXT_SECONDS)
    end = min(recording.end, recording.rollback + CONTEXT_SECONDS)
    view = View(recording.url, start, end, dashboard, chosen)
    places = list(_placed(dashboard))
    height = HEAD + max(top + tall for _, top, tall in places) + 2 * GAP
    marks = [
        Mark(begin=begin, end=end, color=COLORS[annotation.raw["iconColor"]], title=title)
        for annotation in dashboard.annotations
        for begin, end, title in view.marks(annotation)
    ]
    with mpl.rc_context({"font.family": "DejaVu Sans", "text.color": TEXT}):
        figure = Figure(figsize=(WIDTH / DOTS, height / DOTS), dpi=DOTS, facecolor="#f4f5f5")
        FigureCanvasAgg(figure)
        _head(figure, height, dashboard, view, marks)
        panels = {panel.id: panel for panel in dashboard.panels}
        for raw, top, tall in places:
            below = height - HEAD - top - tall
            if raw["type"] == "row":
                _row(figure, height, below, raw)
            else:
                box = (
                    raw["gridPos"]["x"] * COLUMN + GAP,
                    below,
                    raw["gridPos"]["w"] * COLUMN - GAP,
                )
                _panel(figure, height, box, tall - GAP, panels[raw["id"]], view, marks)
        figure.savefig(path)
    with Image.open(path) as image:
        # A third of the size: large areas are of few colours, which this method leaves as they are.
        kept = image.convert("RGB").quantize(
            method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        )
    kept.save(path, optimize=True)


def _placed(dashboard: Dashboard) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Rows and panels with the top and the height of each; those of collapsed rows are left out."""
    for raw in dashboard.raw["panels"]:
        place = raw["gridPos"]
        yield raw, _top(dashboard, raw) * ROW, place["h"] * ROW


def _top(dashboard: Dashboard, raw: Mapping[str, Any]) -> float:
    """A collapsed row takes one unit, whatever its panels would take when it is open."""
    top: float = raw["gridPos"]["y"]
    for row in dashboard.raw["panels"]:
        if row["type"] == "row" and row["collapsed"] and row["gridPos"]["y"] < top:
            inside = [panel["gridPos"] for panel in row["panels"]]
            end = max(place["y"] + place["h"] for place in inside)
            if raw["gridPos"]["y"] >= end:
                top -= end - row["gridPos"]["y"] - 1
    return top


def _head(
    figure: Figure, height: float, dashboard: Dashboard, view: View, marks: list[Mark]
) -> None:
    def text(x: float, y: float, said: str, **how: Any) -> None:
        figure.text(x / WIDTH, 1 - y / height, said, va="center", **how)

    text(14, 24, dashboard.title, size=15, weight="bold")
    text(WIDTH - 14, 24, CAPTION, size=SMALL, color=FAINT, ha="right", style="italic")
    text(14, 58, view.choices(), size=SMALL, color=FAINT)
    x = 14.0
    for mark in {mark.title: mark for mark in sorted(marks, key=lambda each: each.begin)}.values():
        text(x, 86, f"┆ {mark.title}", size=TINY, color=mark.color)
        x += len(mark.title) * 6.7 + 26


def _row(figure: Figure, height: float, below: float, raw: Mapping[str, Any]) -> None:
    said = f"▸ {raw['title']}  ({len(raw['panels'])} panels)" if raw["collapsed"] else raw["title"]
    y = (below + ROW / 2) / height
    figure.text(14 / WIDTH, y, said, va="center", size=12, weight="bold")
    if "dcgm" in raw["title"]:
        made_up = "no GPU was here: a static page with made-up values"
        figure.text(1 - 14 / WIDTH, y, made_up, va="center", ha="right", size=SMALL, style="italic")


def _panel(
    figure: Figure,
    height: float,
    box: tuple[float, float, float],
    tall: float,
    panel: Panel,
    view: View,
    marks: list[Mark],
) -> None:
    left, below, wide = box
    background = Rectangle(
        (left / WIDTH, below / height),
        wide / WIDTH,
        tall / height,
        facecolor="white",
        edgecolor="#d8dade",
        linewidth=0.8,
        transform=figure.transFigure,
        zorder=-1,
    )
    figure.add_artist(background)
    title, size = panel.title, min(10.5, wide / len(panel.title) / 1.389 / 0.72)
    at = ((left + 10) / WIDTH, (below + tall - TITLE / 2) / height)
    figure.text(*at, title, va="center", size=size, weight="bold")
    margins = list(_MARGINS[panel.type])
    if panel.raw["options"].get("legend", {}).get("placement") == "right":
        margins[1], margins[2] = _SIDE_LEGEND * wide, 34
    answers = [view.ask(target) for target in panel.targets]
    if panel.type in ("state-timeline", "heatmap"):
        names = [series.name for answer in answers for series in answer]
        margins[0] += 6.6 * max(map(len, names), default=0)
    west, east, south, north = margins
    inside = (
        (left + west) / WIDTH,
        (below + south) / height,
        (wide - west - east) / WIDTH,
        (tall - south - north) / height,
    )
    draw(
        figure.add_axes(inside, facecolor="none"),
        Drawn(panel=panel, view=view, answers=answers, marks=marks),
    )


if __name__ == "__main__":
    main()
