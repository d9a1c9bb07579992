"""The history in steps: what became of each tap over the last steps, and which rules it broke.

Prometheus knows time and sees one step a scrape; training knows steps. So peaks, the 500-step
window, the baseline and the counts of rule-breakers are kept here, beside the training, and
Prometheus gets them as gauges that no scrape resets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from act_exporter.attention import AttentionLogits
from act_exporter.baseline import Baseline
from act_exporter.drift import Drift
from act_exporter.exceptions import SettingError
from act_exporter.peaks import HeldMaximum
from act_exporter.profile import Profile
from act_exporter.rows import NONFINITE_KINDS, Array, Column, Statistics
from act_exporter.sample import Sample
from act_exporter.state import STATE_VERSION, checked_state
from act_exporter.taps import Tap
from act_exporter.window import Window

Rule = Literal["hard", "sigma", "nonfinite", "dead", "saturated"]
RULES: tuple[Rule, ...] = get_args(Rule)
SERIOUS: tuple[Rule, ...] = ("hard", "nonfinite")
"""The rules whose breaking makes a step bad. A single step over 5 sigma does not: in 2,500 healthy
steps of a small GPT that happened to 907 of a million."""

_HARD = RULES.index("hard")

# A row of steps over the hard rule is held by one that is still above this share of it. A layer
# that a learning rate drives to and fro at the limit (38.0 to 39.5 at 39.03) is no better for its
# dips.
_HOLDING = 0.5

# A variance's share of the largest that there can be between a tensor's minimum and maximum around
# its mean, (max - mean) * (mean - min) (Bhatia and Davis, A Better Bound on the Variance, 2000): 1
# where all elements are at one end or the other. Normal values have 0.04, values spread evenly
# 0.33, tanh of normal values of deviation 3 has 0.75, of 10 0.92, of 30 0.97: hardly any gradient
# passes through it.
_SATURATED = 0.9
# One that was never below this is what it is by design: masks, one-hot choices.
_UNSATURATED = 0.5
# Of fewer elements, most may be at an end by chance.
_SATURATION_ELEMENTS = 64

# What an unchanged tensor has in common with itself a sampled step before.
_UNCHANGED = [Column.COUNT, Column.SUM, Column.SUM_SQUARES, Column.MIN, Column.MAX]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """When a step breaks a rule. The shipped alert rules are written for the defaults."""

    hard: float = 100.0
    """Times the baseline. What grows a hundredfold overflows or destroys the loss soon; a healthy
    tap wanders by less than 2 once settled."""

    sigma: float = 5.0
    """Standard deviations above the window's mean; how the rule is read stands in the README."""

    exceed: float = 100.0
    """|x| of an element that counts for the exceed ratio: "massive activations" are those beyond
    100 (and a thousand times the median), Sun et al. 2024, arXiv:2402.17762."""

    window: int = 500
    """Sampled steps in the window."""

    window_minimum: int = 200
    """Steps before the window is used: with 200 the deviation is known to 5 %, 1/sqrt(2n)."""

    baseline_steps: int = 100
    """Sampled steps whose median is the baseline, once two blocks in a row agree."""

    clean_steps: int = 100
    """Sampled steps without a bad one after which an onset is forgotten: a spike that passed by
    itself must not make every later checkpoint suspect. As long as the guard's clean stretch."""

    peak_seconds: float = 120.0
    """How long a peak is held: more than two scrapes of 15 s with one failed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SettingError(f"thresholds: {field.name}={value!r} must be above 0")
            if field.type == "int" and not isinstance(value, int):
                raise SettingError(f"thresholds: {field.name}={value!r} must be a whole number")
        if self.window_minimum > self.window:
            raise SettingError(
                f"thresholds: window_minimum={self.window_minimum} is more than the"
                f" window={self.window}"
            )


@dataclass(frozen=True, slots=True)
class Onset:
    """The first bad step of an anomaly: when, where and why."""

    step: int
    layer: str
    tensor: str
    rule: Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """All taps as of one sampled step: an immutable copy, for scrapes.

    Arrays are (taps,), those by rule (rules, taps), those by kind (kinds, taps); NaN where there
    is no value yet. `holder` is the rank that has the absmax, where ranks are joined; `jump_ratio`
    and `plateau` are computed when asked for; `bad` is the number of taps that broke a serious rule
    in the step, `nonfinite_share` of those that ran how many were not finite; `logit_bounds` has
    the bound and its baseline by attention, `log_partitions` one number by head.
    """

    statistics: Statistics
    peak: Array
    baseline: Array
    window_mean: Array
    window_std: Array
    nonfinite: Array
    exceeded_steps: Array
    consecutive: Array
    calls: Array
    growth: Array
    depth: Array
    largest: Array
    holder: Array
    jump_ratio: Callable[[], Array]
    plateau: Callable[[], tuple[float, float] | None]
    onset: Onset | None
    bad: int
    nonfinite_share: float
    log_partitions: dict[str, float]
    logit_bounds: dict[str, tuple[float, float]]

    @property
    def headroom(self) -> Array:
        """The peak's share of the largest number that the tensor's dtype has."""
        headroom: Array = self.peak / self.largest
        return headroom


class History:
    """Keeps the history of all taps, a step at a time.

    Args:
        taps: the taps, in the order of the rows.
        thresholds: when a rule is broken.
        clock: seconds, monotonic.
    """

    def __init__(
        self, taps: Sequence[Tap], thresholds: Thresholds, clock: Callable[[], float]
    ) -> None:
        self._taps: list[tuple[str, str]] = [(tap.layer, tap.tensor) for tap in taps]
        self._thresholds = thresholds
        self._clock = clock
        count = len(taps)
        self.onset: Onset | None = None
        self._clean = 0  # sampled steps since the last bad one
        self._rows = np.zeros((count, len(Column)))  # each tap's last sampled step
        self._holder = np.full(count, np.nan)
        self._window = Window(count, thresholds.window, thresholds.window_minimum)
        self._baseline = Baseline([tap.kind for tap in taps], thresholds.baseline_steps)
        self._peaks = HeldMaximum((count,), thresholds.peak_seconds)
        self._runs = HeldMaximum((len(RULES), count), thresholds.peak_seconds)
        self._consecutive = np.zeros((len(RULES), count))
        self._exceeded_steps = np.zeros((len(RULES), count))
        self._nonfinite = np.zeros((len(NONFINITE_KINDS), count))
        self._calls = np.zeros(count)
        self._logits = np.array([tap.is_logits for tap in taps])
        self._changed = np.zeros(count, dtype=np.bool_)  # whether it ever differed from itself
        self._free = np.zeros(count, dtype=np.bool_)  # whether it ever was far from saturated
        self._drift = Drift(count)
        self._profile = Profile(taps)
        self._attention = AttentionLogits(taps, thresholds.baseline_steps)

    def observe(self, sample: Sample, learning_rate: float | None, sick: bool = False) -> Layers:
        """Take in a sampled step and judge it.

        The step is judged by what was known before it, and only then enters window and baseline.
        No baseline is learnt while the run is `sick` (loss or gradient say so) or some layer is.
        """
        rows = sample.rows
        called, elements = sample.called, sample.nonfinite
        dead = called & self._is_dead(rows)
        self._rows[called] = rows[called]
        if sample.holder is not None:
            self._holder = np.where(called, sample.holder, self._holder)
        statistics = Statistics.of(self._rows)
        absmax = statistics.absmax
        defined = called & (rows[:, Column.COUNT] > 0)
        mean, std = self._window.mean(), self._window.std()
        with np.errstate(invalid="ignore"):  # NaN compares as False: no verdict without a value
            broken = np.stack(
                [
                    defined & (absmax > self._thresholds.hard * self._baseline.values),
                    defined & (absmax > mean + self._thresholds.sigma * std),
                    called & (elements.sum(axis=0) > 0),
                    dead,
                    defined & self._is_saturated(statistics, rows),
                ]
            )
        self._note_onset(sample, broken)
        self._exceeded_steps += broken
        holding = broken.copy()
        with np.errstate(invalid="ignore"):
            near = defined & (absmax > _HOLDING * self._thresholds.hard * self._baseline.values)
        holding[_HARD] |= near & (self._consecutive[_HARD] > 0)
        self._consecutive = np.where(called, (self._consecutive + 1) * holding, self._consecutive)
        self._nonfinite += elements
        self._calls += rows[:, Column.CALLS]
        hard, sigma, nonfinite, *_ = broken
        # Numbers that stand beside a NaN are no level; they count for neither.
        whole = defined & ~nonfinite
        self._window.add(absmax, whole & ~hard & ~sigma, whole & (hard | sigma))
        self._drift.add(absmax, whole)
        healthy = self.onset is None and not sick
        if healthy:
            self._baseline.add(absmax, whole & ~hard, learning_rate)
        self._attention.observe(rows, learning_rate, learn=healthy)
        now = self._clock()
        peak = self._peaks.add(np.where(defined, absmax, np.nan), now)
        baseline = self._baseline.values.copy()
        return Layers(
            statistics=statistics,
            peak=peak,
            baseline=baseline,
            window_mean=self._window.mean(),
            window_std=self._window.std(),
            nonfinite=self._nonfinite.copy(),
            exceeded_steps=self._exceeded_steps.copy(),
            # Of what ran: one that is never called again must not hold its count for ever.
            consecutive=self._runs.add(np.where(called, self._consecutive, np.nan), now),
            calls=self._calls.copy(),
            growth=self._drift.growth,
            depth=sample.depth,
            largest=sample.largest,
            holder=self._holder,
            jump_ratio=functools.partial(self._profile.jump_ratio, peak, baseline, sample.depth),
            plateau=functools.partial(self._profile.plateau, peak, baseline, sample.depth),
            onset=self.onset,
            bad=int((hard | nonfinite).sum()),
            nonfinite_share=float(nonfinite.sum() / max(called.sum(), 1)),
            log_partitions=self._log_partitions(),
            logit_bounds=self._attention.bounds(),
        )

    def _log_partitions(self) -> dict[str, float]:
        """By head, of the last sampled step that ran it."""
        found = self._rows[:, Column.LOG_PARTITION]
        known = np.flatnonzero(self._logits & ~np.isneginf(found))
        return {self._taps[tap][0]: float(found[tap]) for tap in known}

    def reset(self) -> None:
        """Forget the onset, peaks and counts in a row: the steps they came from are undone."""
        self.onset = None
        self._peaks.clear()
        self._runs.clear()
        self._consecutive[:] = 0
        self._drift.clear()

    def set_baseline(self, levels: Mapping[tuple[str, str], float]) -> None:
        """Take over baselines by layer and tensor; those of others are learnt."""
        known = {tap: levels[name] for tap, name in enumerate(self._taps) if name in levels}
        self._baseline.set(known)

    def rebaseline(self) -> None:
        """Learn baseline and window anew, from the next sampled step on."""
        self._baseline.clear()
        self._window.clear()
        self._attention.rebaseline()

    def state_dict(self) -> dict[str, Any]:
        """Baseline and window, as tensors with the names of their taps."""
        return {
            "version": STATE_VERSION,
            "taps": [list(tap) for tap in self._taps],
            "baseline": self._baseline.state(),
            "window": self._window.state(),
            "attention": self._attention.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state` knows of taps that are watched here; others learn anew.

        Raises:
            StateError: not such a state; nothing was changed.
        """
        state = checked_state(state, self.state_dict())
        taps = [tuple(tap) for tap in state["taps"]]
        columns = {tap: column for column, tap in enumerate(taps)}
        own = [index for index, tap in enumerate(self._taps) if tap in columns]
        saved = [columns[self._taps[index]] for index in own]
        self._baseline.restore(state["baseline"], np.array(own, dtype=np.int64), saved)
        self._window.restore(state["window"], np.array(own, dtype=np.int64), saved)
        self._attention.restore(state["attention"])

    def _is_dead(self, rows: Array) -> npt.NDArray[np.bool_]:
        """Whether a tensor is all zero, or the same as a sampled step before though it once moved.

        What never moved (rotary tables, a frozen layer on one batch) is constant by design.
        """
        seen = self._rows[:, Column.COUNT] > 0
        same = seen & (rows[:, _UNCHANGED] == self._rows[:, _UNCHANGED]).all(axis=1)
        self._changed |= seen & ~same & (rows[:, Column.COUNT] > 0)
        zero = (rows[:, Column.COUNT] > 0) & (rows[:, Column.SUM_SQUARES] == 0)
        dead: npt.NDArray[np.bool_] = zero | (same & self._changed)
        return dead

    def _is_saturated(self, statistics: Statistics, rows: Array) -> npt.NDArray[np.bool_]:
        """Whether nearly all elements are at the ends of what there is, as they once were not."""
        low, high, mean = statistics.min, statistics.max, statistics.mean
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            share = statistics.std**2 / ((high - mean) * (mean - low))
            share[rows[:, Column.COUNT] < _SATURATION_ELEMENTS] = np.nan
            self._free |= share < _UNSATURATED
            saturated: npt.NDArray[np.bool_] = self._free & (share > _SATURATED)
        return saturated

    def _note_onset(self, sample: Sample, broken: npt.NDArray[np.bool_]) -> None:
        serious = [RULES.index(rule) for rule in SERIOUS]
        rules, taps = np.nonzero(broken[serious])
        self._clean = 0 if taps.size else self._clean + 1
        if self.onset is None and taps.size:
            # The first in the order of execution: what comes after it is its consequence.
            first = np.argmin(sample.depth[taps])
            layer, tensor = self._taps[taps[first]]
            self.onset = Onset(sample.step, layer, tensor, SERIOUS[rules[first]])
        elif self._clean >= self._thresholds.clean_steps:
            self.onset = None
