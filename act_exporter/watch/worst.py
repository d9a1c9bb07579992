"""The table of layers: the first bad one, then the worst; of several ranks the worst counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from act_exporter.watch.depths import STYLES
from act_exporter.watch.exporters import WIDE
from act_exporter.watch.page import Layer, Page
from act_exporter.watch.table import Column, head, last_part, rest, row
from act_exporter.watch.trail import Trail, sparks
from act_exporter.watch.words import (
    LEVELS,
    State,
    count,
    hard_of,
    level_of,
    number,
    share,
    state_of,
)

# The picture of a ratio reaches from here to the hard rule, in powers: a third of the baseline.
_LOWEST = 1 / 3


@dataclass(frozen=True, slots=True)
class Worst:
    """A tensor as it is in the worst of its ranks.

    Attributes:
        page: that rank's.
        layer: its values there.
        state: what is wrong with it.
        first: whether the present anomaly began there.
    """

    page: Page
    layer: Layer
    state: State
    first: bool

    @property
    def order(self) -> tuple[bool, int, float, float, str]:
        """Sorts the worst one first."""
        ratio = -math.inf if math.isnan(self.layer.ratio) else self.layer.ratio
        serious = self.layer.row("hard", "nonfinite")
        place = LEVELS.index(self.state.level)
        return not self.first, place, -serious, -ratio, self.layer.name


def worst_of(pages: Sequence[Page]) -> list[Worst]:
    """Each tensor once, the first bad one and the worst first."""
    found: dict[tuple[str, str, str], Worst] = {}
    for page in pages:
        onset, hard = page.onset, hard_of(page)
        for (name, tensor), layer in page.layers.items():
            first = onset is not None and (name, tensor) == (onset.layer, onset.tensor)
            own = Worst(page, layer, state_of(layer, hard), first)
            key = page.run, name, tensor
            if key not in found or own.order < found[key].order:
                found[key] = own
    return sorted(found.values(), key=lambda own: own.order)


def table(
    rows: Sequence[Worst], trail: Trail, *, most: int, width: int, ascii_only: bool
) -> list[Text]:
    """The lines, the head first.

    Args:
        rows: as `worst_of` gives them.
        trail: what was read since watching began.
        most: tensors that get a line.
        width: columns that there are.
        ascii_only: whether the terminal knows no other signs.
    """
    ranks = len({own.page.rank for own in rows}) > 1
    runs = len({own.page.run for own in rows}) > 1
    wide = width >= WIDE
    picture = Column("since watching" if wide else "since", 24 if wide else 8, right=False)
    columns = [
        *([Column("rank", 4)] if ranks else []),
        *([Column("run", 12, right=False)] if runs else []),
        Column("x baseline" if wide else "x base", 10 if wide else 6),
        Column("sigma", 6),
        Column("bad in a row" if wide else "row", 12 if wide else 4),
        Column("NaN or Inf" if wide else "NaN", 10 if wide else 5),
        Column("of its dtype" if wide else "dtype", 12 if wide else 6),
        picture,
        Column("is", 10, right=False),
    ]
    name = Column("layers, the worst first", rest(columns, width), right=False)
    lines = [head([name, *columns])]
    for own in rows[:most]:
        layer, style = own.layer, STYLES[own.state.level]
        mark = ("^ " if ascii_only else "▲ ") if own.first else ""
        named = Text(mark, STYLES["bad"]).append(
            last_part(layer.name, name.width - len(mark), ascii_only), "none"
        )
        cells = [
            named,
            *([Text(own.page.rank)] if ranks else []),
            *([Text(own.page.run)] if runs else []),
            Text(number(layer.ratio), style),
            Text(number(layer.sigma)),
            Text(count(layer.row("hard", "nonfinite", "sigma"))),
            Text(count(layer.nonfinite)),
            Text(share(layer.value("headroom_ratio"))),
            _picture(own, trail, picture.width, ascii_only),
            Text(own.state.words, style),
        ]
        lines.append(row([name, *columns], cells))
    return lines


def _picture(own: Worst, trail: Trail, width: int, ascii_only: bool) -> Text:
    hard = hard_of(own.page)
    values = trail.of(own.page.run, own.layer.layer, own.layer.tensor, width=width)
    powers = [math.log(max(value, _LOWEST)) if value == value else value for value in values]
    picture = Text()
    for value, sign in zip(
        values, sparks(powers, math.log(_LOWEST), math.log(hard), ascii_only), strict=True
    ):
        picture.append(sign, STYLES[level_of(value, hard)])
    return picture
