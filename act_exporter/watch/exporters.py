"""The table of exporters: a line a rank, those that need somebody first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from act_exporter.watch.depths import STYLES
from act_exporter.watch.page import Page
from act_exporter.watch.source import Reading
from act_exporter.watch.table import Column, head, rest, row
from act_exporter.watch.trail import Trail, sparks
from act_exporter.watch.words import LEVELS, NOTHING, State, duration, number, share, standing

WIDE = 110
"""Columns from which heads are written out and there is room for more pictures."""

_PICTURES = {"act_loss": "loss", "act_grad_norm": "gradient norm"}
_PICTURE_WIDTH = 16


def table(
    readings: Sequence[Reading],
    trail: Trail,
    now: float,
    *,
    width: int,
    most: int,
    ascii_only: bool,
) -> list[Text]:
    """The lines, the head first.

    Args:
        readings: of all exporters.
        trail: what was read since watching began.
        now: monotonic seconds.
        width: columns that there are.
        most: exporters that get a line; of the others one line tells.
        ascii_only: whether the terminal knows no other signs.
    """
    several = len({reading.page.run for reading in readings if reading.page is not None}) > 1
    pictures = _PICTURES if width >= WIDE else {}
    columns = [
        Column("rank", 5, right=False),
        *([Column("run", 12, right=False)] if several else []),
        Column("step", 8),
        Column("steps/s", 7),
        Column("last step", 9),
        Column("loss", 6),
        Column("grad norm", 9),
        Column("lr", 6),
        Column("looking", 7),
        *(Column(title, _PICTURE_WIDTH, right=False) for title in pictures.values()),
    ]
    columns.append(Column("is", rest(columns, width), right=False))
    states = [(reading, standing(reading, now)) for reading in readings]
    states.sort(key=_order)
    lines = [head(columns)]
    for reading, state in states[:most]:
        page = reading.page
        cells = [
            Text("?" if page is None else page.rank),
            *([Text(NOTHING if page is None else page.run)] if several else []),
            *(Text(told) for told in _numbers(reading, now)),
            *(_picture(trail, page, name, ascii_only) for name in pictures),
            Text(state.words, STYLES[state.level]),
        ]
        lines.append(row(columns, cells))
    if more := [state for _, state in states[most:]]:
        well = sum(state.level == "well" for state in more)
        lines.append(Text(f"and {len(more)} more, of which {well} are well", "dim", no_wrap=True))
    return lines


def _order(found: tuple[Reading, State]) -> tuple[int, str, int, str]:
    reading, state = found
    page = reading.page
    urgency = LEVELS.index(state.level)
    if page is None:
        return urgency, "", 0, reading.address
    return urgency, page.run, int(page.rank) if page.rank.isdecimal() else -1, page.rank


def _numbers(reading: Reading, now: float) -> list[str]:
    page = reading.page
    if page is None:
        return [NOTHING] * 7
    return [
        str(page.step),
        number(reading.rate),
        duration(reading.age(now)),
        number(page.value("act_loss")),
        number(page.value("act_grad_norm")),
        number(page.value("act_learning_rate")),
        share(page.value("act_overhead_ratio")),
    ]


def _picture(trail: Trail, page: Page | None, name: str, ascii_only: bool) -> Text:
    if page is None:
        return Text()
    values = trail.of(name, page.run, page.rank, width=_PICTURE_WIDTH)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return Text("".join(sparks(values, low, high, ascii_only)))
