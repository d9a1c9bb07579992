"""Attention logits, the entropy of what the softmax makes of them, and its overflow in fp16.

Sources: runs of ViT-22B diverged once logits were beyond 10,000 or so, and attention became one-hot
(Dehghani et al. 2023, arXiv:2302.05442); the same at small scale (Wortsman et al. 2023,
arXiv:2309.14322); collapse of the entropy goes with instability (Zhai et al. 2023,
arXiv:2303.06296). Low entropy at moderate logits was judged no bug by those who looked into it
(huggingface/transformers#45676). Item 7 of the second seed's checklist: softmax in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from act_exporter.doctor.finding import Finding, Severity
from act_exporter.doctor.formats import FP16_MAX, uses_fp16
from act_exporter.doctor.operations import Softmax, softmaxes
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Seen
from act_exporter.layers import is_projection
from act_exporter.names import query_or_key

FAULTS = {
    "large-logits": "Attention logits are so large that rows look at one key and learn no more.",
    "collapsed-entropy": "Attention looks at hardly more than one key a row at moderate logits.",
    "softmax-overflow": "Products of query and key are beyond what fp16 holds.",
}


# Where the runs of Dehghani and Wortsman diverged.
_DIVERGED = 10_000.0

# Trained attentions stay below some hundreds; a tenth of where runs diverged.
_LOUD = 1_000.0

# Rows of uniform noise reach that saturation from a standard deviation of about 100 on. Below it a
# saturated softmax has its place: heads that look at the first token, or at the one before.
_LARGE = 100.0

# Shares of one layer's rows, over all its heads. In trained models some heads are one-hot; where
# four rows in five are, the layer's queries and keys get no gradient.
_ALL, _HALF = 0.8, 0.5

# Of the entropy of uniform attention, in the mean over a layer's heads. Models at their own
# initialisation are above 0.9, and layers with some heads that look at one token well above this.
# What was judged no bug in the issue above had 0.06, so it is a warning and no more.
_COLLAPSED = 0.2

# RMS of what query and key are made of. Normed, it is about 1; where it is louder, the fault lies
# before the attention, and the logits are what it looks like.
_LOUD_INPUT = 10.0

_CHANGE = (
    "norm query and key (act_exporter.doctor.remedies.add_norm), or bring this layer's weights back"
    " to the scale of its like, and lower the learning rate that made them grow"
)


def check(subject: Subject) -> Iterator[Finding]:
    trace, found = softmaxes(subject)
    if not found:
        return
    kinds: Sequence[tuple[str, Severity, Callable[[Softmax], float]]] = (
        ("softmax-overflow", "critical", lambda own: _overflow(own, uses_fp16(subject))),
        ("large-logits", "critical", _one_hot),
        ("large-logits", "critical", lambda own: own.largest / _DIVERGED),
        ("softmax-overflow", "warning", lambda own: _overflow(own, True)),
        ("large-logits", "warning", lambda own: own.largest / _LOUD),
        ("large-logits", "warning", lambda own: _one_hot(own, _HALF)),
        ("collapsed-entropy", "warning", _collapse),
    )
    for fault, severity, times in kinds:
        worst = max(found, key=times)
        if times(worst) >= 1:
            others = len({own.layer for own in found if times(own) >= 1} - {worst.layer})
            yield _finding(fault, severity, worst, times(worst), others, trace.seen)
            return  # the rest looks so because of it


def _overflow(own: Softmax, in_fp16: bool) -> float:
    """Times fp16's largest number; unscaled products count where they are made in fp16."""
    product = own.product if in_fp16 and own.product is not None else 0.0
    return max(own.largest, product) / FP16_MAX


def _one_hot(own: Softmax, share: float = _ALL) -> float:
    return own.largest / _LARGE if own.saturated >= share else 0.0


def _collapse(own: Softmax) -> float:
    if math.isnan(own.entropy):
        return 0.0
    return _COLLAPSED / max(own.entropy, 1e-3)  # of a strength that can be compared


def _finding(
    fault: str, severity: Severity, own: Softmax, times: float, others: int, seen: Sequence[Seen]
) -> Finding:
    what = {
        "softmax-overflow": f"the largest product of query and key is"
        f" {max(own.largest, own.product or 0):,.0f}, beyond fp16's {FP16_MAX:,.0f}",
        "large-logits": f"attention logits reach {own.largest:,.0f}, and"
        f" {own.saturated:.0%} of the rows look at one key alone",
        "collapsed-entropy": f"attention rows have {own.entropy:.0%} of the entropy of uniform"
        f" ones, at logits up to {own.largest:,.1f}",
    }[fault]
    why = {
        "softmax-overflow": "a logit that is infinite in fp16 makes the softmax's row NaN",
        "large-logits": "a one-hot softmax passes no gradient to query and key, and a small step"
        " flips which key it looks at",
        "collapsed-entropy": "a collapsed attention passes little gradient to query and key, and"
        " comes before instability",
    }[fault]
    maker = _maker(own, seen)
    before = [s.rms for s in seen[: own.before] if s.layer == maker and s.place.side == "input"]
    evidence: dict[str, float | int | str] = {
        "largest_logit": own.largest,
        "entropy_share": own.entropy,
        "saturated_rows": own.saturated,
        "keys": own.keys,
        "attention": own.layer,
        "other_layers": others,
    }
    if own.product is not None:
        evidence["largest_product"] = own.product
    if before:
        evidence["input_rms"] = before[-1]
    return Finding(
        fault=fault,
        severity=severity,
        layer=maker,
        what=f"In {own.layer or 'the model'}: {what}.",
        change=f"{_CHANGE[0].upper()}{_CHANGE[1:]}.",
        why=f"{why[0].upper()}{why[1:]}.",
        evidence=evidence,
        strength=times,
        symptom=bool(before) and before[-1] > _LOUD_INPUT,
    )


def _maker(own: Softmax, seen: Sequence[Seen]) -> str | None:
    """The module to change: the louder of what makes query and key, or what makes them both."""
    scope = own.layer
    while scope:
        parts = _parts(scope, seen[: own.before])
        makers = {query_or_key(part.layer): part for part in parts}  # a norm after its projection
        both = [part for made, part in makers.items() if made is not None]
        if both or parts:
            # Query, key and value of one matrix, or names that say nothing: the loudest.
            return max(both or parts, key=lambda part: part.rms).layer
        module = next((s.place.module for s in seen if s.layer == scope), None)
        if module is not None and is_projection(module):
            return scope  # nn.MultiheadAttention holds its weights itself
        scope = scope.rpartition(".")[0]  # a softmax that is a module of its own, for one
    return own.layer or None


def _parts(scope: str, seen: Sequence[Seen]) -> list[Seen]:
    """Outputs of the layers with weights that `scope` has run since it last began."""
    parts: list[Seen] = []
    for own in reversed(seen):
        if own.layer == scope and own.place.side == "input":
            break
        inside = own.layer.startswith(f"{scope}.") and own.place.side == "output"
        if inside and list(own.place.module.parameters(recurse=False)):
            parts.append(own)
    return parts[::-1]
