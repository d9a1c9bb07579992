"""What was read since watching began, and its small pictures."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

from act_exporter.watch.page import Page

# Twenty minutes at the usual interval; of ten thousand tensors 24 MB.
_READINGS = 600

_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = "_.-:=+*#"  # where the terminal's encoding has no blocks
_NOT_FINITE = {False: "×", True: "!"}  # noqa: RUF001  # a sign, no letter


class Trail:
    """A value a reading: of tensors the ratio to the baseline, of ranks loss and gradient norm."""

    def __init__(self) -> None:
        self._readings = 0
        self._values: dict[tuple[str, ...], array[float]] = {}
        self._nonfinite: dict[tuple[str, ...], float] = {}

    def add(self, pages: Iterable[Page]) -> None:
        """Take in what the exporters said at about one time; of ranks the worst counts.

        Infinity stands for a tensor in which NaN or Inf have come since the reading before.
        """
        values: dict[tuple[str, ...], float] = {}
        for page in pages:
            for signal in ("act_loss", "act_grad_norm"):
                values[signal, page.run, page.rank] = page.value(signal)
            for layer in page.layers.values():
                key: tuple[str, ...] = (page.run, layer.layer, layer.tensor)
                own = (*key, page.rank)
                more = layer.nonfinite > self._nonfinite.get(own, layer.nonfinite)
                self._nonfinite[own] = layer.nonfinite
                value = math.inf if more or layer.row("nonfinite") else layer.present
                values[key] = largest([value, values.get(key, math.nan)])
        for new in values.keys() - self._values.keys():
            self._values[new] = array("f", [math.nan] * self._readings)
        for name, known in self._values.items():
            known.append(values.get(name, math.nan))
            del known[:-_READINGS]
        self._readings = min(self._readings + 1, _READINGS)

    def of(self, *key: str, width: int) -> list[float]:
        """At most `width` values, oldest first; of readings that share one the largest.

        Args:
            key: run, layer and tensor; or "act_loss" or "act_grad_norm", run and rank.
            width: how many there may be.
        """
        values = self._values.get(key, array("f"))
        each = max(math.ceil(len(values) / width), 1)
        return [largest(values[start : start + each]) for start in range(0, len(values), each)]


def largest(values: Iterable[float]) -> float:
    """The largest that is a number; NaN where none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def sparks(values: Sequence[float], low: float, high: float, ascii_only: bool) -> Iterator[str]:
    """A sign a value, of eight heights between `low` and `high`.

    Args:
        values: NaN leaves a gap, infinity has a sign of its own.
        low: what is at it or below has the lowest sign.
        high: what is at it or above has the highest.
        ascii_only: whether the terminal knows no blocks.
    """
    signs = _LETTERS if ascii_only else _BLOCKS
    for value in values:
        if math.isnan(value):
            yield " "
        elif math.isinf(value):
            yield _NOT_FINITE[ascii_only]
        else:
            share = (value - low) / (high - low) if high > low else 0.0
            yield signs[min(max(int(share * len(signs)), 0), len(signs) - 1)]
