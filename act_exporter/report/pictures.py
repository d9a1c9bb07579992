"""The pictures: loss, gradient and layers step by step, and the profile over depth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text
from matplotlib.transforms import blended_transform_factory

from act_exporter.levels import Tensor
from act_exporter.report import words
from act_exporter.report.incident import HARD
from act_exporter.report.piece import Floats
from act_exporter.report.recording import Recording
from act_exporter.report.timeline import Event

INK, FAINT = "#1b1f24", "#8a8f98"
"""Of text, and of lines that hold back."""

BAD, BEFORE, AT, AFTER, NONFINITE = "#d1242f", "#0a69d9", "#c8801e", "#1f8a3b", "#00a093"
"""On a page all of these become the page's own, light or dark."""

# From a tenth of the baseline to ten thousand times it. What is usual lets the page shine through,
# so that the same picture is right on a light and on a dark one.
_LOWEST, _HIGHEST = -1.0, 4.0  # log10 of the ratio
_RATIOS = LinearSegmentedColormap.from_list(
    "ratio",
    [
        (0.0, to_rgba("#0969da", 0.75)),
        (0.2, to_rgba("#8a8f98", 0.2)),
        (0.4, to_rgba("#f0a030", 0.8)),
        (0.6, to_rgba("#e0402a")),
        (1.0, to_rgba("#a0006d")),
    ],
)

_COLUMNS = 500
"""Rows of the recording in a picture; of more, several become one, by their maximum."""
_NAMES = 26
"""Names beside the heatmap: more do not fit."""
_NAME_LENGTH = 36
_TICKS = 8

_LETTER_SHARE = 0.013
"""A letter's part of the width."""

_LOG_FROM = 20.0
"""A number whose largest value is so many times its smallest is drawn on a logarithmic axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What is drawn of a recording.

    Attributes:
        recording: the run.
        window: the first row, and the one after the last.
        events: those with letters are marked.
        first: the tensor that went bad first, or None.
        origin: the row from which seconds are counted, or None.
    """

    recording: Recording
    window: tuple[int, int]
    events: Sequence[Event]
    first: Tensor | None
    origin: int | None

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """The rows with which the columns of a picture begin."""
        first, last = self.window
        return np.arange(first, last, -(-(last - first) // _COLUMNS))

    def column_of(self, row: int) -> int:
        """The column that a row is in."""
        return int(np.searchsorted(self.groups, row, side="right")) - 1


def draw_course(figure: Figure | SubFigure, view: View) -> None:
    """Loss, gradient norm and layers, one above the other, over the same steps."""
    known = [
        name
        for name in ("loss", "grad_norm")
        if not np.isnan(view.recording.numbers[name][slice(*view.window)]).all()
    ]
    count = len(view.recording.tensors)
    heights = [1.0] * len(known) + [min(max(count * 0.13, 2.2), 4.6)]
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0].tolist()
    for axis, name in zip(axes, known, strict=False):
        _draw_number(axis, view, name)
    _draw_layers(figure, axes[-1], view)
    _mark(axes, view)
    _label_steps(axes[-1], view)


def draw_profile(figure: Figure | SubFigure, view: View, rows: dict[str, slice]) -> None:
    """How far each tensor is from its baseline, over depth.

    Args:
        figure: where to.
        view: the run.
        rows: what is drawn, by its name: each tensor's maximum over these rows.
    """
    axis = figure.subplots()
    recording = view.recording
    colours = {"before": BEFORE, "at the first bad step": AT, "at its worst": BAD}
    place = np.arange(len(recording.tensors))
    for name, chosen in rows.items():
        ratio = _largest(recording.ratio[chosen], np.array([0]))[0]
        colour = colours.get(name, AFTER)
        axis.plot(place, ratio, color=colour, label=name, marker=".", markersize=4, linewidth=1.2)
        _draw_nonfinite(axis, place[recording.marks[chosen].any(axis=0)], colour)
    axis.set_yscale("log")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    axis.axhline(HARD, color=BAD, linewidth=0.8, linestyle="--")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.3), max(high, HARD * 3))
    axis.yaxis.set_major_formatter(lambda value, _: words.number(value))
    axis.text(
        *(1.005, HARD, "hard\nrule"),
        transform=axis.get_yaxis_transform(),
        va="center",
        color=BAD,
        fontsize=8,
    )
    axis.set_ylabel("times the baseline")
    axis.set_xlabel("watched tensors in the order of execution")
    places = _named_places(view, 14)
    axis.set_xticks(places, [_short(recording.tensors[at]) for at in places])
    for label, at in zip(axis.get_xticklabels(), places, strict=True):
        label.set(rotation=30, ha="right", rotation_mode="anchor")
        _emphasize(label, view, at)
    axis.legend(frameon=False, loc="upper left", ncols=len(rows), bbox_to_anchor=(0, 1.16))


