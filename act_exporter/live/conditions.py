"""Which of the shipped alerts' conditions hold now, by the numbers that the rules read.

Prometheus holds an alert for minutes longer; and what it computes over time, compares between ranks
or knows of other programs is not judged here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from act_exporter.collector import Training
from act_exporter.history import RULES, SERIOUS, Layers, Rule
from act_exporter.live.alerts import SEVERITIES, Alert, Shipped
from act_exporter.live.guard import Guard
from act_exporter.rows import Array
from act_exporter.training import Signal

_ACTIONS = ("recover", "checkpoint", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """All taps in the numbers that the rules compare, (taps,) each; NaN where there is none."""

    ratio: Array
    sigma: Array
    headroom: Array
    jump: Array
    growing: Array
    consecutive: Mapping[Rule, Array]

    @classmethod
    def of(cls, layers: Layers, growth_limit: float) -> Measures:
        """Of a snapshot; `growth_limit` is what a layer that grows is above."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = layers.peak / layers.baseline
            sigma = (layers.statistics.absmax - layers.window_mean) / layers.window_std
            growing = np.where(layers.growth > growth_limit, ratio, np.nan)
        return cls(
            ratio=ratio,
            sigma=sigma,
            headroom=layers.headroom,
            jump=layers.jump_ratio(),
            growing=growing,
            consecutive=dict(zip(RULES, layers.consecutive, strict=True)),
        )

    @property
    def serious(self) -> Array:
        """The longest row of steps that broke a serious rule."""
        rows: Array = np.fmax.reduce([self.consecutive[rule] for rule in SERIOUS])
        return rows

    def by_alert(self) -> dict[str, Array]:
        """What each alert about layers compares."""
        return {
            "ActLayerNonFinite": self.consecutive["nonfinite"],
            "ActLayerAboveBaseline": self.ratio,
            "ActLayerAboveWindowSustained": self.consecutive["sigma"],
            "ActLayerHeadroomLow": self.headroom,
            "ActLayerDrift": self.growing,
            "ActLayerDepthSpike": self.jump,
            "ActLayerDead": self.consecutive["dead"],
            "ActLayerSaturated": self.consecutive["saturated"],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A condition that holds.

    Attributes:
        alert: whose.
        value: the worst one.
        taps: which tensors it holds for, the worst first; none where it is not about tensors.
        where: the name of what else it holds for; "" for the run.
    """

    alert: Alert
    value: float
    taps: tuple[int, ...] = ()
    where: str = ""


def holding(
    shipped: Shipped,
    training: Training,
    measures: Measures | None,
    guard: Guard | None,
    errors: Mapping[str, int],
    at: float,
) -> list[Holding]:
    """All that hold at a time (Unix seconds), those that ask for a rollback first."""
    found = []
    for name, values in ({} if measures is None else measures.by_alert()).items():
        alert = shipped.alerts[name]
        where = np.flatnonzero(alert.holds(values))
        if where.size:
            taps = where[np.argsort(-values[where], kind="stable")].tolist()
            found.append(Holding(alert=alert, value=float(values[taps[0]]), taps=tuple(taps)))
    single = [
        *_of_the_run(shipped, training, measures, guard, errors, at),
        *_of_attention_and_logits(shipped, training.layers),
    ]
    for name, value, place in single:
        if shipped.alerts[name].holds(np.array(value)):
            found.append(Holding(alert=shipped.alerts[name], value=value, where=place))
    return sorted(
        found,
        key=lambda one: (
            _ACTIONS.index(one.alert.action),
            SEVERITIES.index(one.alert.severity),
        ),
    )


_Value = tuple[str, float, str]
"""An alert, what it compares, and of what that is."""


def _of_the_run(
    shipped: Shipped,
    training: Training,
    measures: Measures | None,
    guard: Guard | None,
    errors: Mapping[str, int],
    at: float,
) -> list[_Value]:
    loss, norm, update = (
        training.signals.get(name) for name in ("loss", "grad_norm", "update_rms")
    )
    values = {
        "ActTrainerStalled": at - training.finished_at,
        "ActHooksSilent": errors.get("silent", 0),
        "ActDiagnosis": training.verdict is not None,
    }
    if measures is not None:
        values["ActRunaway"] = float(np.fmax.reduce(measures.serious, initial=0))
    if loss is not None:
        values["ActLossNonFinite"] = loss.level == "nonfinite"
        values["ActLossSpike"] = loss.peak_zscore
        values["ActLossShifted"] = loss.shifted
    if norm is not None:
        values["ActGradientNonFinite"] = norm.level == "nonfinite"
        values["ActGradientRunaway"] = norm.shifted
        values["ActGradientExplosion"] = norm.peak_ratio
        values["ActGradientVanishing"] = _fallen(norm)
    if update is not None:
        values["ActUpdateSpike"] = update.peak_ratio
    if training.overhead is not None and training.sample_every > 1:
        # Its last comparison is of the interval; how much is too much stands before it.
        alert = shipped.alerts["ActOverheadHigh"]
        too_much = training.overhead > shipped.limit("act_overhead_ratio")
        values[alert.name] = training.sample_every if too_much else math.nan
    if guard is not None and guard.last_success_at is not None:
        values["ActCheckpointStale"] = at - guard.last_success_at
    if guard is not None and guard.budget_remaining is not None and training.generation:
        values["ActRollbackBudgetSpent"] = guard.budget_remaining
    return [(name, float(value), "") for name, value in values.items()]


def _fallen(norm: Signal) -> float:
    """A gradient's peak over its window's mean."""
    return norm.peak / norm.window_mean if norm.window_mean > 0 else math.nan


def _of_attention_and_logits(shipped: Shipped, layers: Layers | None) -> list[_Value]:
    if layers is None:
        return []
    large = shipped.limit("act_attention_logit_bound")
    bounds: list[_Value] = [
        ("ActAttentionLogitsGrowing", bound / baseline, layer)
        for layer, (bound, baseline) in layers.logit_bounds.items()
        if bound > large and baseline > 0
    ]
    logits: list[_Value] = [
        ("ActLogitsDrifting", abs(value), layer) for layer, value in layers.log_partitions.items()
    ]
    # One for each alert: the worst.
    worst = [max(values, key=lambda one: one[1]) for values in (bounds, logits) if values]
    return [one for one in worst if not math.isnan(one[1])]
