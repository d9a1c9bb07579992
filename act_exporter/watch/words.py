"""How numbers, times and the state of a run are said."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from act_exporter.diagnosis import meaning
from act_exporter.watch.conditions import Holding, shipped
from act_exporter.watch.page import Layer, Page
from act_exporter.watch.source import Reading

Level = Literal["well", "warning", "bad", "unknown"]

LEVELS: tuple[Level, ...] = ("bad", "warning", "unknown", "well")
"""The most urgent first."""

NOTHING = "-"

_UNITS = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LETTERS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

# A tenth of the hard rule is what the trainer's own profile over depth calls high: five times what
# a settled layer wanders.
_HIGH = 0.1

# Rather a save, an evaluation or a slow batch than a hang, of which the alert's own 600 s speaks.
_STILL_STEPS = 20.0


@dataclass(frozen=True, slots=True)
class State:
    """In a few words, and how good or bad that is."""

    words: str
    level: Level


@dataclass(frozen=True, slots=True)
class Headline:
    """What someone who looks for ten seconds must know."""

    state: State
    sentences: Sequence[str]


def number(value: float) -> str:
    """At most six characters; NaN is nothing."""
    if math.isnan(value):
        return NOTHING
    if 1e3 <= abs(value) < 1e5:
        return f"{value:.0f}"
    mantissa, exponent, power = f"{value:.3g}".partition("e")
    return f"{float(mantissa):.2g}e{int(power)}" if exponent else mantissa


def count(value: float) -> str:
    """A count of up to four digits, or thousands, millions."""
    if math.isnan(value):
        return NOTHING
    for letter, size in _LETTERS:
        if value >= 10 * size:
            return f"{value / size:.0f}{letter}"
    return f"{value:.0f}"


def share(value: float) -> str:
    """Of a whole, in percent."""
    return NOTHING if math.isnan(value) else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def duration(seconds: float) -> str:
    """In one rounded unit, such as "3 min"."""
    if math.isnan(seconds):
        return NOTHING
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "0 s"


def clock(seconds: float) -> str:
    """The time of day of Unix seconds, in UTC as logs and Prometheus have it."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def state_of(layer: Layer, hard: float) -> State:
    """What is wrong with a layer, the worst first.

    Args:
        layer: as its page says.
        hard: times the baseline that it may reach.
    """
    if layer.row("nonfinite"):
        return State("not finite", "bad")
    if layer.ratio > hard:
        return State(f"over {hard:g}x", "bad")
    for rule, alert in (("dead", "ActLayerDead"), ("saturated", "ActLayerSaturated")):
        if layer.row(rule) >= _limit(alert):
            return State(rule, "warning")
    if layer.value("headroom_ratio") > _limit("ActLayerHeadroomLow"):
        return State("near end", "warning")
    if layer.row("sigma") >= _limit("ActLayerAboveWindowSustained"):
        return State("unusual", "warning")
    if layer.ratio > _HIGH * hard:
        return State("high", "warning")
    return State("no base", "unknown") if math.isnan(layer.ratio) else State("well", "well")


def _limit(alert: str) -> float:
    return shipped().alerts[alert].limit


def level_of(ratio: float, hard: float) -> Level:
    """How a single ratio to the baseline is to be taken."""
    if math.isnan(ratio):
        return "unknown"
    return "bad" if ratio > hard else "warning" if ratio > _HIGH * hard else "well"


def hard_of(page: Page) -> float:
    """Times the baseline that the trainer's hard rule allows."""
    return page.by("act_rule_threshold", "rule").get("hard", _limit("ActLayerAboveBaseline"))


def standing(reading: Reading, now: float) -> State:
    """How an exporter and its rank are.

    Args:
        reading: what is known of it.
        now: monotonic seconds.
    """
    page = reading.page
    if reading.problem is not None:
        return State("no answer", "bad")
    if page is None:
        return State("asked", "unknown")
    if page.onset is not None:
        return State(f"bad since {page.onset.step}", "bad")
    if page.verdict is not None:
        return State(page.verdict, "bad")
    age = reading.age(now)
    if age > _limit("ActTrainerStalled"):
        return State("stalled", "bad")
    if age * reading.rate > _STILL_STEPS:
        return State("stalled?", "warning")
    return State("well", "well") if page.layers else State("no sample", "unknown")


