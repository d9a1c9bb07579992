"""Which finding explains which: a cause stands before what it makes, however loud that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from act_exporter.doctor.finding import SEVERITIES, Finding

_GRADIENTS = frozenset({"exploding-gradients", "vanishing-gradients", "nonfinite-gradients"})

# What is seen where activations are too loud.
_LOUD = frozenset(
    {
        "growth-with-depth",
        "spike",
        "plateau",
        "massive-activation",
        "large-logits",
        "collapsed-entropy",
        "softmax-overflow",
        "exploding-gradients",
        "learning-rate-too-high",
        "fp16-overflow",
        "low-headroom",
        "keep-in-fp32",
    }
)

# What is seen where a forward is not finite.
_NONFINITE = frozenset({"nonfinite-gradients", "fp16-overflow", "learning-rate-too-high"})

# The rate is tried out by real steps: what spoils an update makes any rate too high.
_STEPS = frozenset({"learning-rate-too-high"})

# What is seen where hardly anything passes.
_QUIET = frozenset({"dead-units", "vanishing-gradients"})

_EXPLAINS: Mapping[str, frozenset[str]] = {
    "constant-batch": _QUIET | {"exploding-gradients"},  # all of a batch pulls the same way
    "nonfinite-input": _NONFINITE,
    "nonfinite-weight": _NONFINITE,
    "odd-weight": _LOUD | _QUIET,
    "missing-norm": _LOUD,
    "large-gain": _LOUD,
    "small-epsilon": _NONFINITE,
    "unbounded-feature-map": _LOUD | {"unnormalised-attention"},
    "unnormalised-attention": _LOUD,
    "large-logits": frozenset({"exploding-gradients", "vanishing-gradients"}),
    "softmax-overflow": _NONFINITE,
    "dead-units": frozenset({"vanishing-gradients"}),
    "exploding-gradients": _STEPS,
    "nonfinite-gradients": _STEPS,
    "nonfinite-moments": _STEPS,
    "large-moments": _STEPS,
    "stale-moments": _STEPS,
    "lost-step": _STEPS,
    "epsilon": _STEPS,
    # Moments of gradients that are clipped with the scale in them are smaller by that scale.
    "clip-before-unscale": frozenset({"epsilon"}),
}


def ordered(findings: Iterable[Finding], layers: Sequence[str]) -> tuple[Finding, ...]:
    """The findings, the worst first; of two alike a cause before what it explains.

    A cause is as bad as the worst that it explains: a missing norm that is a warning by itself is
    critical where the logits behind it are.

    Args:
        findings: of one report.
        layers: the layers in the order of one forward; a layer explains none that is done before.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for place, layer in enumerate(layers):
        begins.setdefault(layer, place)
        ends[layer] = place

    def explains(cause: Finding, other: Finding) -> bool:
        if other.fault not in _explained_by(cause):
            return False
        if other.fault in _GRADIENTS:  # they pass all layers
            return True
        return begins.get(cause.layer or "", 0) <= ends.get(other.layer or "", len(layers))

    def rank(finding: Finding) -> tuple[int, bool, float]:
        severity, symptom, strength = finding.rank
        return severity, symptom or any(explains(cause, finding) for cause in found), strength

    found = list(findings)
    made = [[finding, *(o for o in found if explains(finding, o))] for finding in found]
    worst = [min((own.severity for own in those), key=SEVERITIES.index) for those in made]
    found = [
        dataclasses.replace(finding, severity=severity)
        for finding, severity in zip(found, worst, strict=True)
    ]
    return tuple(sorted(found, key=rank))


def _explained_by(cause: Finding) -> frozenset[str]:
    if cause.fault == "odd-weight" and float(cause.evidence.get("times_its_like", 1)) < 1:
        return _QUIET
    return _EXPLAINS.get(cause.fault, frozenset())
