"""Lines of fixed columns: no cell is wider than its place, and no line than the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        width: cells that it has.
        right: whether it stands at its right edge, as numbers do.
    """

    title: str
    width: int
    right: bool = True


def row(columns: Sequence[Column], cells: Sequence[Text]) -> Text:
    """One line, a space between two columns."""
    line = Text(no_wrap=True)
    for column, cell in zip(columns, cells, strict=True):
        own = cell.copy()
        own.truncate(column.width)
        gap = " " * (column.width - own.cell_len)
        line.append(gap if column.right else "").append_text(own)
        line.append("" if column.right else gap).append(" ")
    line.rstrip()
    return line


def head(columns: Sequence[Column]) -> Text:
    """The line of the titles."""
    return row(columns, [Text(column.title, "bold") for column in columns])


def rest(columns: Sequence[Column], width: int) -> int:
    """Cells that are left for one column more."""
    return max(width - sum(column.width + 1 for column in columns), 1)


def last_part(text: str, width: int, ascii_only: bool) -> str:
    """At most `width` cells of a name, from its end: there, names of layers differ."""
    if cell_len(text) <= width:
        return text
    mark = "~" if ascii_only else "…"
    backwards = set_cell_size(text[::-1], max(width - 1, 0))
    return mark + backwards[::-1].strip()
