"""Tables of fixed columns: no cell is wider than its place, and no line than the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

WIDE = 110
"""Columns of a terminal from which heads are written out and there is room for more pictures."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column.

    Attributes:
        title: its head.
        width: cells that it has; 0 for those that are left over.
        cell: what stands in it, from a row and the cells that there are.
        right: whether it stands at its right edge, as numbers do.
        spare: in a narrow terminal columns are left out, those with the largest number first; 0
            for one that stays.
    """

    title: str
    width: int
    cell: Callable[[T, int], Text]
    right: bool = True
    spare: int = 0


def lines_of(columns: Sequence[Column[T]], rows: Sequence[T], width: int, least: int) -> list[Text]:
    """The head and a line a row, at most `width` cells each.

    Args:
        columns: one of them with a width of 0.
        rows: what the columns' cells are made of.
        width: cells that there are.
        least: cells for the column of what is left over, for which others are left out.
    """
    kept = list(columns)
    while _left(kept, width) < least and (spare := max(kept, key=lambda own: own.spare)).spare:
        kept.remove(spare)
    widths = [column.width or max(_left(kept, width), 1) for column in kept]
    lines = [_line(kept, widths, [Text(column.title, "bold") for column in kept])]
    for row in rows:
        cells = [column.cell(row, own) for column, own in zip(kept, widths, strict=True)]
        lines.append(_line(kept, widths, cells))
    return lines


def last_part(text: str, width: int, ascii_only: bool) -> str:
    """At most `width` cells of a name, from its end: there, names of layers differ."""
    if cell_len(text) <= width:
        return text
    backwards = set_cell_size(text[::-1], max(width - 1, 0)).rstrip()
    return ("~" if ascii_only else "…") + backwards[::-1]


def _left(columns: Sequence[Column[T]], width: int) -> int:
    return width - sum(column.width + 1 for column in columns if column.width)


def _line(columns: Sequence[Column[T]], widths: Sequence[int], cells: Sequence[Text]) -> Text:
    line = Text(no_wrap=True)
    for column, width, cell in zip(columns, widths, cells, strict=True):
        cell.truncate(width)
        gap = " " * (width - cell.cell_len)
        if column.right:
            line.append(gap).append_text(cell)
        else:
            line.append_text(cell).append(gap)
        line.append(" ")
    line.rstrip()
    return line
