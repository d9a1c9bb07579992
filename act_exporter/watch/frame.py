"""One frame: all that is shown, fitted into a terminal's columns and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from act_exporter.watch import exporters, worst
from act_exporter.watch.conditions import Holding, holding
from act_exporter.watch.depths import STYLES, chart
from act_exporter.watch.page import Page
from act_exporter.watch.source import Reading
from act_exporter.watch.trail import Trail
from act_exporter.watch.words import (
    Level,
    clock,
    count,
    duration,
    hard_of,
    headline,
)
from act_exporter.watch.worst import Worst, worst_of

# Rows of a terminal below which less is told of each thing.
_LOW = 30

# Layers for which the chart leaves room, and the chart's own rows: fewer show nothing.
_FEW_LAYERS = 5
_CHART_ROWS = (4, 8)

# Under the chart and over it: its head, and the name of the first bad layer.
_BESIDE_CHART = 2

_SEVERITIES: dict[str, Level] = {"critical": "bad", "warning": "warning", "info": "unknown"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What is known at a moment, for rich to draw.

    Attributes:
        readings: of each exporter.
        trail: what was read since watching began.
        now: monotonic seconds.
        wall: Unix seconds.
        layers: rows of the table of layers, where there is room.
        height: rows of the screen that it must fit into; None where it may go on below.
        corner: what stands at the right of the first line.
    """

    readings: Sequence[Reading]
    trail: Trail
    now: float
    wall: float
    layers: int
    height: int | None = None
    corner: str = ""

    @property
    def pages(self) -> list[Page]:
        return [reading.page for reading in self.readings if reading.page is not None]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, self.height
        low = height is not None and height < _LOW
        held = holding(self.pages)
        top = [
            [self._title(width)],
            self._headline(console, held, width, 4 if low else 20),
            exporters.table(
                self.readings,
                self.trail,
                self.now,
                width=width,
                most=len(self.readings) if height is None else max(height // 5, 1),
                ascii_only=options.ascii_only,
            ),
            [self._recovery()],
            _conditions(held, 3 if low else 8),
        ]
        # What is not cut by a terminal's height has room for all.
        space = 1000 if height is None else height - sum(len(section) for section in top)
        below = self._below(worst_of(self.pages), width, space, options.ascii_only)
        sections = [section for section in (*top, *below) if section]
        gaps = height is None or sum(len(section) + 1 for section in sections) <= height
        lines: list[Text] = []
        for section in sections:
            lines += [Text(), *section] if lines and gaps else section
        for line in lines[:height]:
            line.truncate(width, overflow="crop" if options.ascii_only else "ellipsis")
            yield line

    def _title(self, width: int) -> Text:
        parts = ["act-exporter watch"]
        for what, found in (
            ("run", {page.run for page in self.pages}),
            ("generation", {page.generation for page in self.pages}),
        ):
            if len(found) == 1:
                parts.append(f"{what} {found.pop()}")
        line = Text("  ".join([*parts, f"{clock(self.wall)} UTC"]), "bold", no_wrap=True)
        gap = width - line.cell_len - len(self.corner)
        if self.corner and gap > 1:
            line.append(f"{'':{gap}}{self.corner}", "not bold dim")
        return line

    def _headline(
        self, console: Console, held: Sequence[Holding], width: int, most: int
    ) -> list[Text]:
        """As many sentences as have room in `most` lines."""
        told = headline(self.readings, held)
        text = Text(f" {told.state.words} ", f"reverse {STYLES[told.state.level]}")
        lines = [text]
        for sentence in told.sentences:
            text = Text.assemble(text, f" {sentence}")
            longer = list(text.wrap(console, width))
            if len(longer) > most:
                break
            lines = longer
        return lines

    def _recovery(self) -> Text:
        for page in self.pages:
            if not math.isnan(page.value("act_rollbacks_total")):
                return Text(_guarded(page), no_wrap=True)
        return Text("no guard on these pages: no checkpoints, no rollbacks", "dim", no_wrap=True)

    def _below(
        self, rows: Sequence[Worst], width: int, space: int, ascii_only: bool
    ) -> list[list[Text]]:
        """The worst layers, and the profile over depth where there is room for both."""
        wanted = min(self.layers, len(rows))
        least, most = _CHART_ROWS
        profile: list[Text] = []
        if space - (min(wanted, _FEW_LAYERS) + 1) >= least + _BESIDE_CHART:
            height = min(max(space - (wanted + 1) - _BESIDE_CHART, least), most)
            profile = self._profile(rows, width, height, ascii_only)
        shown = min(wanted, max(space - len(profile) - 1, 0))
        layers = worst.table(rows, self.trail, most=shown, width=width, ascii_only=ascii_only)
        return [layers if rows else [], profile]

    def _profile(
        self, rows: Sequence[Worst], width: int, height: int, ascii_only: bool
    ) -> list[Text]:
        """Of the run whose layer is the worst."""
        if not rows:
            return []
        page = rows[0].page
        lines = chart(
            [own.layer for own in rows if own.page.run == page.run],
            page.onset,
            hard=hard_of(page),
            width=width,
            height=height,
            ascii_only=ascii_only,
        )
        signs = ".#!" if ascii_only else "░█×"  # noqa: RUF001  # a sign, no letter
        head = (
            f"largest values by depth of {page.run}: {signs[0]} up to the baseline,"
            f" {signs[1]} above it, {signs[2]} not finite"
        )
        return [Text(head, "bold", no_wrap=True), *lines] if lines else []


def _conditions(held: Sequence[Holding], most: int) -> list[Text]:
    if not held:
        return [Text("no alert's condition holds", "dim", no_wrap=True)]
    lines = []
    for holds in held[:most]:
        line = Text(
            f"{holds.alert.severity:8} ", STYLES[_SEVERITIES[holds.alert.severity]], no_wrap=True
        )
        lines.append(line.append(f"{holds.alert.name}: {holds.words}", "default not bold"))
    if more := [holds.alert.name for holds in held[most:]]:
        lines.append(Text(f"and {', '.join(more)}", "dim", no_wrap=True))
    return lines


def _guarded(page: Page) -> str:
    """Checkpoints and rollbacks, of the rank that tells of them."""
    newest = page.value("act_checkpoint_last_step")
    if math.isnan(newest):
        checkpoints = "no checkpoint yet"
    else:
        age = page.time - page.value("act_checkpoint_last_success_timestamp_seconds")
        checkpoints = f"newest checkpoint at step {newest:.0f}, {duration(max(age, 0.0))} old"
    healths = page.by("act_checkpoints", "health").items()
    kept = ", ".join(f"{count(number)} {health}" for health, number in healths if number)
    failures = page.value("act_checkpoint_failures_total")
    parts = [
        f"{checkpoints} ({kept})" if kept else checkpoints,
        *([f"{count(failures)} saves failed"] if failures > 0 else []),
        f"rollbacks: {count(page.value('act_rollbacks_total'))} made,"
        f" {count(page.value('act_rollback_budget_remaining'))} left",
    ]
    return "; ".join(parts)
