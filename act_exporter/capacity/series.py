"""How many series there are: on an exporter's page, in Prometheus beside them, and in a storm."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from act_exporter.attention import AttentionLogits
from act_exporter.capacity.decoder import Decoder
from act_exporter.collector import LayerPage
from act_exporter.exceptions import SettingError
from act_exporter.gradients import Gradients
from act_exporter.history import Thresholds
from act_exporter.layers import Watch, find_taps
from act_exporter.start import start_exporter
from act_exporter.torch_exporter import Reduce
from act_exporter.updates import Updates

MAX_SERIES: int = inspect.signature(start_exporter).parameters["max_series"].default
"""Of layer families on a page, unless the trainer says otherwise."""

RUN_SERIES = 80
"""On a page and of no layer, at most: loss, gradient norm, update, counts, errors by stage, a
device's memory, a guard's checkpoints."""

TARGET_SERIES = 5
"""That Prometheus makes of each target: `up`, and four about the scrape."""

# Made by the shipped rules, by the measurement in docs/scale.md.
_RECORDED_PER_TENSOR = 12
_RECORDED_PER_RUN = 30
_STORM_PER_TENSOR = 24
_STORM_PER_RUN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Of one run.

    Attributes:
        exporters: pages that are scraped.
        tensors: watched in each.
        placeless: of these, without a place of their own on the page (`max_series`).
        layer: series of a page that the layer families have.
        other: of gradients, updates and attentions by layer, and of the run, at most.
        recorded: made by the rules in health.
        storm: made besides where each tensor has each alert: `ALERTS` and `ALERTS_FOR_STATE`.
    """

    exporters: int
    tensors: int
    placeless: int
    layer: int
    other: int
    recorded: int
    storm: int

    @property
    def page(self) -> int:
        """On one page, at most."""
        return self.layer + self.other

    @property
    def total(self) -> int:
        """In Prometheus, in health."""
        return self.exporters * (self.page + TARGET_SERIES) + self.recorded

    @property
    def alerts(self) -> int:
        """Where each tensor has each alert: two series of each."""
        return self.storm // 2


def count(*, ranks: int, layers: int, watch: Watch, reduce: Reduce) -> Series:
    """The series of a run, as its exporters and the shipped rules would make them.

    Args:
        ranks: of the run.
        layers: transformer blocks of the model.
        watch: as `start_exporter`'s.
        reduce: likewise.

    Raises:
        SettingError: one of them cannot be.
        NothingToWatchError: `watch` selects nothing in a decoder.
    """
    for name, value in (("ranks", ranks), ("layers", layers)):
        if value < 1:
            raise SettingError(f"{name}={value} must be 1 at least")
    if reduce not in ("rank", "global"):
        raise SettingError(f"reduce={reduce!r} is neither 'rank' nor 'global'")
    model = Decoder(layers)
    taps = find_taps(model, watch)
    page = LayerPage(taps, {}, MAX_SERIES)
    shown = len(taps) if not page.dropped else page.series * len(taps) // LayerPage(taps, {}).series
    # The first of like tensors has none before it to be compared with; and the page of one rank
    # does not say which rank has the largest value.
    absent = len({tap.kind for tap in taps}) + (shown if reduce == "rank" else 0)
    gradients = Gradients(model, taps, which=True, scaler=None, on_error=_fail)
    updates = Updates(model, taps, enabled=True, on_error=_fail)
    attentions = AttentionLogits(taps, Thresholds().baseline_steps).layers
    try:
        by_layer = gradients.series + 2 * updates.series + 2 * len(attentions)
    finally:
        gradients.close()
        updates.close()
    return Series(
        exporters=ranks if reduce == "rank" else 1,
        tensors=len(taps),
        placeless=len(page.dropped),
        layer=page.series - absent,
        other=by_layer + RUN_SERIES,
        recorded=_RECORDED_PER_TENSOR * shown + _RECORDED_PER_RUN,
        storm=_STORM_PER_TENSOR * shown + _STORM_PER_RUN,
    )


def _fail(_stage: str, error: Exception) -> None:
    raise error
