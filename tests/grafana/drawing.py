"""A panel's inside, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes

from tests.grafana.at_end import points, stat, table
from tests.grafana.canvas import FAINT, SMALL, Drawn
from tests.grafana.over_time import heatmap, state_timeline, timeseries

_KINDS: dict[str, Callable[[Axes, Drawn], None]] = {
    "heatmap": heatmap,
    "stat": stat,
    "state-timeline": state_timeline,
    "table": table,
    "timeseries": timeseries,
    "xychart": points,
}


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
