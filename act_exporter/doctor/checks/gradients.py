"""Gradients on their way back: where they explode, vanish, or stop to be numbers; units that died.

Sources: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
(2013); Glorot and Bengio (2010) on saturated units; Lu et al., "Dying ReLU and initialization"
(2019); fla-org/flash-linear-attention#77 (NaN in backward alone, under a finite forward). The
article's checklist, item 5.

How loud a gradient is says little: it is in units of the layer that it belongs to. What is compared
along the way is |gradient| x |activation|, how much the loss changes as the activation changes by a
share of itself. Residual streams, norms and matched layers leave it as it is at any scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from act_exporter.doctor.finding import CERTAIN, Finding, Severity
from act_exporter.doctor.step import Flow, Step
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place
from act_exporter.doctor.zeros import Zeros

FAULTS = {
    "exploding-gradients": "Gradients grow by orders of magnitude on their way back.",
    "vanishing-gradients": "Gradients fade on their way back, and first layers learn nothing.",
    "nonfinite-gradients": "Backward makes NaN or infinite gradients out of a finite loss.",
    "dead-units": "Units put out zero for everything in the batch, and get no gradient.",
}

# In healthy models (GPT-2, Llama, Mixtral, BERT, T5, Qwen3, CNN, MLP: measured) they grow up to
# 14 times from the logits to the loudest place, and 9 times at once. Batch norms without
# shortcuts, over few elements, make it 12,000 and 32 times (MobileNetV2 on two small pictures,
# measured), and train.
_GROWTH = 1e4
_GROWTH_CRITICAL = 1e5
_JUMP = 1e3

# They keep 0.06 and more of it to the first layer, and six layers of ReLU with torch's own small
# initialisation 0.01. What is below 1e-7 is lost in float32 weights that it is added to.
_FADING = 1e-4
_GONE = 1e-7

# A change of all weights by 1 % changes their losses by 0.2 to 40 %, up to 180 times 1 % (of the
# said MobileNetV2 8,000 times). Without norms each layer may multiply what comes back and what
# goes in alike, so that no activation's share grows: there the bare gradient does, 47 times in
# healthy models with their small embeddings.
_RELATIVE = 1e5
_LOSS = 1e5
_BARE = 1e3

# Of a layer's units. Deep in a chain that makes all inputs alike half of them are, and it is no
# fault of that layer.
_DEAD, _ALMOST_ALL = 0.75, 0.9


def check(subject: Subject) -> Iterator[Finding]:
    """Run the batch forward, and backward from the loss.

    Raises:
        NeedsMoreError: there is no loss.
    """
    yield from _dead(subject)
    step = subject.step
    bad = _nonfinite(step)
    if bad is not None:
        yield bad
        return  # norms of what is left say nothing
    yield from _exploding(step)
    yield from _vanishing(step)


def _nonfinite(step: Step) -> Finding | None:
    lost = sum(1 for gradient in step.gradients.values() if gradient.nonfinite)
    first = next((flow for flow in step.flow if flow.nonfinite), None)
    if first is None:
        return None
    forward = next((seen.layer for seen in step.trace.seen if seen.nonfinite), None)
    layer = _origin(step.flow, lambda flow: flow.nonfinite > 0) or first.layer
    scaled = step.scale > 1
    text = f" under a loss scale of {step.scale:g}" if scaled else ""
    return Finding(
        fault="nonfinite-gradients",
        # A GradScaler tries ever larger scales, and skips the step in which one was too large.
        severity="info" if scaled else "critical",
        layer=layer if forward is None else forward,
        what=f"Backward{text} makes NaN or infinite gradients, first in {layer}"
        + (
            f", after {forward} had put out such values." if forward else ", of finite activations."
        ),
        change=f"Look in {layer} for a division by zero, a root or logarithm of 0, an exponential"
        " that overflows; torch.autograd.detect_anomaly() names the operation.",
        why="One such gradient makes every weight that it reaches NaN, and clipping by norm spreads"
        " it to all others.",
        evidence={"parameters": lost, "of_parameters": len(step.gradients), "scale": step.scale},
        strength=CERTAIN,
        symptom=forward is not None,
    )


def _origin(flow: list[Flow], is_bad: Callable[[Flow], bool]) -> str | None:
    """The innermost module into which gradients came good, and in or after which some are bad."""
    whole = {
        item.layer
        for item in flow
        if item.place is not None and item.place.side == "output" and not is_bad(item)
    }
    found: list[str] = []
    for item in flow:
        if is_bad(item):
            parts = item.layer.split(".")
            names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            # A bad gradient of a module's output comes from outside of that module.
            outside = item.place is not None and item.place.side == "output"
            found += [name for name in names[outside:] if name in whole]
    inner = (name for name in found if not any(o.startswith(f"{name}.") for o in found))
    return next(inner, None)


def _dead(subject: Subject) -> Iterator[Finding]:
    zeros = Zeros()
    with torch.enable_grad():
        subject.trace(look=zeros.look)
    dead = [found for found in zeros.found if found[0] >= _DEAD]
    if not dead:
        return
    share, layer, units = max(dead)
    yield Finding(
        fault="dead-units",
        severity="critical" if share >= _ALMOST_ALL else "warning",
        layer=layer,
        what=f"{units} units after {layer} ({share:.0%}) are zero for everything in the batch.",
        change=f"Look at the bias and the scale of {layer} and at what it reads; start it anew, or"
        " use an activation that has a slope below zero (GELU, SiLU, leaky ReLU).",
        why="A ReLU that never opens gets no gradient, so nothing can open it again.",
        evidence={"units": units, "share": share, "other_layers": len(dead) - 1},
        strength=share / _DEAD,
    )


def _exploding(step: Step) -> Iterator[Finding]:
    jump, layer = _jump(step.flow)
    stations = _stations(step)
    growth = max((flow.elasticity for flow in step.flow), default=0.0) / _reference(step.flow)
    bare = _bare(step)
    total = sum(gradient.elasticity for gradient in step.gradients.values())
    relative = total / max(abs(step.loss or 1.0), 1.0)
    severity: Severity = "critical"
    if jump >= _JUMP:
        what = f"Gradients grow {jump:.3g} times within {layer} on their way back."
        strength = jump / _JUMP
    elif growth < _GROWTH_CRITICAL and bare >= _BARE and total >= _LOSS:
        layer = _steepest(step)
        what = (
            f"The gradient is {bare:.3g} times as large at {stations[0].layer} as at the end, and"
            f" {_norm(step):.3g} over all weights."
        )
        strength = bare / _BARE
    elif growth >= _GROWTH:
        severity = "critical" if growth >= _GROWTH_CRITICAL else "warning"
        what = f"Gradients grow {growth:.3g} times on their way back, the most in {layer}."
        strength = growth / _GROWTH
    elif relative >= _RELATIVE:
        name = max(step.gradients, key=lambda name: step.gradients[name].elasticity)
        layer = name.rpartition(".")[0]
        what = (
            f"The gradient norm is {_norm(step):.3g}: weights that change by 1 % change the loss by"
            f" {relative:.3g} times 1 %, those of {layer} the most."
        )
        strength = relative / _RELATIVE
    else:
        return
    yield Finding(
        fault="exploding-gradients",
        severity=severity,
        layer=layer,
        what=what,
        change="Normalise what goes into the layers, start their weights smaller, and clip the"
        " gradients' norm (act_exporter.doctor.remedies.clip_gradients).",
        why="One step along such a gradient throws the weights out of where the loss is low.",
        evidence={
            "jump": jump,
            "growth": growth,
            "relative_change": relative,
            "gradient_norm": _norm(step),
            "at_first_layer": bare,
        },
        strength=max(strength, 1.0),
        # Where nothing grows on the way, it was loud activations that made the gradients so.
        symptom=jump < _JUMP and growth < _GROWTH and bare < _BARE,
    )


def _jump(flow: list[Flow]) -> tuple[float, str]:
    """How many times above all before it a gradient comes at once, at most, and where."""
    most, level, highest = 0.0, 0.0, 0.0
    for item in flow:
        if highest > 0 and item.elasticity > most * highest:
            most = item.elasticity / highest
            level = (item.elasticity * highest) ** 0.5
        highest = max(highest, item.elasticity)
    layer = _origin(flow, lambda item: item.elasticity > level)
    loud = (item.layer for item in flow if item.elasticity > level)
    return most, layer or next(loud, "")


def _bare(step: Step) -> float:
    """The gradient's own norm at the first layers, over that where backward comes in."""
    reached = {id(flow.place): flow.gradient for flow in step.flow if flow.place is not None}
    first = max((reached.get(id(place), 0.0) for place in _stations(step)[:2]), default=0.0)
    return first / max(step.flow[0].gradient, 1e-300) if step.flow else 0.0


