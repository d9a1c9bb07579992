"""The table of layers: the first bad one, then the worst; of several ranks the worst counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from act_exporter.watch.depths import STYLES
from act_exporter.watch.page import Layer, Page
from act_exporter.watch.table import WIDE, Column, last_part, lines_of
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
    wide = width >= WIDE

    def titled(title: str, short: str, cells: int) -> tuple[str, int]:
        return (title, max(len(title), cells)) if wide else (short, cells)

    def styled(told: str, own: Worst) -> Text:
        return Text(told, STYLES[own.state.level])

    def named(own: Worst, cells: int) -> Text:
        mark = ("^ " if ascii_only else "▲ ") if own.first else ""
        name = Text(last_part(own.layer.name, cells - len(mark), ascii_only))
        return Text().append(mark, STYLES["bad"]).append_text(name)

    def picture(own: Worst, cells: int) -> Text:
        return _picture(own, trail, cells, ascii_only)

    rank: Column[Worst] = Column("rank", 4, lambda own, _: Text(own.page.rank))
    run: Column[Worst] = Column("run", 12, lambda own, _: Text(own.page.run), right=False)
    columns: list[Column[Worst]] = [
        Column("layers, the worst first", 0, named, right=False),
        *([rank] if len({own.page.rank for own in rows}) > 1 else []),
        *([run] if len({own.page.run for own in rows}) > 1 else []),
        Column(
            *titled("x baseline", "x base", 6), lambda own, _: styled(number(own.layer.ratio), own)
        ),
        Column("sigma", 6, lambda own, _: Text(number(own.layer.sigma)), spare=2),
        Column(
            *titled("in a row", "row", 4),
            lambda own, _: Text(count(own.layer.row("hard", "nonfinite", "sigma"))),
            spare=1,
        ),
        Column(
            *titled("NaN or Inf", "NaN", 5),
            lambda own, _: Text(count(own.layer.nonfinite)),
            spare=3,
        ),
        Column(
            *titled("of dtype", "dtype", 5),
            lambda own, _: Text(share(own.layer.value("headroom_ratio"))),
            spare=4,
        ),
        Column(*titled("since watching  ", "since", 8), picture, right=False, spare=5),
        Column("is", 10, lambda own, _: styled(own.state.words, own), right=False),
    ]
    return lines_of(columns, rows[:most], width, least=24)


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
