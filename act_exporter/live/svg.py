"""The page's pictures as inline SVG: no scripts, no styles of their own, a title in words."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from act_exporter.live.view import Profile
from act_exporter.rows import Array

_WIDTH, _HEIGHT = 120, 26
_POINTS = 60
_SPARE = 3  # above and below a line, for its thickness and the marks

# A settled tensor wanders by less than 2: less than that is drawn as the flat line that it is.
_LEAST_FACTOR = 2.0

_BROAD, _TALL = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 8, 22, 26
_BINS = 320


def sparkline(
    values: npt.NDArray[np.floating],
    generation: npt.NDArray[np.int64],
    title: str,
    *,
    log: bool,
    level: float = math.nan,
) -> str:
    """A line of the last steps; where they were not finite, a mark at its top.

    Args:
        values: (steps,), oldest first; NaN is a gap.
        generation: (steps,); where it changes a line is drawn.
        title: in words, for those who do not see it.
        log: whether the scale is logarithmic; values that are not above 0 are at its bottom.
        level: a dashed line, of the baseline.
    """
    if not len(values):
        return '<span class="none">no step yet</span>'
    size = max(1, math.ceil(len(values) / _POINTS))
    starts = np.arange(0, len(values), size)
    # The largest of each piece: a spike of one step must be seen.
    points = np.fmax.reduceat(values.astype(np.float64), starts)
    infinite = np.isinf(points)
    levels = _scaled(np.where(infinite, np.nan, points), log)
    base = float(_scaled(np.array(level), log))
    low, high = _range(levels, base, log)
    across = _WIDTH / max(len(points) - 1, 1)
    down = _HEIGHT - _SPARE - (levels - low) / (high - low) * (_HEIGHT - 2 * _SPARE)
    parts = []
    if math.isfinite(base):
        at = _HEIGHT - _SPARE - (base - low) / (high - low) * (_HEIGHT - 2 * _SPARE)
        parts.append(f'<path class="base" d="M0 {at:.0f}H{_WIDTH}"/>')
    for turn in np.flatnonzero(np.diff(generation)):
        parts.append(f'<path class="turn" d="M{(turn + 1) / size * across:.0f} 0V{_HEIGHT}"/>')
    parts.append(f'<path class="line" d="{_line(down, across)}"/>')
    if infinite.any():
        marks = "".join(f"M{i * across - 1:.0f} 1h3v4h-3z" for i in np.flatnonzero(infinite))
        parts.append(f'<path class="inf" d="{marks}"/>')
    return (
        f'<svg class="spark" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' preserveAspectRatio="none">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _scaled(values: Array, log: bool) -> Array:
    if not log:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Array = np.log10(np.where(values >= 0, values, np.nan))
    # Zero has no logarithm and is below all that has one.
    known = logs[np.isfinite(logs)]
    return np.where(np.isneginf(logs), known.min() - 1 if known.size else 0.0, logs)


def _range(levels: Array, base: float, log: bool) -> tuple[float, float]:
    known = levels[np.isfinite(levels)]
    if math.isfinite(base):
        known = np.append(known, base)
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    least = math.log10(_LEAST_FACTOR) if log else max(0.01 * max(abs(low), abs(high)), 1e-300)
    spare = max(0.0, least - (high - low)) / 2
    return low - spare, high + spare


def _line(down: Array, across: float) -> str:
    """Relative steps in whole numbers: half the bytes of places."""
    parts: list[str] = []
    known = ~np.isnan(down)
    xs = np.rint(np.arange(len(down)) * across)[known].astype(int).tolist()
    ys = np.rint(down[known]).astype(int).tolist()
    follows = np.append(False, known[:-1])[known].tolist()
    before_x = before_y = 0
    for x, y, joined in zip(xs, ys, follows, strict=True):
        if not joined:
            parts.append(f"M{x} {y}h0")  # a point alone is seen by its round cap
        elif y == before_y:
            parts.append(f"h{x - before_x}")
        else:
            parts.append(f"l{x - before_x} {y - before_y}")
        before_x, before_y = x, y
    return "".join(parts)


def profile(view: Profile, hard: float, title: str) -> str:
    """All tensors in the order of execution: a bar from the baseline to the largest value.

    Args:
        view: what is drawn; of many tensors the worst of each piece of the depth.
        hard: times the baseline at which the limit is drawn.
        title: in words.
    """
    shown = _binned(view)
    count = len(shown)
    peak, baseline = view.peak[shown], view.baseline[shown]
    with np.errstate(divide="ignore", invalid="ignore"):
        tops, bases = np.log10(peak), np.log10(baseline)
    known = np.concatenate([tops, bases, bases + math.log10(hard)])
    known = known[np.isfinite(known)]
    low = math.floor(known.min() if known.size else 0)
    high = max(math.ceil(known.max() if known.size else 1), low + 1)
    across = (_BROAD - _LEFT - _RIGHT) / count
    floor = _TALL - _BOTTOM

    def y(level: Array) -> list[float]:
        """Where levels are drawn; what has none, at the bottom."""
        down = floor - (np.nan_to_num(level, nan=low, posinf=high, neginf=low) - low) * (
            (floor - _TOP) / (high - low)
        )
        drawn: list[float] = np.round(np.clip(down, _TOP, floor), 1).tolist()
        return drawn

    middle = [round(_LEFT + (place + 0.5) * across, 1) for place in range(count)]
    has_base, has_top = np.isfinite(bases), np.isfinite(tops)
    top, base, limit = y(tops), y(bases), y(bases + math.log10(hard))
    bars: dict[bool, list[str]] = {False: [], True: []}
    for place, bad in enumerate(view.bad[shown].tolist()):
        if has_top[place]:
            # Half a unit at least, so that a healthy one is seen.
            bars[bad].append(f"M{middle[place]:g} {base[place]:g}V{top[place] - 0.5:g}")
    parts = [_plateau(view, shown, middle, across), _axis(low, high, y(np.arange(low, high + 1.0)))]
    for name, levels in (("base", base), ("limit", limit)):
        drawn = [
            f"M{middle[place] - across / 2:.1f} {levels[place]:g}h{across:.1f}"
            for place in np.flatnonzero(has_base).tolist()
        ]
        parts.append(f'<path class="{name}" d="{"".join(drawn)}"/>')
    thick = max(1.0, min(8.0, 0.6 * across))
    for bad, drawn in bars.items():
        name = "bad" if bad else "bar"
        parts.append(f'<path class="{name}" stroke-width="{thick:.1f}" d="{"".join(drawn)}"/>')
    crosses = [
        f"M{middle[place] - 3:g} {_TOP}l6 6m0-6l-6 6"
        for place in np.flatnonzero(view.nonfinite[shown]).tolist()
    ]
    parts.append(f'<path class="inf" d="{"".join(crosses)}"/>')
    diamonds = [
        f"M{middle[place]:g} {top[place] - 9:g}l4 5-4 5-4-5z"
        for place in np.flatnonzero(view.spike[shown]).tolist()
    ]
    parts.append(f'<path class="spike" d="{"".join(diamonds)}"/>')
    if view.first is not None:
        begun = middle[int(np.searchsorted(shown, view.first))]
        anchor = "start" if begun < _BROAD / 2 else "end"
        parts.append(
            f'<path class="first" d="M{begun:g} {_TOP}V{floor}"/>'
            f'<path class="inf" d="M{begun - 6:g} {floor + 11}h12l-6-11z"/>'
            f'<text class="mark" x="{begun:g}" y="14" text-anchor="{anchor}">first</text>'
        )
    return (
        f'<svg class="profile" role="img" viewBox="0 0 {_BROAD} {_TALL}">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _binned(view: Profile) -> npt.NDArray[np.int64]:
    """Places to draw: all, or of each piece of the depth the one that says most."""
    count = len(view.taps)
    if count <= _BINS:
        return np.arange(count)
    # A gap counts less than any number; what began it all, more than all.
    weight = np.nan_to_num(view.ratio, nan=-1.0, posinf=1e300) + np.where(view.spike, 1e9, 0.0)
    weight = np.where(view.nonfinite, 1e301, weight)
    if view.first is not None:
        weight[view.first] = np.inf
    ends = np.linspace(0, count, _BINS + 1).astype(np.int64)
    return np.array([a + int(np.argmax(weight[a:b])) for a, b in itertools.pairwise(ends)])


def _axis(low: int, high: int, levels: Sequence[float]) -> str:
    """Powers of ten, at most six of them; `levels` is where they are drawn."""
    every = math.ceil((high - low) / 6)
    parts = []
    for power, at in list(zip(range(low, high + 1), levels, strict=True))[::every]:
        name = f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at:g}H{_BROAD - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:g}" text-anchor="end">{name}</text>')
    return "".join(parts)


def _plateau(
    view: Profile, shown: npt.NDArray[np.int64], middle: Sequence[float], across: float
) -> str:
    if view.plateau is None:
        return ""
    first, last = np.searchsorted(shown, view.plateau).clip(max=len(shown) - 1).tolist()
    left, right = middle[first] - across / 2, middle[last] + across / 2
    return (
        f'<path class="plateau" d="M{left:.1f} {_TOP}H{right:.1f}V{_TALL - _BOTTOM}H{left:.1f}z"/>'
        f'<text class="mark" x="{(left + right) / 2:.0f}" y="14" text-anchor="middle">'
        "plateau</text>"
    )
