"""A report as a picture: activations in the order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.report import Report
from act_exporter.doctor.trace import Seen
from act_exporter.report import words
from act_exporter.report.drawing import png
from act_exporter.report.pictures import AT, BAD, BEFORE, FAINT, NONFINITE

_HEIGHT = 6.4  # inches
_NAMES = 24
"""Names below the picture: more do not fit."""
_NAME_LENGTH = 34
_MARKED = 5
"""Findings with a number in the picture: more lie on top of each other."""


def write_picture(file: Path, report: Report, title: str) -> None:
    """Mean |x| and absmax of each module's input and output, on a linear and a logarithmic axis.

    Args:
        file: where to, a PNG.
        report: its profile is drawn, its first findings are marked.
        title: a line.

    Raises:
        OSError: it could not be written.
    """
    marked = _marked(report)
    listed = [
        f"({number}) {finding.fault} at {finding.layer}"
        for number, (finding, _) in enumerate(marked, 1)
    ]
    text = f"{report.headline}. {', '.join(listed)}"
    png(file, title, text, [(lambda figure: _draw(figure, report.profile, marked), _HEIGHT)])


def _marked(report: Report) -> list[tuple[Finding, int]]:
    """Findings at a layer of the profile, each with the place of its first tensor."""
    places: dict[str, int] = {}
    # Its first output, or its input where the forward ended inside it.
    for side in ("output", "input"):
        for place, seen in enumerate(report.profile):
            if seen.place.side == side:
                places.setdefault(seen.layer, place)
    apart = _every(report.profile)
    found: list[tuple[Finding, int]] = []
    for finding in report.findings:
        if finding.layer not in places or finding.severity == "info":
            continue
        place = places[finding.layer]
        # Beside an earlier one it has no room of its own.
        near = (other for _, other in found if abs(other - place) < apart)
        found.append((finding, next(near, place)))
    return found[:_MARKED]


def _draw(
    figure: Figure | SubFigure, profile: Sequence[Seen], marked: list[tuple[Finding, int]]
) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axis, scale in ((upper, "linear"), (lower, "log")):
        _draw_profile(axis, profile)
        axis.set_yscale(scale)
        axis.yaxis.set_major_formatter(lambda value, _: words.number(value))
        axis.set_ylabel(f"|x|, {'logarithmic' if scale == 'log' else scale}")
        for _, place in marked:
            axis.axvline(place, color=BAD, linewidth=0.9, linestyle=":")
    for place, numbers in _by_place(marked).items():
        upper.text(
            *(place, 1.02, numbers),
            transform=upper.get_xaxis_transform(),
            ha="center",
            color=BAD,
            fontweight="bold",
        )
    _name(lower, profile, {place for _, place in marked})
    lower.set_xlabel("inputs and outputs of modules, in the order of execution")
    upper.legend(frameon=False, loc="upper left", ncols=3, bbox_to_anchor=(0, 1.2))


def _draw_profile(axis: Axes, profile: Sequence[Seen]) -> None:
    places = np.arange(len(profile))
    for name, colour, values in (
        ("absmax", AT, [seen.absmax for seen in profile]),
        ("mean |x|", BEFORE, [seen.mean_abs for seen in profile]),
    ):
        axis.plot(places, values, color=colour, label=name, marker=".", markersize=3, linewidth=1.1)
    bad = [place for place, seen in enumerate(profile) if seen.nonfinite]
    if bad:
        # At the upper edge, where no number is.
        axis.plot(
            bad,
            np.full(len(bad), 0.97),
            transform=axis.get_xaxis_transform(),
            linestyle="",
            marker="x",
            markersize=5,
            color=NONFINITE,
            label="has NaN or Inf",
        )
    axis.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)


def _by_place(marked: list[tuple[Finding, int]]) -> dict[int, str]:
    numbers: dict[int, str] = {}
    for number, (_, place) in enumerate(marked, 1):
        numbers[place] = f"{numbers[place]}, {number}" if place in numbers else str(number)
    return numbers


def _name(axis: Axes, profile: Sequence[Seen], marked: set[int]) -> None:
    every = _every(profile)
    # Room for those that are marked.
    evenly = [
        place
        for place in range(0, len(profile), every)
        if all(abs(place - other) >= every for other in marked)
    ]
    places = sorted({*evenly, *marked})
    axis.set_xticks(places, [_short(profile[place]) for place in places], fontsize=7.5)
    for label, place in zip(axis.get_xticklabels(), places, strict=True):
        label.set(rotation=40, ha="right", rotation_mode="anchor")
        if place in marked:
            label.set(color=BAD, fontweight="bold")


def _every(profile: Sequence[Seen]) -> int:
    """How far apart names must be."""
    return max(1, -(-len(profile) // _NAMES))


def _short(seen: Seen) -> str:
    name = f"{seen.layer} {'in' if seen.place.side == 'input' else 'out'}"
    return name if len(name) <= _NAME_LENGTH else f"…{name[1 - _NAME_LENGTH :]}"