def _steepest(step: Step) -> str:
    """The layer with weights that multiplies the bare gradient most."""
    came: dict[tuple[str, int], float] = {}
    found: list[tuple[float, str]] = []
    layers = {place.layer for place in _stations(step)}
    for flow in step.flow:
        if flow.place is not None and flow.layer in layers:
            key = flow.layer, flow.place.call
            if flow.place.side == "output":
                came[key] = flow.gradient
            elif came.get(key):
                found.append((flow.gradient / came[key], flow.layer))
    return max(found, default=(0.0, ""))[1]


def _vanishing(step: Step) -> Iterator[Finding]:
    stations = _stations(step)
    if len(stations) < 3:
        return
    reached = {id(flow.place): flow.elasticity for flow in step.flow if flow.place is not None}
    # Of two, since the very first may be a table whose part is small, or nothing that is used.
    left = max(reached.get(id(place), 0.0) for place in stations[:2]) / _reference(step.flow)
    if left > _FADING:
        return
    layer = _fading(step.flow) if left > 0 else stations[0].layer
    yield Finding(
        fault="vanishing-gradients",
        severity="critical" if left <= _GONE else "warning",
        layer=layer,
        what=f"Of the gradient at the end {left:.2g} is left at {stations[0].layer},"
        f" {len(stations)} layers before; it fades the most in {layer}.",
        change="Use an activation that does not saturate, matched initialisation (Kaiming for ReLU,"
        " Xavier for tanh), normalisation, or residual connections.",
        why="Layers that get no gradient stay as they were made, and what follows learns from"
        " noise.",
        evidence={"left": left, "layers": len(stations), "gradient_norm": _norm(step)},
        strength=min(_FADING / max(left, 1e-300), CERTAIN),
    )


def _stations(step: Step) -> list[Place]:
    """Outputs of layers with weights that gradients may come to, in forward order."""
    return [
        place
        for place in step.places
        if place.side == "output" and next(place.module.parameters(recurse=False), None) is not None
    ]


def _reference(flow: list[Flow]) -> float:
    """Where backward comes in; none at all there is nothing to compare with."""
    return max(flow[0].elasticity, 1e-300) if flow else 1.0


def _fading(flow: list[Flow]) -> str:
    """Where all that is still to come is furthest below what has been."""
    ahead = list(itertools.accumulate((item.elasticity for item in reversed(flow)), max))[::-1]
    drops = [before / max(after, 1e-300) for before, after in itertools.pairwise(ahead)]
    place = max(range(len(drops)), key=drops.__getitem__)
    item = flow[place]
    # What goes into a module faded before it, in what comes next on the way back.
    outside = item.place is not None and item.place.side == "input"
    return flow[place + 1].layer if outside else item.layer


def _norm(step: Step) -> float:
    return math.sqrt(sum(own.rms**2 * own.elements for own in step.gradients.values()))
