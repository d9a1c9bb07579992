"""The rows of the table: one a tensor, in the order that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from act_exporter.history import Layers, Rule
from act_exporter.live.conditions import Measures
from act_exporter.live.query import Query
from act_exporter.live.trail import Steps
from act_exporter.rows import Array
from act_exporter.taps import Tap


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor as of the last sampled step; numbers are NaN where there is none.

    Attributes:
        layer: the module's name.
        tensor: "input" or "output".
        ratio: peak over baseline.
        peak: largest absmax of the last peak_seconds.
        baseline: its baseline.
        sigma: deviations above the window's mean, of the last sampled step.
        nonfinite: elements that were not finite, in this process.
        headroom: the peak's share of the largest number of its dtype.
        holder: with joined ranks, the rank that has the absmax.
        broken: rules that are broken, and for how many sampled steps in a row.
        is_first: whether the present anomaly began here.
        absmax: (steps,) of the last sampled steps.
    """

    layer: str
    tensor: str
    ratio: float
    peak: float
    baseline: float
    sigma: float
    nonfinite: int
    headroom: float
    holder: float
    broken: Mapping[Rule, int]
    is_first: bool
    absmax: npt.NDArray[np.float32]


def ordered(
    taps: Sequence[Tap],
    layers: Layers | None,
    measures: Measures | None,
    query: Query,
    first: int | None,
) -> list[int]:
    """The tensors that the query asks for, in its order.

    The worst are: where the anomaly began, those that are not finite, and then the rest by how far
    they are above their baselines, or above their windows where there is none.
    """
    wanted = query.find.casefold()
    found = [i for i, tap in enumerate(taps) if wanted in f"{tap.layer} {tap.tensor}".casefold()]
    if layers is None or measures is None:
        return found
    if query.sort == "depth":
        by = np.lexsort((layers.depth,))
    else:
        began = np.arange(len(taps)) == first
        # NaN sorts last, also when negated.
        by = np.lexsort(
            (
                layers.depth,
                -measures.sigma,
                -measures.ratio,
                -(measures.consecutive["nonfinite"] > 0).astype(np.int8),
                ~began,
            )
        )
    kept = set(found)
    return [tap for tap in by.tolist() if tap in kept]


def rows_of(
    shown: Sequence[int],
    taps: Sequence[Tap],
    layers: Layers | None,
    measures: Measures | None,
    steps: Steps,
    first: int | None,
) -> list[Row]:
    """The rows of some tensors, in their order; `steps` has theirs in its first columns."""
    unknown = np.full(len(taps), np.nan)
    broken: Mapping[Rule, Array] = {}
    ratio = sigma = headroom = peak = baseline = holder = unknown
    nonfinite = np.zeros(len(taps))
    if layers is not None and measures is not None:
        ratio, sigma, headroom = measures.ratio, measures.sigma, measures.headroom
        peak, baseline, holder = layers.peak, layers.baseline, layers.holder
        nonfinite, broken = layers.nonfinite.sum(axis=0), measures.consecutive
    return [
        Row(
            layer=taps[tap].layer,
            tensor=taps[tap].tensor,
            ratio=float(ratio[tap]),
            peak=float(peak[tap]),
            baseline=float(baseline[tap]),
            sigma=float(sigma[tap]),
            nonfinite=int(nonfinite[tap]),
            headroom=float(headroom[tap]),
            holder=float(holder[tap]),
            broken={rule: int(rows[tap]) for rule, rows in broken.items() if rows[tap] > 0},
            is_first=tap == first,
            absmax=steps.absmax[:, column],
        )
        for column, tap in enumerate(shown)
    ]
