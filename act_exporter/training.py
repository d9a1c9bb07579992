"""The history of the run's own numbers, loss and gradient norm: peak, window, non-finite steps.

Kept like the layers' and for the same reason: Prometheus sees one step a scrape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from act_exporter.history import Thresholds
from act_exporter.peaks import HeldMaximum
from act_exporter.window import Window

Level = Literal["calm", "high", "nonfinite"]

# Five deviations alone are nothing: gradient norms have long tails, and the loss of a small batch
# jumps. A loss twice its mean, or a gradient five times, is not the noise of a batch.
SIGNALS = {"loss": 2.0, "grad_norm": 5.0}
"""What is followed, and times its window's mean that it must reach to be high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """One number of the run as of the last sampled step; NaN where there is none yet.

    Attributes:
        peak: the largest finite value of the last `peak_seconds`, and at least the last one.
        window_mean: mean of the last values that were not high.
        window_std: their standard deviation, at least 1 % of the mean.
        nonfinite: how many sampled steps had NaN or Inf.
        level: what the last value was, by what was known before it.
    """

    peak: float
    window_mean: float
    window_std: float
    nonfinite: int
    level: Level


class TrainingHistory:
    """Keeps the histories of loss and gradient norm, which may come at different times.

    Args:
        thresholds: deviations of a value that is high, and the window's size.
        clock: seconds, monotonic.
    """

    def __init__(self, thresholds: Thresholds, clock: Callable[[], float]) -> None:
        self.signals: dict[str, Signal] = {}
        """As of the last value of each; replaced, never changed."""
        self._clock = clock
        self._histories = {
            name: _SignalHistory(least_factor, thresholds) for name, least_factor in SIGNALS.items()
        }
        self._unread: dict[str, Level] = {}

    def observe(self, values: Mapping[str, float]) -> None:
        """Take in what has arrived of a sampled step; other names than `SIGNALS` are left alone."""
        for name in SIGNALS.keys() & values.keys():
            signal = self._histories[name].observe(values[name], self._clock())
            self.signals = self.signals | {name: signal}
            self._unread[name] = signal.level

    def level(self, name: str) -> Level:
        """What the newest value is that was not asked for yet; "calm" where none has come."""
        return self._unread.pop(name, "calm")

    def reset(self) -> None:
        """Forget the peaks: the steps they came from are undone."""
        self.signals = {}
        self._unread = {}
        for history in self._histories.values():
            history.clear_peaks()


class _SignalHistory:
    """The history of one number."""

    def __init__(self, least_factor: float, thresholds: Thresholds) -> None:
        self._least_factor = least_factor
        self._sigma = thresholds.sigma
        self._window = Window(1, thresholds.window, thresholds.window_minimum)
        self._peaks = HeldMaximum((1,), thresholds.peak_seconds)
        self._nonfinite = 0

    def observe(self, value: float, now: float) -> Signal:
        finite = math.isfinite(value)
        self._nonfinite += not finite
        level: Level = "nonfinite"
        if finite:
            level = "high" if self._is_high(value) else "calm"
            calm = np.array([level == "calm"])
            self._window.add(np.array([value]), calm, ~calm)
        held = self._peaks.add(np.array([value if finite else np.nan]), now)
        return Signal(
            peak=float(held[0]),
            window_mean=float(self._window.mean()[0]),
            window_std=float(self._window.std()[0]),
            nonfinite=self._nonfinite,
            level=level,
        )

    def clear_peaks(self) -> None:
        self._peaks.clear()

    def _is_high(self, value: float) -> bool:
        mean, std = float(self._window.mean()[0]), float(self._window.std()[0])
        # Before there is a window both are NaN, and nothing is high.
        return value > mean + self._sigma * std and value > self._least_factor * mean
