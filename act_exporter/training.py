"""The history of the run's own numbers, loss, gradient norm and update: peak, window, non-finite.

Kept like the layers' and for the same reason: Prometheus sees one step a scrape.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from act_exporter.history import Thresholds
from act_exporter.peaks import HeldMaximum
from act_exporter.state import checked_windows
from act_exporter.window import Window

Level = Literal["calm", "high", "nonfinite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far above its window's mean a number may be; both must be exceeded.

    Attributes:
        high_factor: times the mean, for one value. Five deviations alone are nothing: gradient
            norms have long tails, and the loss of a small batch jumps.
        shift_factor: times the mean, for the median of the last 20 values.
        shift_sigma: deviations above it, likewise.
        window: values in the window, where `Thresholds.window` has more.
        cause: the signal that this one follows: no value is high within 10 sampled steps of one of
            the cause's that was above twice its mean.
    """

    high_factor: float
    shift_factor: float
    shift_sigma: float
    window: int | None = None
    cause: str | None = None


SIGNALS = {
    # Twice the mean is not the noise of a batch. A loss that 20 steps agree on is known well: in
    # 32,500 healthy steps their mean was at most 0.64 deviations up, and 6 and more where an
    # optimizer's state was lost or a norm's gain was wrong.
    "loss": Limits(high_factor=2.0, shift_factor=1.0, shift_sigma=4.0),
    # A single norm of 5 times the mean happens. Of 20 times there was none in those healthy steps,
    # and all along where a backward pass was wrong.
    "grad_norm": Limits(high_factor=5.0, shift_factor=20.0, shift_sigma=4.0),
    # The first update of an Adam that has lost its step counter is 2.24 times the right one with
    # betas 0.9 and 0.95, and the right one may be below the mean: a factor of 1.5 finds 95 to 99 %
    # of those (six runs with AdamW), 2 only half. Of 18,000 updates in twelve healthy runs with
    # AdamW and SGD none was high. Without the cause, 30 of the 6,000 with SGD and no clipping were,
    # all of them within 10 steps of a gradient of 2.1 times its mean and more.
    # A window of 500 would be of 5,000 steps, and full of the large updates of Adam's beginning for
    # the first thousands: then not one was found.
    "update_rms": Limits(
        high_factor=1.5, shift_factor=1.5, shift_sigma=4.0, window=100, cause="grad_norm"
    ),
}
"""What is followed, and its limits."""

# What a gradient does to updates by way of momentum is over after about so many steps (0.9 ** 10 is
# 0.35), and with a gradient of less than this factor times its mean no false one was met.
_FOLLOWING, _CAUSE_FACTOR = 10, 2.0

# Values whose median says whether the number has moved: what fewer than eleven bad batches do is
# not seen by it. They enter the window when they leave here, or a fault would widen it first.
_RECENT = 20

SHIFTED_STEPS = 25
"""Sampled steps in a row with a moved median that make a fault of it. Twenty bad batches move it
for twenty steps; what is still there then does not pass by itself."""

# Values before there is a verdict: the factor of two protects it where the deviation is not yet
# known well (to 10 %), and a run can be destroyed before there are 200.
_MINIMUM = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """One number of the run as of the last sampled step; NaN where there is none yet.

    Attributes:
        peak: the largest finite value of the last `peak_seconds`, and at least the last one, of
            those since there is a window.
        peak_zscore: deviations above the window, as it was when they came, of the values that were
            high; their maximum held for `peak_seconds`, NaN where none was.
        peak_ratio: likewise, times the window's mean.
        window_mean: mean of the last values that were not high.
        window_std: their standard deviation, at least 1 % of the mean.
        nonfinite: how many sampled steps had NaN or Inf.
        level: what the last value was, by what was known before it.
        shifted: sampled steps in a row in which the median of the last 20 values was beyond its
            limit, their maximum held for `peak_seconds`.
    """

    peak: float
    peak_zscore: float
    peak_ratio: float
    window_mean: float
    window_std: float
    nonfinite: int
    level: Level
    shifted: float


