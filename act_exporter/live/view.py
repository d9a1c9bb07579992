"""What the page shows, as data: from the newest snapshots, for one query.

Everything belongs to one moment; no tensor is touched, and nothing waits for the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from act_exporter.collector import Training
from act_exporter.history import Onset, Thresholds
from act_exporter.live.alerts import Shipped
from act_exporter.live.conditions import Holding, Measures, holding
from act_exporter.live.guard import Guard
from act_exporter.live.incident import Incident
from act_exporter.live.query import Query
from act_exporter.live.rows import Row, ordered, rows_of
from act_exporter.live.trail import Event, Steps, Trail
from act_exporter.rows import Array
from act_exporter.taps import Tap

ROWS = 40
"""Rows of the table on a page: some 1 kB each with a sparkline, so that all is below 100 kB."""

# The rate of the last steps: long enough for one slow step not to show, short enough to be of now.
_RATE_STEPS = 50

State = Literal["anomaly", "warning", "waiting", "well"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the page gets everything from: all of it can be read in any thread.

    Attributes:
        run: the run's name.
        rank: the rank, or "all".
        taps: what is watched, in the order of all arrays.
        thresholds: that the trainer judges by.
        max_overhead: share of training time that looking may cost, or None for no limit.
        training: gives the newest snapshot.
        trail: the last steps, and what happened.
        registry: that a guard's metrics may have joined.
        errors: stage to number of errors.
        faults: layer to the factor of an injected fault.
    """

    run: str
    rank: str
    taps: Sequence[Tap]
    thresholds: Thresholds
    max_overhead: float | None
    training: Callable[[], Training]
    trail: Trail
    registry: CollectorRegistry
    errors: Mapping[str, int]
    faults: Callable[[], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """All tensors that ran, in the order of execution; arrays are (tensors,).

    Attributes:
        taps: which they are.
        peak: their peaks.
        baseline: their baselines; NaN where there is none.
        ratio: the quotient.
        bad: whether a serious rule is broken.
        nonfinite: whether elements are not finite.
        spike: whether they stand out from their like in the blocks before.
        first: place of the one in which the anomaly began.
        plateau: places of the ends of a plateau.
    """

    taps: npt.NDArray[np.int64]
    peak: Array
    baseline: Array
    ratio: Array
    bad: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    spike: npt.NDArray[np.bool_]
    first: int | None
    plateau: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One page.

    Attributes:
        source: where it is from.
        query: what was asked for; its page is one that there is.
        at: when, Unix seconds.
        state: of the run, in one word.
        training: the snapshot.
        steps: the last steps, without tensors.
        rate: steps a second; NaN while it is not known.
        incident: the newest anomaly that a layer began, standing or over.
        events: what happened, oldest first.
        holding: the alerts' conditions that hold.
        guard: checkpoints and rollbacks; None without a guard.
        rows: of this page of the table.
        found: rows on all pages.
        pages: how many those are.
        worst: the largest multiple of a baseline, over all tensors; NaN without baselines.
        baselines: how many tensors have one.
        profile: by depth; None before the first sample.
    """

    source: Source
    query: Query
    at: float
    state: State
    training: Training
    steps: Steps
    rate: float
    incident: Incident | None
    events: Sequence[Event]
    holding: Sequence[Holding]
    guard: Guard | None
    rows: Sequence[Row]
    found: int
    pages: int
    worst: float
    baselines: int
    profile: Profile | None

    @property
    def onset(self) -> Onset | None:
        """Of the anomaly that stands."""
        return self.training.layers.onset if self.training.layers is not None else None

    def baseline_of(self, layer: str, tensor: str) -> float:
        """NaN where there is none."""
        index = _index(self.source, layer, tensor)
        layers = self.training.layers
        return math.nan if index is None or layers is None else float(layers.baseline[index])


def view_of(source: Source, shipped: Shipped, query: Query, at: float) -> View:
    """What there is to see at a time (Unix seconds).

    Args:
        source: where from.
        shipped: the alerts.
        query: what is asked for.
        at: now.
    """
    training, events, errors = source.training(), source.trail.events, dict(source.errors)
    layers, taps = training.layers, source.taps
    guard = Guard.of(source.registry)
    growth_limit = shipped.limit("act_layer_absmax_growth_ratio")
    measures = Measures.of(layers, growth_limit) if layers is not None else None
    onset = layers.onset if layers is not None else None
    first = _index(source, onset.layer, onset.tensor) if onset is not None else None
    order = ordered(taps, layers, measures, query, first)
    pages = max(1, math.ceil(len(order) / ROWS))
    query = query if query.page <= pages else replace(query, page=1)
    shown = order[(query.page - 1) * ROWS : query.page * ROWS]
    incident = Incident.newest(events)
    began = None
    if incident is not None:
        began = _index(source, incident.onset.layer, incident.onset.tensor)
    steps = source.trail.read(shown if began is None else [*shown, began])
    if incident is not None and began is not None:
        incident = incident.measured(steps, steps.absmax[:, -1])
    holds = holding(shipped, training, measures, guard, errors, at)
    return View(
        source=source,
        query=query,
        at=at,
        state=_state(training, holds),
        training=training,
        steps=steps,
        rate=_rate(steps),
        incident=incident,
        events=events,
        holding=holds,
        guard=guard,
        rows=rows_of(shown, taps, layers, measures, steps, first),
        found=len(order),
        pages=pages,
        worst=math.nan if measures is None else float(np.fmax.reduce(measures.ratio)),
        baselines=0 if layers is None else int(np.isfinite(layers.baseline).sum()),
        profile=_profile(training, measures, shipped, first),
    )


def _index(source: Source, layer: str, tensor: str) -> int | None:
    found = (i for i, t in enumerate(source.taps) if (t.layer, t.tensor) == (layer, tensor))
    return next(found, None)


def _state(training: Training, holds: Sequence[Holding]) -> State:
    onset = training.layers is not None and training.layers.onset is not None
    severities = {one.alert.severity for one in holds}
    if onset or training.verdict is not None or "critical" in severities:
        return "anomaly"
    if "warning" in severities:
        return "warning"
    return "waiting" if training.layers is None else "well"


def _rate(steps: Steps) -> float:
    """Of the newest generation; a rollback takes its own time."""
    ours = steps.generation == steps.generation[-1:]
    step, time = steps.step[ours][-_RATE_STEPS:], steps.time[ours][-_RATE_STEPS:]
    if len(step) < 2 or time[-1] <= time[0]:
        return math.nan
    return float((step[-1] - step[0]) / (time[-1] - time[0]))


def _profile(
    training: Training, measures: Measures | None, shipped: Shipped, first: int | None
) -> Profile | None:
    layers = training.layers
    if layers is None or measures is None:
        return None
    ran = np.flatnonzero(~np.isnan(layers.depth))
    taps = ran[np.argsort(layers.depth[ran], kind="stable")]
    if not taps.size:
        return None
    ends = layers.plateau()
    depth = layers.depth[taps]
    return Profile(
        taps=taps,
        peak=layers.peak[taps],
        baseline=layers.baseline[taps],
        ratio=measures.ratio[taps],
        bad=measures.serious[taps] > 0,
        nonfinite=measures.consecutive["nonfinite"][taps] > 0,
        spike=shipped.alerts["ActLayerDepthSpike"].holds(measures.jump)[taps],
        first=next(iter(np.flatnonzero(taps == first).tolist()), None),
        plateau=None
        if ends is None
        else (int(np.searchsorted(depth, ends[0])), int(np.searchsorted(depth, ends[1]))),
    )