def _draw_number(axis: Axes, view: View, name: str) -> None:
    values = _largest(view.recording.numbers[name][slice(*view.window), None], _starts(view))[:, 0]
    finite = values[np.isfinite(values)]
    columns = np.arange(len(values))
    shown = np.isfinite(values)
    # Not sampled at each row: what is between is drawn through.
    axis.plot(columns[shown], values[shown], color=BEFORE, linewidth=1.3)
    _draw_nonfinite(axis, columns[np.isinf(values)], NONFINITE)
    if finite.size and 0 < finite.min() * _LOG_FROM < finite.max():
        axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: words.number(value))
    axis.set_ylabel({"loss": "loss", "grad_norm": "gradient norm"}[name])


def _draw_layers(figure: Figure | SubFigure, axis: Axes, view: View) -> None:
    recording, window = view.recording, slice(*view.window)
    with np.errstate(divide="ignore"):
        ratio = np.log10(_largest(recording.ratio[window], _starts(view)))
    ratio = np.clip(ratio, _LOWEST, _HIGHEST)
    marks = np.maximum.reduceat(recording.marks[window], _starts(view), axis=0) > 0
    extent = (-0.5, len(ratio) - 0.5, len(recording.tensors) - 0.5, -0.5)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "extent": extent}
    image = axis.imshow(ratio.T, cmap=_RATIOS, vmin=_LOWEST, vmax=_HIGHEST, **options)
    colours = np.zeros((*marks.T.shape, 4))
    colours[marks.T] = to_rgba(NONFINITE)
    axis.imshow(colours, **options)
    axis.set_ylim(extent[2], extent[3])
    places = _named_places(view, _NAMES)
    axis.set_yticks(places, [_short(recording.tensors[at]) for at in places], fontsize=7.5)
    for label, at in zip(axis.get_yticklabels(), places, strict=True):
        _emphasize(label, view, at)
    bar = figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03, aspect=30)
    bar.set_ticks(range(int(_LOWEST), int(_HIGHEST) + 1), labels=_RATIO_WORDS)
    bar.set_label("times the baseline")
    bar.outline.set_visible(False)
    axis.text(
        *(1.01, 1.01, "■ NaN or Inf"),
        transform=axis.transAxes,
        color=NONFINITE,
        fontsize=8,
        va="bottom",
    )


_RATIO_WORDS = ["1/10", "1", "10", "100", "1,000", "10,000"]


def _mark(axes: list[Axes], view: View) -> None:
    """Lines at the events, through all axes, with their letters on top."""
    letters: dict[int, str] = defaultdict(str)
    for event in view.events:
        if event.letter and event.row is not None:
            letters[view.column_of(event.row)] += event.letter
    # What happened at nearly the same step: the letters stand beside each other.
    free = -math.inf
    for column, letter in sorted(letters.items()):
        for axis in axes:
            axis.axvline(column, color=INK, linewidth=0.8, linestyle=":")
        top = axes[0]
        place = max(column, free)
        free = place + len(view.groups) * _LETTER_SHARE * (len(letter) + 0.5)
        top.text(
            *(place, 1.03, letter),
            transform=blended_transform_factory(top.transData, top.transAxes),
            ha="center",
            va="bottom",
            fontweight="bold",
        )


def _label_steps(axis: Axes, view: View) -> None:
    recording, groups = view.recording, view.groups
    columns = np.unique(np.linspace(0, len(groups) - 1, _TICKS).round().astype(int))
    origin = None if view.origin is None else recording.time[view.origin]
    # As exactly as it takes to tell the ticks apart.
    first, last = recording.time[groups[0]], recording.time[groups[-1]]
    digits = int(last - first < 2 * _TICKS)
    labels = []
    for row in groups[columns]:
        label = f"{recording.step[row]:,}"
        if origin is not None:
            label += f"\n{recording.time[row] - origin:+,.{digits}f} s"
        labels.append(label)
    axis.set_xticks(columns, labels)
    after = "" if origin is None else ", and seconds after the first bad one"
    axis.set_xlabel(f"step, in the order of training{after}")


def _draw_nonfinite(axis: Axes, places: npt.NDArray[np.int64], colour: str) -> None:
    """Crosses at the upper edge, where no number is."""
    axis.plot(
        places,
        np.full(len(places), 0.97),
        transform=blended_transform_factory(axis.transData, axis.transAxes),
        linestyle="",
        marker="x",
        markersize=4,
        color=colour,
    )


def _named_places(view: View, limit: int) -> list[int]:
    """Tensors that are named: evenly, and the one that went bad first in any case."""
    tensors = view.recording.tensors
    every = -(-len(tensors) // limit)
    places = set(range(0, len(tensors), every))
    if view.first in tensors:
        first = tensors.index(view.first)
        # Room for it.
        places = {place for place in places if abs(place - first) >= every} | {first}
    return sorted(places)


def _emphasize(label: Text, view: View, at: int) -> None:
    if view.recording.tensors[at] == view.first:
        label.set(color=BAD, fontweight="bold")


def _short(tensor: Tensor) -> str:
    layer, side = tensor
    name = f"{layer} {'in' if side == 'input' else 'out'}"
    return name if len(name) <= _NAME_LENGTH else f"…{name[1 - _NAME_LENGTH :]}"


def _starts(view: View) -> npt.NDArray[np.int64]:
    return view.groups - view.window[0]


def _largest(values: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    largest: Floats = np.fmax.reduceat(values, starts, axis=0)
    return largest
