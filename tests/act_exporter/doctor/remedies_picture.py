"""Draws docs/images/doctor-remedies.png: where the article's fault is, and what mends it.

    python -m tests.act_exporter.doctor.remedies_picture [-o docs/images/doctor-remedies.png]

All numbers are measured anew, in half a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from act_exporter.doctor.remedies import add_norm, initialise, scale_for_depth, set_gains
from act_exporter.report.drawing import png
from act_exporter.report.pictures import AFTER, BAD, BEFORE, FAINT, INK
from deploy.demo.servers import REPOSITORY
from tests.act_exporter.doctor.remedies.remedied import (
    Block,
    Normalised,
    NormalisedStable,
    Remedy,
    bound_features,
    remedied,
)
from tests.act_exporter.doctor.seed_blocks import (
    LAYERS,
    StableBlock,
    UnstableBlock,
    block_inputs,
    contexts,
)

SHORT, LONG = 10, 512
FLOAT16 = 65_504
LINE = 2.6  # times as large is a line of text higher, on the axis of depths
LEFT, RIGHT = -0.005, 1.01  # of the axis of remedies
TITLE = "Loud inside, calm outside: only dividing by the sum of the weights ends the growth"
TEXT = (
    "Largest |x| in the article's six blocks of width 64, at a sequence of 10 and 512. Above: what"
    " goes into each block, and what the attention inside makes (the context, before its output"
    " projection). Below: the loudest context, and the last block's input, after each remedy of"
    " act_exporter.doctor.remedies. A norm after the attention keeps the stream calm and leaves the"
    " context as loud as it was."
)


@dataclass(frozen=True)
class Levels:
    """Largest |x| at the two sequences."""

    inputs: dict[int, list[float]]
    contexts: dict[int, list[float]]


def nothing(_model: Any) -> None:
    pass


ROWS: tuple[tuple[str, tuple[tuple[str, Block, Remedy], ...]], ...] = (
    (
        "unstable block",
        (
            ("as it is", UnstableBlock, nothing),
            ("scale_for_depth", UnstableBlock, lambda m: depth(m)),
            ("add_norm, after", UnstableBlock, lambda m: add_norm(m, "*.out_proj")),
            ("initialise, std 0.02", UnstableBlock, lambda m: small(m)),
            ("set_gains, 0.1", UnstableBlock, lambda m: set_gains(m, 0.1)),
            ("softmax_features", UnstableBlock, bound_features),
            ("linear_attention", Normalised, bound_features),
        ),
    ),
    (
        '"stable" block',
        (
            ("as it is", StableBlock, nothing),
            ("scale_for_depth", StableBlock, lambda m: depth(m)),
            ("add_norm, after", StableBlock, lambda m: add_norm(m, "*.out_proj")),
            ("softmax_features", StableBlock, bound_features),
            ("linear_attention", NormalisedStable, bound_features),
        ),
    ),
)


def depth(model: Any) -> None:
    # Each block adds its attention's and its feed-forward's.
    scale_for_depth(model, "*.out_proj.weight", additions=2 * LAYERS)


def small(model: Any) -> None:
    initialise(model, "*.qkv_proj.weight", std=0.02)


def levels(block: Block, remedy: Remedy) -> Levels:
    inputs, inside = {}, {}
    for sequence in (SHORT, LONG):
        model, x = remedied(block, sequence, remedy)
        inputs[sequence] = [seen.absmax for seen in block_inputs(model, x)]
        inside[sequence] = [seen.absmax for seen in contexts(model, x)]
    return Levels(inputs, inside)


def draw_depths(measured: dict[str, list[Levels]], figure: Figure | SubFigure) -> None:
    """Where the fault is: by depth, before any remedy."""
    axes = figure.subplots(1, len(measured), sharey=True)
    for axis, (title, rows) in zip(axes, measured.items(), strict=True):
        ends: list[tuple[float, str, str]] = []
        for of, colour, name in (
            (rows[0].contexts, BAD, "context inside"),
            (rows[0].inputs, BEFORE, "block input"),
        ):
            for sequence, style, fill in ((LONG, "-", colour), (SHORT, "--", "white")):
                axis.plot(
                    of[sequence], color=colour, linestyle=style, marker="o", markerfacecolor=fill
                )
                ends.append((of[sequence][-1], f"{name}, {sequence}", colour))
        label_ends(axis, ends)
        float16(axis)
        axis.set_yscale("log")
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_xlabel("block")
        axis.set_xlim(-0.2, LAYERS + 0.9)
        axis.set_xticks(range(LAYERS))
        axis.yaxis.set_major_formatter("{x:,g}")
    axes[0].set_ylabel("largest |x|")
    axes[-1].annotate(
        f"float16's largest: {FLOAT16:,}",
        (0, FLOAT16),
        xytext=(0, 4),
        textcoords="offset points",
        color=FAINT,
    )


def label_ends(axis: Any, ends: list[tuple[float, str, str]]) -> None:
    """Beside the lines' ends, no label over another."""
    lowest = 0.0
    for end, label, colour in sorted(ends):
        lowest = max(end, lowest * LINE)
        axis.annotate(
            label,
            (LAYERS - 1, lowest),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )


