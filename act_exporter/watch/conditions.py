"""Which of the shipped alerts' conditions hold on the pages, by the numbers of the rule files.

Left to Prometheus is what needs minutes of history: forecasts, counters' increases, alerts with a
`for`. And it holds an alert for people for 6 minutes longer than what is said here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from act_exporter.history import Thresholds
from act_exporter.live.alerts import SEVERITIES, Alert, Shipped
from act_exporter.watch.page import Layer, Page

Found = tuple[str, float]
"""Where, or "" for the run as a whole, and how much."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What an alert looks at on a page, and how to say it.

    Attributes:
        alert: its name.
        measure: gives what is compared.
        words: with "{:...}" for the number, and "{where} " before it where there is a place.
        threshold: the rule of `act_rule_threshold` by which the trainer judges, if it does.
    """

    alert: str
    measure: Callable[[Page], Iterable[Found]]
    words: str
    threshold: str | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """An alert whose condition holds, in words."""

    alert: Alert
    words: str


def holding(pages: Sequence[Page]) -> list[Holding]:
    """The alerts whose conditions hold on any of the pages, the most severe first.

    Of several places an alert names the worst one.
    """
    found = []
    for condition in _CONDITIONS:
        worst: tuple[Alert, str, float] | None = None
        for page in pages:
            alert = _judged_by(condition, page)
            for where, value in condition.measure(page):
                if alert.holds(np.array(value)) and (worst is None or _is_worse(value, worst)):
                    worst = alert, where, value
        if worst is not None:
            alert, where, value = worst
            found.append(Holding(alert, f"{where} {condition.words.format(value)}".strip()))
    return sorted(found, key=lambda holds: SEVERITIES.index(holds.alert.severity))


@functools.cache
def shipped() -> Shipped:
    """The shipped alerts."""
    return Shipped(Thresholds())


def _is_worse(value: float, worst: tuple[Alert, str, float]) -> bool:
    alert, _, before = worst
    return value < before if alert.sign.startswith("<") else value > before


def _judged_by(condition: Condition, page: Page) -> Alert:
    alert = shipped().alerts[condition.alert]
    own = page.by("act_rule_threshold", "rule").get(condition.threshold or "")
    return alert if own is None else replace(alert, limit=own)


def _layers(value: Callable[[Layer], float]) -> Callable[[Page], Iterator[Found]]:
    return lambda page: ((layer.name, value(layer)) for layer in page.layers.values())


def _run(metric: str) -> Callable[[Page], Iterator[Found]]:
    return lambda page: iter([("", page.value(metric))])


def _not_finite(metric: str) -> Callable[[Page], Iterator[Found]]:
    return lambda page: (
        ("", float(not math.isfinite(value))) for _, value in page.samples.get(metric, [])
    )


def _drifting(page: Page) -> Iterator[Found]:
    least = shipped().limit("act_layer_absmax_growth_ratio")
    for layer in page.layers.values():
        if layer.value("absmax_growth_ratio") > least:
            yield layer.name, layer.ratio


def _attention(page: Page) -> Iterator[Found]:
    least = shipped().limit("act_attention_logit_bound")
    baselines = page.by("act_attention_logit_bound_baseline", "layer")
    for layer, bound in page.by("act_attention_logit_bound", "layer").items():
        if bound > least and baselines.get(layer, 0) > 0:
            yield layer, bound / baselines[layer]


def _logits(page: Page) -> Iterator[Found]:
    for layer, value in page.by("act_logit_log_partition", "layer").items():
        yield layer, abs(value)


def _vanishing(page: Page) -> Iterator[Found]:
    mean = page.value("act_grad_norm_window_mean")
    if mean > 0:
        yield "", page.value("act_grad_norm_peak") / mean


def _memory(page: Page) -> Iterator[Found]:
    limits = page.by("act_memory_limit_bytes", "device")
    for device, used in page.by("act_memory_allocated_bytes", "device").items():
        if limits.get(device, 0) > 0:
            yield device, used / limits[device]


def _budget(page: Page) -> Iterator[Found]:
    # A run that was never rolled back may have none by choice.
    if page.generation != "0":
        yield "", page.value("act_rollback_budget_remaining")


def _silent(page: Page) -> Iterator[Found]:
    yield "", page.by("act_errors_total", "stage").get("silent", 0.0)


def _dropped(page: Page) -> Iterator[Found]:
    yield "", sum(page.by("act_series_dropped_total", "family").values())


_CONDITIONS = (
    Condition(
        "ActRunaway",
        _layers(lambda layer: layer.row("hard", "nonfinite")),
        "was bad for {:.0f} sampled steps in a row",
    ),
    Condition(
        "ActGradientRunaway",
        _run("act_grad_norm_shifted_consecutive"),
        "the gradient norm is far above its mean for {:.0f} sampled steps",
    ),
    Condition(
        "ActLayerAboveBaseline",
        _layers(lambda layer: layer.ratio),
        "reached {:.0f} times its baseline",
        threshold="hard",
    ),
    Condition(
        "ActLayerNonFinite",
        _layers(lambda layer: layer.row("nonfinite")),
        "had NaN or Inf for {:.0f} sampled steps in a row",
    ),
    Condition("ActLossNonFinite", _not_finite("act_loss"), "the loss is NaN or Inf"),
    Condition("ActGradientNonFinite", _not_finite("act_grad_norm"), "the gradient is NaN or Inf"),
    Condition("ActTrainerStalled", lambda page: [("", page.age)], "no step has ended for {:.0f} s"),
    Condition(
        "ActLossShifted",
        _run("act_loss_shifted_consecutive"),
        "the loss is above where it was for {:.0f} sampled steps",
    ),
    Condition(
        "ActRollbackBudgetSpent", _budget, "the run was rolled back, and {:.0f} rollbacks are left"
    ),
    Condition(
        "ActLayerAboveWindowSustained",
        _layers(lambda layer: layer.row("sigma")),
        "was above its window for {:.0f} sampled steps in a row",
    ),
    Condition("ActLayerDrift", _drifting, "is {:.3g} times its baseline and grows"),
    Condition(
        "ActLayerDepthSpike",
        _layers(lambda layer: layer.value("depth_jump_ratio")),
        "is {:.0f} times further up than the blocks before it",
    ),
    Condition(
        "ActLayerHeadroomLow",
        _layers(lambda layer: layer.value("headroom_ratio")),
        "is at {:.2f} of its number format",
    ),
    Condition(
        "ActLayerDead",
        _layers(lambda layer: layer.row("dead")),
        "is dead for {:.0f} sampled steps",
    ),
    Condition(
        "ActLayerSaturated",
        _layers(lambda layer: layer.row("saturated")),
        "is saturated for {:.0f} sampled steps",
    ),
    Condition(
        "ActAttentionLogitsGrowing", _attention, "has logits of up to {:.3g} times their baseline"
    ),
    Condition("ActLogitsDrifting", _logits, "has a log-partition of {:.3g} from 0"),
    Condition(
        "ActLossSpike",
        _run("act_loss_peak_zscore"),
        "the loss was {:.3g} deviations above its mean",
    ),
    Condition(
        "ActGradientExplosion",
        _run("act_grad_norm_peak_ratio"),
        "the gradient norm reached {:.0f} times its mean",
    ),
    Condition("ActGradientVanishing", _vanishing, "the gradient norm fell to {:.2g} of its mean"),
    Condition(
        "ActUpdateSpike",
        _run("act_update_rms_peak_ratio"),
        "a step changed the weights by {:.3g} times the usual",
    ),
    Condition(
        "ActDiagnosis",
        lambda page: page.by("act_diagnosis", "verdict").items(),
        "is the verdict on the fault",
    ),
    Condition("ActHooksSilent", _silent, "watched layers do not run"),
    Condition("ActSeriesDropped", _dropped, "{:.0f} series have no place on the page"),
    Condition("ActMemoryNearEnd", _memory, "is filled to {:.0%}"),
    Condition(
        "ActLayerAboveWindow",
        _layers(lambda layer: layer.sigma),
        "is {:.3g} deviations above its window",
        threshold="sigma",
    ),
)
