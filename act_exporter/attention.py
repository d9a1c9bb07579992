"""A bound on attention logits: they grow for long while the loss stays calm.

No logit is beyond the product of the largest query and key rows of its layer, times the scale. Over
heads and tokens, two reductions a layer in place of a matrix of logits that flash attention never
makes. (Logits beyond 1e4 were where runs of ViT-22B diverged: Dehghani et al. 2023,
arXiv:2302.05442; growth at a high learning rate: Wortsman et al. 2023, arXiv:2309.14322.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from act_exporter.baseline import Baseline
from act_exporter.rows import Array, Column
from act_exporter.taps import Tap


class AttentionLogits:
    """The bounds of all attentions whose query and key are watched.

    Args:
        taps: the taps, in the order of the rows.
        baseline_steps: as of the layers' baselines.
    """

    def __init__(self, taps: Sequence[Tap], baseline_steps: int) -> None:
        pairs: dict[str, list[int]] = {}
        for index, tap in enumerate(taps):
            if tap.heads is not None:
                pairs.setdefault(tap.heads.attention, []).append(index)
        both = {layer: pair for layer, pair in pairs.items() if len(pair) == 2}
        self.layers = list(both)
        """The attentions' names, in the order of all arrays here."""
        self._pairs = np.array(list(both.values()), dtype=np.int64).reshape(-1, 2)
        heads = [taps[query].heads for query, _ in both.values()]
        self._scale = np.array([own.scale for own in heads if own is not None])
        kinds = [taps[query].kind for query, _ in both.values()]
        self._baseline = Baseline(kinds, baseline_steps)
        self.bound = np.full(len(both), np.nan)
        """(attentions,) at the last sampled step that ran them."""

    def bounds(self) -> dict[str, tuple[float, float]]:
        """The bound and its baseline of each attention, by name; NaN where there is none yet."""
        pairs = zip(self.bound.tolist(), self._baseline.values.tolist(), strict=True)
        return dict(zip(self.layers, pairs, strict=True))

    def observe(self, rows: Array, learning_rate: float | None, *, learn: bool) -> None:
        """Take in the rows (taps, COLUMNS) of a sampled step; learn baselines from it or not."""
        norms = rows[self._pairs, Column.ROW_NORM]
        ran = (rows[self._pairs, Column.CALLS] > 0).all(axis=1)
        bound = norms.prod(axis=1) * self._scale
        self.bound = np.where(ran, bound, self.bound)
        if learn:
            self._baseline.add(bound, ran & np.isfinite(bound), learning_rate)

    def rebaseline(self) -> None:
        """Learn the baselines anew."""
        self._baseline.clear()

    def state(self) -> dict[str, float]:
        """The baselines that have settled, by attention."""
        return {name: own for name, (_, own) in self.bounds().items() if not math.isnan(own)}

    def restore(self, state: dict[str, float]) -> None:
        """Take over baselines of attentions that are watched here; the rest learn anew."""
        self._baseline.clear()
        known = {self.layers.index(name): own for name, own in state.items() if name in self.layers}
        self._baseline.set(known)
