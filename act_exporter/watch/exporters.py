"""The table of exporters: a line a rank, those that need somebody first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from act_exporter.watch.depths import STYLES
from act_exporter.watch.page import Page
from act_exporter.watch.source import Reading
from act_exporter.watch.table import WIDE, Column, lines_of
from act_exporter.watch.trail import Trail, sparks
from act_exporter.watch.words import LEVELS, NOTHING, State, duration, number, share, standing


@dataclass(frozen=True, slots=True)
class _Row:
    reading: Reading
    state: State

    @property
    def said(self) -> str:
        # Where there is no rank to know it by.
        where = f" {self.reading.address}" if self.reading.page is None else ""
        return f"{self.state.words}{where}"

    @property
    def order(self) -> tuple[int, str, int, str]:
        page = self.reading.page
        urgency = LEVELS.index(self.state.level)
        if page is None:
            return urgency, "", -1, self.reading.address
        return urgency, page.run, int(page.rank) if page.rank.isdecimal() else -1, page.rank


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

    def picture(name: str) -> Callable[[_Row, int], Text]:
        return lambda row, cells: _picture(trail, row.reading.page, name, cells, ascii_only)

    columns = [
        Column("rank", 5, _of_page(lambda page: page.rank), right=False),
        *([Column("run", 12, _of_page(lambda page: page.run), right=False)] if several else []),
        Column("step", 8, _of_page(lambda page: str(page.step))),
        Column("steps/s", 7, lambda row, _: Text(number(row.reading.rate)), spare=1),
        Column("last step", 9, lambda row, _: Text(duration(row.reading.age(now)))),
        Column("loss", 6, _value("act_loss", number)),
        Column("grad norm", 9, _value("act_grad_norm", number), spare=2),
        Column("lr", 6, _value("act_learning_rate", number), spare=4),
        Column("looking", 7, _value("act_overhead_ratio", share), spare=3),
    ]
    if width >= WIDE:
        columns += [
            Column("loss so far", 14, picture("act_loss"), right=False),
            Column("norm so far", 14, picture("act_grad_norm"), right=False),
        ]
    columns.append(
        Column("is", 0, lambda row, _: Text(row.said, STYLES[row.state.level]), right=False)
    )
    rows = sorted(
        (_Row(reading, standing(reading, now)) for reading in readings), key=lambda row: row.order
    )
    lines = lines_of(columns, rows[:most], width, least=14)
    if more := rows[most:]:
        well = sum(row.state.level == "well" for row in more)
        lines.append(Text(f"and {len(more)} more, of which {well} are well", "dim", no_wrap=True))
    return lines


def _of_page(told: Callable[[Page], str]) -> Callable[[_Row, int], Text]:
    def cell(row: _Row, _: int) -> Text:
        page = row.reading.page
        return Text(NOTHING if page is None else told(page))

    return cell


def _value(name: str, told: Callable[[float], str]) -> Callable[[_Row, int], Text]:
    return _of_page(lambda page: told(page.value(name)))


def _picture(trail: Trail, page: Page | None, name: str, width: int, ascii_only: bool) -> Text:
    if page is None:
        return Text()
    values = trail.of(name, page.run, page.rank, width=width)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return Text("".join(sparks(values, low, high, ascii_only)))
