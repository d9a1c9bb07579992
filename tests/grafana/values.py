"""How Grafana writes a value: its unit, words in place of numbers, the colour of its threshold."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.grafana.dashboards import Panel

COLORS = {
    "green": "#56a64b",
    "red": "#e02f44",
    "orange": "#ff780a",
    "yellow": "#e0b400",
    "blue": "#3274d9",
    "purple": "#a352cc",
    "super-light-blue": "#5f9df5",
    "text": "#8e8e8e",
    "transparent": "none",
}
"""Grafana's names of colours that the dashboards have, in its light theme."""

_LARGE = {"short": (" K", " Mil", " Bil"), "Bps": (" kB/s", " MB/s", " GB/s")}
_SUFFIXES = {"percent": "%", "celsius": " °C", "watt": " W", "Bps": " B/s"}
_DURATIONS = ((86_400, " days"), (3_600, " hours"), (60, " mins"), (1, " s"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How the values of one field look: the panel's defaults, and what overrides them.

    Attributes:
        steps: values from which on a colour holds, ascending; the first is minus infinity.
        words: value as text to its word and colour.
        custom: what only panels of this kind know.
    """

    unit: str = ""
    decimals: int | None = None
    color: str | None = None
    steps: Sequence[tuple[float, str]] = ()
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    custom: Mapping[str, Any] = field(default_factory=dict)

    def text(self, value: float | str, now: float) -> str:
        """`value` as people read it; `now` is the end of the range, Unix seconds."""
        if isinstance(value, str):
            return value
        if f"{value:g}" in self.words:
            return str(self.words[f"{value:g}"]["text"])
        return with_unit(value, self.unit, self.decimals, now)

    def background(self, value: float | None) -> str:
        """The colour of a value, by its word, else by its threshold; without one the lowest."""
        if value is not None and f"{value:g}" in self.words:
            return COLORS[self.words[f"{value:g}"]["color"]]
        reached = [
            color
            for least, color in self.steps
            if least == -math.inf or (value is not None and value >= least)
        ]
        return COLORS[reached[-1]] if reached else "none"


def look(panel: Panel, name: str = "") -> Look:
    """Of the panel's field of that name."""
    config = panel.raw["fieldConfig"]
    found: dict[str, Any] = dict(config["defaults"])
    found["custom"] = dict(found.get("custom", {}))
    for override in config.get("overrides", []):
        if override["matcher"]["options"] != name:
            continue
        for each in override["properties"]:
            if each["id"].startswith("custom."):
                found["custom"][each["id"].removeprefix("custom.")] = each["value"]
            else:
                found[each["id"]] = each["value"]
    steps = found.get("thresholds", {}).get("steps", [])
    return Look(
        unit=found.get("unit", ""),
        decimals=found.get("decimals"),
        color=COLORS[found["color"]["fixedColor"]]
        if "fixedColor" in found.get("color", {})
        else None,
        steps=[
            (-math.inf if step["value"] is None else step["value"], step["color"]) for step in steps
        ],
        words={
            value: word
            for mapping in found.get("mappings", [])
            for value, word in mapping["options"].items()
        },
        custom=found["custom"],
    )


def with_unit(value: float, unit: str, decimals: int | None, now: float) -> str:
    """`value` in the unit that Grafana calls so.

    Raises:
        ValueError: it is none of those that the dashboards have.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    match unit:
        case "dateTimeFromNow":
            return f"{_duration(now - value / 1000, 0)} ago"
        case "dateTimeAsLocalNoDateIfToday":
            return time.strftime("%H:%M:%S", time.localtime(value / 1000))
        case "s":
            return _duration(value, decimals)
        case "percentunit":
            return f"{_number(value * 100, decimals)}%"
        case "sci":
            return f"{value:.{2 if decimals is None else decimals}e}"
        case "none" | "string" | "":
            return _number(value, decimals)
        case "short" | "Bps" | "percent" | "celsius" | "watt":
            return _large(value, unit, decimals)
    raise ValueError(f"unit {unit!r}")


def _large(value: float, unit: str, decimals: int | None) -> str:
    for power, suffix in reversed(list(enumerate(_LARGE.get(unit, ()), start=1))):
        if abs(value) >= 1000**power:
            return _number(value / 1000**power, decimals) + suffix
    return _number(value, decimals) + _SUFFIXES.get(unit, "")


def _duration(seconds: float, decimals: int | None) -> str:
    for size, name in _DURATIONS:
        if abs(seconds) >= size:
            return _number(seconds / size, decimals) + name
    if seconds and abs(seconds) < 0.001:
        return _number(seconds * 1e6, decimals) + " µs"
    return _number(seconds * 1000, decimals) + " ms" if seconds else "0 s"


def _number(value: float, decimals: int | None) -> str:
    """Three digits that count, where no number of decimals is asked for."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}"
