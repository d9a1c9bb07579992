"""The history in steps: what became of each tap over the last steps, and which rules it broke.

Prometheus knows time and sees one step a scrape; training knows steps. So peaks, the 500-step
window, the baseline and the counts of rule-breakers are kept here, beside the training, and
Prometheus gets them as gauges that no scrape resets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from act_exporter.baseline import Baseline
from act_exporter.exceptions import SettingError
from act_exporter.layers import Tap
from act_exporter.state import STATE_VERSION, checked_state
from act_exporter.statistics import Array, Column, Statistics
from act_exporter.window import Window

Rule = Literal["hard", "sigma", "nonfinite"]
RULES: tuple[Rule, ...] = get_args(Rule)
SERIOUS: tuple[Rule, ...] = ("hard", "nonfinite")
"""The rules whose breaking makes a step bad. A single step over 5 sigma does not: in 2,500 healthy
steps of a small GPT that happened to 907 of a million."""

NONFINITE_KINDS = {"nan": Column.NAN, "posinf": Column.POSINF, "neginf": Column.NEGINF}


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


class _HeldMaximum:
    """The largest value of each series in the last `seconds`, and at least the newest one.

    Kept in time buckets, so that holding costs the same at 1 and at 1,000 steps a second; a value
    is held for `seconds` and up to a bucket (a 24th) longer.
    """

    _BUCKETS = 24

    def __init__(self, shape: tuple[int, ...], seconds: float) -> None:
        self._bucket_seconds = seconds / self._BUCKETS
        self._buckets: list[tuple[int, Array]] = []  # (number, maxima), oldest first
        self._older = np.full(shape, np.nan)  # maximum of all but the newest bucket
        self._shape = shape

    def add(self, values: Array, now: float) -> Array:
        """Take in values of `now` (seconds) and return the held maxima; NaN counts as nothing."""
        number = math.floor(now / self._bucket_seconds)
        if not self._buckets or self._buckets[-1][0] != number:
            oldest = number - self._BUCKETS
            self._buckets = [bucket for bucket in self._buckets if bucket[0] >= oldest]
            self._older = np.full(self._shape, np.nan)
            for _, maxima in self._buckets:
                np.fmax(self._older, maxima, out=self._older)
            self._buckets.append((number, np.full(self._shape, np.nan)))
        newest = self._buckets[-1][1]
        np.fmax(newest, values, out=newest)
        held: Array = np.fmax(self._older, newest)
        return held

    def clear(self) -> None:
        self._buckets = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """All taps as of one sampled step: an immutable copy, for scrapes.

    Arrays are (taps,), those by rule (rules, taps), those by kind (kinds, taps); NaN where there
    is no value yet.
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
        self._window = Window(count, thresholds.window, thresholds.window_minimum)
        self._baseline = Baseline([tap.kind for tap in taps], thresholds.baseline_steps)
        self._peaks = _HeldMaximum((count,), thresholds.peak_seconds)
        self._runs = _HeldMaximum((len(RULES), count), thresholds.peak_seconds)
        self._consecutive = np.zeros((len(RULES), count))
        self._exceeded_steps = np.zeros((len(RULES), count))
        self._nonfinite = np.zeros((len(NONFINITE_KINDS), count))
        self._calls = np.zeros(count)

    def observe(self, step: int, rows: Array, learning_rate: float | None) -> Layers:
        """Take in the rows (taps, COLUMNS) of a sampled step and judge them.

        The step is judged by what was known before it, and only then enters window and baseline.
        """
        called = rows[:, Column.CALLS] > 0
        self._rows[called] = rows[called]
        statistics = Statistics.of(self._rows)
        absmax = statistics.absmax
        defined = called & (rows[:, Column.COUNT] > 0)
        mean, std = self._window.mean(), self._window.std()
        with np.errstate(invalid="ignore"):  # NaN compares as False: no verdict without a value
            broken = np.stack(
                [
                    defined & (absmax > self._thresholds.hard * self._baseline.values),
                    defined & (absmax > mean + self._thresholds.sigma * std),
                    called & (rows[:, list(NONFINITE_KINDS.values())].sum(axis=1) > 0),
                ]
            )
        self._note_onset(step, broken)
        self._exceeded_steps += broken
        self._consecutive = np.where(called, (self._consecutive + 1) * broken, self._consecutive)
        self._nonfinite += rows[:, list(NONFINITE_KINDS.values())].T
        self._calls += rows[:, Column.CALLS]
        hard, sigma, nonfinite = broken
        # Numbers that stand beside a NaN are no level; they count for neither.
        whole = defined & ~nonfinite
        self._window.add(absmax, whole & ~hard & ~sigma, whole & (hard | sigma))
        self._baseline.add(absmax, whole & ~hard, learning_rate)
        now = self._clock()
        return Layers(
            statistics=statistics,
            peak=self._peaks.add(np.where(defined, absmax, np.nan), now),
            baseline=self._baseline.values.copy(),
            window_mean=self._window.mean(),
            window_std=self._window.std(),
            nonfinite=self._nonfinite.copy(),
            exceeded_steps=self._exceeded_steps.copy(),
            # Of what ran: one that is never called again must not hold its count for ever.
            consecutive=self._runs.add(np.where(called, self._consecutive, np.nan), now),
            calls=self._calls.copy(),
        )

    def reset(self) -> None:
        """Forget the onset, peaks and counts in a row: the steps they came from are undone."""
        self.onset = None
        self._peaks.clear()
        self._runs.clear()
        self._consecutive[:] = 0

    def rebaseline(self) -> None:
        """Learn baseline and window anew, from the next sampled step on."""
        self._baseline.clear()
        self._window.clear()

    def state_dict(self) -> dict[str, Any]:
        """Baseline and window, as tensors with the names of their taps."""
        return {
            "version": STATE_VERSION,
            "taps": [list(tap) for tap in self._taps],
            "baseline": self._baseline.state(),
            "window": self._window.state(),
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

    def _note_onset(self, step: int, broken: npt.NDArray[np.bool_]) -> None:
        serious = [RULES.index(rule) for rule in SERIOUS]
        rules, taps = np.nonzero(broken[serious])
        self._clean = 0 if taps.size else self._clean + 1
        if self.onset is None and taps.size:
            first = np.argmin(taps)
            layer, tensor = self._taps[taps[first]]
            self.onset = Onset(step, layer, tensor, SERIOUS[rules[first]])
        elif self._clean >= self._thresholds.clean_steps:
            self.onset = None