def headline(readings: Sequence[Reading], holding: Sequence[Holding]) -> Headline:
    """What is wrong, or that all is well.

    Args:
        readings: of all exporters.
        holding: the alerts whose conditions hold.
    """
    pages = [reading.page for reading in readings if reading.page is not None]
    away = [reading for reading in readings if reading.problem is not None]
    sentences = [
        f"{reading.address} {reading.problem}, since {clock(reading.away_since)} UTC."
        + ("" if reading.page is None else " What it said last is shown.")
        for reading in away[:2]
    ]
    if len(away) > len(sentences):
        sentences.append(f"Of {len(readings)} exporters {len(away)} do not answer.")
    sentences += _injected(pages)
    onsets = [(page.onset, page) for page in pages if page.onset is not None]
    if onsets:
        onset, page = min(onsets, key=lambda found: found[0].step)
        run = f" in {page.run}" if len({page.run for page in pages}) > 1 else ""
        title = State(f"ANOMALY{run} since step {onset.step}", "bad")
        verdict = [] if page.verdict is None else [meaning(page.verdict)]
        return Headline(title, [_first(page), *sentences, *verdict])
    verdicts = [(page.run, page.verdict) for page in pages if page.verdict is not None]
    if verdicts:
        run, kind = verdicts[0]
        return Headline(State(f"FAULT in {run}", "bad"), [*sentences, meaning(kind)])
    told = [holds for holds in holding if holds.alert.severity != "info"]
    if told and told[0].alert.severity == "critical":
        return Headline(State("ALARM", "bad"), [f"{_sentence(told[0].words)}", *sentences])
    if away:
        return Headline(State("NO ANSWER", "bad"), sentences)
    if told:
        return Headline(State("WARNING", "warning"), [f"{_sentence(told[0].words)}", *sentences])
    if not pages:
        return Headline(State("ASKING", "unknown"), ["No exporter has answered yet."])
    if not any(page.layers for page in pages):
        return Headline(State("WAITING", "unknown"), ["No sampled step has ended yet.", *sentences])
    return Headline(State("ALL WELL", "well"), [_calm(pages), *sentences])


def _first(page: Page) -> str:
    """Where it began, and how far that went."""
    onset = page.onset
    assert onset is not None  # noqa: S101  # asked for with one
    layer = page.layers.get((onset.layer, onset.tensor))
    if layer is None:
        far = "which has no place on the page"
    elif onset.rule == "nonfinite":
        far = f"with {count(layer.nonfinite)} elements of NaN or Inf so far"
    else:
        far = f"at {number(layer.ratio)} times its baseline, where {hard_of(page):g} are the limit"
    rank = "" if page.rank == "0" else f", rank {page.rank}"
    return f"First was {onset.layer} ({onset.tensor}{rank}), {far}."


def _injected(pages: Sequence[Page]) -> list[str]:
    factors = {
        layer: factor
        for page in pages
        for layer, factor in page.by("act_injected_fault", "layer").items()
    }
    return [
        f"On purpose: a fault is injected into {layer}, factor {factor:g}."
        for layer, factor in factors.items()
    ]


def _calm(pages: Sequence[Page]) -> str:
    layers = [layer for page in pages for layer in page.layers.values()]
    learnt = sum(not math.isnan(layer.value("absmax_baseline")) for layer in layers)
    tensors = f"Nothing is out of line in {len(layers)} tensors"
    if learnt == len(layers):
        return f"{tensors}."
    # Before there is a baseline the hard rule is blind.
    return f"{tensors}, of which {len(layers) - learnt} have no baseline yet."


def _sentence(words: str) -> str:
    # Not capitalize(): it may begin with a layer's name.
    return f"{words}."
