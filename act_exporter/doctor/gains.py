"""Gains of norms, beside each other and what they start with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median, median_low

import torch
from torch import nn

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.matrices import kind
from act_exporter.doctor.trace import Trace

# Gains start at 1 (how far training takes them was not measured here), and the logits of an
# attention go with their square: at 8 they are 64 times as large, at 30 900 times, and one key
# takes all.
_LOUD = 8.0
_DEAFENING = 30.0

# Median of |x| of a normal x of deviation 1.
_MEDIAN = 0.6745

# Norms whose weight is their gain; others may keep it otherwise.
_TORCH = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def loud_gains(known: Mapping[str, nn.Module], trace: Trace) -> Iterator[Finding]:
    """One finding at most, of the loudest."""
    gains = _measured_gains(known, trace)
    if not gains:
        return
    usual = median(gains.values())
    # Against the norms for the same place, or all: of one of these it is the odd one out. All may
    # be too loud as well; they start at 1, and smaller ones make none of them loud.
    by = {name: max(1.0, min(_usual(name, gains), usual)) for name in gains}
    if usual >= _LOUD:
        by = dict.fromkeys(gains, 1.0)
    worst = max(gains, key=lambda name: gains[name] / by[name])
    times = gains[worst] / by[worst]
    if times < _LOUD:
        return
    yield Finding(
        fault="large-gain",
        severity="critical" if times >= _DEAFENING else "warning",
        layer=worst,
        what=f"The gain of {worst} is {gains[worst]:.3g}, the median norm's {usual:.3g}.",
        change="Start gains at 1 or less (act_exporter.doctor.remedies.set_gains), and keep weight"
        " decay on them if they grow.",
        why="A norm's output is as loud as its gain, whatever comes in, and logits of an attention"
        " go with its square.",
        evidence={
            "gain": gains[worst],
            "median_gain": usual,
            "other_norms": sum(gains[name] / by[name] >= _LOUD for name in gains) - 1,
        },
        strength=times / (_DEAFENING if times >= _DEAFENING else _LOUD),
    )


def _usual(name: str, gains: Mapping[str, float]) -> float:
    others = [gain for other, gain in gains.items() if other != name and kind(other) == kind(name)]
    return median_low(others or [gain for other, gain in gains.items() if other != name] or [1.0])


def _measured_gains(known: Mapping[str, nn.Module], trace: Trace) -> dict[str, float]:
    """The median of each norm's gain; of those that are not torch's, of the output if larger.

    The median, since a few loud channels that the next matrix takes down again are healthy, and
    what they cost is for `quantisation` to say. A Gemma's weight is the gain less 1; a norm puts
    out its gain, or less by its epsilon.
    """
    gains: dict[str, float] = {}
    for name, module in known.items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.numel():
            gains[name] = float(weight.detach().float().abs().median())
    for seen in trace.outputs():
        if seen.layer in known and not isinstance(seen.place.module, _TORCH):
            gains[seen.layer] = max(seen.median_abs / _MEDIAN, gains.get(seen.layer, 0.0))
    return {name: gain for name, gain in gains.items() if math.isfinite(gain)}