def draw_remedies(measured: dict[str, list[Levels]], figure: Figure | SubFigure) -> None:
    """What each remedy does to the loudest context and to the last block's input."""
    axis = figure.subplots()
    names: list[tuple[int, str]] = []
    row = 0
    for title, rows in measured.items():
        beside(axis, row, LEFT, "right", text=title, fontweight="bold")
        beside(axis, row, RIGHT, "left", text=f"context, {SHORT} → {LONG}", color=FAINT)
        for (name, _, _), level in zip(dict(ROWS)[title], rows, strict=True):
            row += 1
            names.append((row, name))
            draw_row(axis, row, level)
        row += 2
    float16(axis, vertical=True)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("largest |x|")
    axis.set_yticks([at for at, _ in names], [name for _, name in names])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(row - 1.3, -0.7)
    axis.set_xlim(0.004, 400_000)
    axis.legend(handles=legend(), loc="lower right", facecolor="white", edgecolor="none")


def draw_row(axis: Any, row: int, level: Levels) -> None:
    short, long = (max(level.contexts[sequence]) for sequence in (SHORT, LONG))
    # What is a mean of values varies by less than this; what is a sum grows some fiftyfold.
    colour = AFTER if long < 2 * short else BAD
    axis.plot([short, long], [row, row], color=colour, linewidth=2, alpha=0.5)
    axis.plot(long, row, "o", color=colour)
    axis.plot(short, row, "o", color=colour, markerfacecolor="white")
    axis.plot(level.inputs[LONG][-1], row, "D", color=BEFORE, markersize=5)
    beside(axis, row, RIGHT, "left", text=f"{number(short)} → {number(long)}", color=colour)


def beside(axis: Any, row: int, x: float, side: str, *, text: str, **looks: Any) -> None:
    axis.text(x, row, text, ha=side, va="center", transform=axis.get_yaxis_transform(), **looks)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def legend() -> list[Line2D]:
    def handle(marker: str, fill: str, colour: str, label: str) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, markerfacecolor=fill, color=colour, label=label
        )

    return [
        handle("o", "white", INK, f"loudest context, sequence {SHORT}"),
        handle("o", INK, INK, f"loudest context, sequence {LONG}"),
        Line2D([], [], color=AFTER, linewidth=2, label="does not grow with the sequence"),
        Line2D([], [], color=BAD, linewidth=2, label="grows with the sequence"),
        handle("D", BEFORE, BEFORE, f"last block's input, sequence {LONG}"),
    ]


def float16(axis: Any, *, vertical: bool = False) -> None:
    line: Callable[..., Any] = axis.axvline if vertical else axis.axhline
    line(FLOAT16, color=FAINT, linewidth=0.8, linestyle=":")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=REPOSITORY / "docs" / "images" / "doctor-remedies.png",
    )
    out: Path = parser.parse_args().out
    measured = {title: [levels(block, remedy) for _, block, remedy in rows] for title, rows in ROWS}
    pictures = [(partial(draw_depths, measured), 3.4), (partial(draw_remedies, measured), 4.6)]
    png(out, TITLE, TEXT, pictures)


if __name__ == "__main__":
    main()
