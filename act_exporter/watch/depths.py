"""The profile over depth as a small chart: a column a tensor, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from act_exporter.watch.page import Layer, Onset
from act_exporter.watch.words import Level, state_of

STYLES: dict[Level, str] = {
    "well": "green",
    "warning": "yellow",
    "bad": "bold red",
    "unknown": "dim",
}
"""Colours; a word or a sign always stands beside them."""

# Growth is seen without colours too.
_UP_TO_BASELINE, _ABOVE, _BROKEN, _FIRST = "░█×▲"  # noqa: RUF001  # a sign, no letter
_ASCII = str.maketrans("░█×▲│", ".#!^|")  # noqa: RUF001  # likewise

# What a settled layer wanders by is not worth a solid cell.
_WANDERS = 2.0

# Powers of ten on the axis, at most: a dead layer must not press all others flat.
_DECADES = 12

# Cells of a column where there are few of them.
_WIDEST = 3

# Powers of ten that even the smallest stands above it.
_ABOVE_AXIS = 0.3

_AXIS = 7  # columns of a label and its line


@dataclass(frozen=True, slots=True)
class _Column:
    """Of the tensors that share a column, the one furthest above its baseline."""

    layer: Layer
    level: Level
    first: bool

    @property
    def peak(self) -> float:
        return self.layer.value("absmax_peak")

    @property
    def baseline(self) -> float:
        return self.layer.value("absmax_baseline")


def chart(
    layers: Sequence[Layer],
    onset: Onset | None,
    *,
    hard: float,
    width: int,
    height: int,
    ascii_only: bool,
) -> list[Text]:
    """Lines from the top: the axis' largest number first, below the axis the first bad layer.

    Args:
        layers: in any order; those without depth or value are left out.
        onset: the layer that is marked.
        hard: times the baseline that a layer may reach.
        width: columns that there are.
        height: rows between the ends of the axis.
        ascii_only: whether the terminal knows no other signs.
    """
    columns = _columns(layers, onset, hard, max(width - _AXIS, 1))
    sizes = [
        size for column in columns for size in (column.peak, column.baseline) if 0 < size < math.inf
    ]
    if not sizes:
        return []
    high = math.ceil(math.log10(max(sizes)))
    low = math.floor(math.log10(min(sizes)) - _ABOVE_AXIS)
    low = min(max(low, high - _DECADES), high - 1)
    scale = height / (high - low)
    each = min(max((width - _AXIS) // len(columns), 1), _WIDEST)
    bar = max(each - 1, 1)  # a gap beside it, where there is room
    lines = []
    for row in reversed(range(height)):
        ends = {height - 1: high, 0: low}
        label = _power(ends[row]) if row in ends else ""
        line = Text(f"{label:>{_AXIS - 1}}│", no_wrap=True)
        for column in columns:
            cell = _cell(column, row, height, low, scale)
            line.append(f"{cell * bar:{each}}", STYLES[column.level])
        line.rstrip()
        lines.append(line)
    lines += _mark(columns, each, width)
    if ascii_only:
        return [_plain(line) for line in lines]
    return lines


def _columns(
    layers: Sequence[Layer], onset: Onset | None, hard: float, width: int
) -> list[_Column]:
    known = [layer for layer in layers if not math.isnan(layer.value("depth"))]
    ordered = sorted(known, key=lambda layer: (layer.value("depth"), layer.name))
    each = max(math.ceil(len(ordered) / width), 1)
    columns = []
    for start in range(0, len(ordered), each):
        group = ordered[start : start + each]
        first = next((layer for layer in group if _is_first(layer, onset)), None)
        shown = first or max(group, key=_height)
        columns.append(_Column(shown, state_of(shown, hard).level, first is not None))
    return columns


def _is_first(layer: Layer, onset: Onset | None) -> bool:
    return onset is not None and (layer.layer, layer.tensor) == (onset.layer, onset.tensor)


def _height(layer: Layer) -> float:
    if layer.row("nonfinite"):
        return math.inf
    return -math.inf if math.isnan(layer.ratio) else layer.ratio


def _cell(column: _Column, row: int, height: int, low: int, scale: float) -> str:
    def rows_of(size: float) -> float:
        return (math.log10(size) - low) * scale if 0 < size < math.inf else 0.0

    if column.layer.row("nonfinite") and row == height - 1:
        return _BROKEN
    top = max(rows_of(column.peak), 1.0)  # what is there is seen
    if math.isnan(column.peak) or row + 0.5 > top:
        return " "
    grown = column.layer.ratio > _WANDERS
    shaded = min(rows_of(column.baseline), top - 1.0) if grown else top
    return _ABOVE if row + 0.5 > shaded else _UP_TO_BASELINE


def _mark(columns: Sequence[_Column], each: int, width: int) -> list[Text]:
    place = next((index for index, column in enumerate(columns) if column.first), None)
    if place is None:
        return []
    words = f"{columns[place].layer.name} was first"
    before = _AXIS + each * place
    if before + 2 + len(words) <= width:
        marked = f"{'':{before}}{_FIRST} {words}"
    else:
        marked = f"{words} {_FIRST}".rjust(before + 1)
    return [Text(marked, STYLES["bad"], no_wrap=True)]


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 <= exponent <= 5 else f"1e{exponent}"


def _plain(line: Text) -> Text:
    plain = line.copy()
    plain.plain = line.plain.translate(_ASCII)
    return plain