class TrainingHistory:
    """Keeps the histories of `SIGNALS`, which may come at different times.

    Args:
        thresholds: deviations of a value that is high, and the window's size.
        clock: seconds, monotonic.
    """

    def __init__(self, thresholds: Thresholds, clock: Callable[[], float]) -> None:
        self.signals: dict[str, Signal] = {}
        """As of the last value of each; replaced, never changed."""
        self._clock = clock
        self._histories = {
            name: _SignalHistory(limits, thresholds) for name, limits in SIGNALS.items()
        }
        self._unread: dict[str, Level] = {}

    @property
    def onset(self) -> int | None:
        """The step at which the gradient norm moved to where a run is destroyed, if it is there.

        The loss is not asked: another mix of data moves it too, and is no reason to roll back.
        """
        return self._histories["grad_norm"].moved_at

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Take in what has arrived of a sampled step; other names than `SIGNALS` are left alone."""
        for name in SIGNALS.keys() & values.keys():
            cause = SIGNALS[name].cause
            follows = cause is not None and self._histories[cause].was_raised()
            signal = self._histories[name].observe(step, values[name], self._clock(), follows)
            self.signals = self.signals | {name: signal}
            self._unread[name] = signal.level

    def is_learnt(self, name: str) -> bool:
        """Whether there is a window that the next value of it is held against."""
        return not math.isnan(self._histories[name].window.mean()[0])

    def level(self, name: str) -> Level:
        """What the newest value is that was not asked for yet; "calm" where none has come."""
        return self._unread.pop(name, "calm")

    def state_dict(self) -> dict[str, Any]:
        """The windows, as tensors by name."""
        return {name: history.window.state() for name, history in self._histories.items()}

    def load_state_dict(self, state: Any) -> None:
        """Take over the windows; peaks and recent values restart.

        Raises:
            StateError: not such a state; nothing was changed.
        """
        for name, window in checked_windows(state, self.state_dict()).items():
            self._histories[name].window.restore(window, np.array([0]), [0])

    def rebaseline(self) -> None:
        """Learn the windows anew."""
        for history in self._histories.values():
            history.learn_anew()

    def reset(self) -> None:
        """Forget peaks and recent values: the steps they came from are undone."""
        self.signals = {}
        self._unread = {}
        for history in self._histories.values():
            history.forget_recent()


@dataclass(frozen=True, slots=True)
class _Recent:
    step: int
    value: float
    level: Level


class _SignalHistory:
    """The history of one number."""

    def __init__(self, limits: Limits, thresholds: Thresholds) -> None:
        self.moved_at: int | None = None
        """The step from which on the median has been beyond its limit, once it was so for long."""
        self._limits = limits
        self._sigma = thresholds.sigma
        minimum = min(_MINIMUM, thresholds.window_minimum)
        size = min(limits.window or thresholds.window, thresholds.window)
        self.window = Window(1, size, minimum)
        self._peaks = HeldMaximum((3,), thresholds.peak_seconds)
        self._rows = HeldMaximum((1,), thresholds.peak_seconds)
        self._recent: deque[_Recent] = deque()
        self._row = 0
        self._row_began = 0
        self._nonfinite = 0

    def observe(self, step: int, value: float, now: float, follows: bool) -> Signal:
        finite = math.isfinite(value)
        self._nonfinite += not finite
        before = self._spread()
        level: Level = "nonfinite"
        if finite:
            high = _is_beyond(value, before, self._limits.high_factor, self._sigma)
            level = "high" if high and not follows else "calm"
        # One that is not finite is beyond every limit.
        self._recent.append(_Recent(step, value if finite else math.inf, level))
        left = self._recent.popleft() if len(self._recent) > _RECENT else None
        shifted = self._is_shifted(before)
        self._row = self._row + 1 if shifted else 0
        if self._row == 1:
            # The median moves when half of the values have.
            self._row_began = self._recent[_RECENT // 2 - 1].step
        if self._row == 0:
            self.moved_at = None
        elif self._row == SHIFTED_STEPS:
            self.moved_at = self._row_began
        if left is not None and math.isfinite(left.value):
            calm = np.array([left.level == "calm" and not shifted])
            self.window.add(np.array([left.value]), calm, ~calm)
        # What came before there was anything to compare it with is no peak: a loss that begins at
        # 11 would be held against the 4 that it has fallen to a minute later.
        mean, std = self._spread()
        judged = finite and not math.isnan(mean)
        excess = _excess(value, before) if level == "high" else (np.nan, np.nan)
        held = self._peaks.add(np.array([value if judged else np.nan, *excess]), now)
        peak, peak_zscore, peak_ratio = held.tolist()
        return Signal(
            peak=peak,
            peak_zscore=peak_zscore,
            peak_ratio=peak_ratio,
            window_mean=mean,
            window_std=std,
            nonfinite=self._nonfinite,
            level=level,
            shifted=float(self._rows.add(np.array([float(self._row)]), now)[0]),
        )

    def was_raised(self) -> bool:
        """Whether one of the last values could be the cause of another signal's."""
        mean, _ = self._spread()
        newest = list(self._recent)[-_FOLLOWING:]
        return any(recent.value > _CAUSE_FACTOR * mean for recent in newest)

    def learn_anew(self) -> None:
        self.window.clear()
        self._recent.clear()

    def forget_recent(self) -> None:
        self.moved_at = None
        self._row = 0
        self._recent.clear()
        self._peaks.clear()
        self._rows.clear()

    def _spread(self) -> tuple[float, float]:
        """The window's mean and deviation; NaN before there is one."""
        return float(self.window.mean()[0]), float(self.window.std()[0])

    def _is_shifted(self, spread: tuple[float, float]) -> bool:
        if len(self._recent) < _RECENT:
            return False
        median = statistics.median(recent.value for recent in self._recent)
        return _is_beyond(median, spread, self._limits.shift_factor, self._limits.shift_sigma)


def _is_beyond(value: float, spread: tuple[float, float], factor: float, sigma: float) -> bool:
    mean, std = spread
    # Before there is a window both are NaN, and nothing is beyond. A loss may be negative.
    return value - mean > sigma * std and value - mean > (factor - 1) * abs(mean)


def _excess(value: float, spread: tuple[float, float]) -> tuple[float, float]:
    """How far above the window: in deviations, and times its mean (NaN where that is not above 0).

    Taken when the value comes, since the window moves on while a peak is held.
    """
    mean, std = spread
    return (value - mean) / std, value / mean if mean > 0 else math.nan
