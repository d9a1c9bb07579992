"""Whether an attention's context stays in bounds when its queries and keys, or the sequence, grow.

Softmax attention does whatever happens. Linear attention does where its feature map grows no faster
than its input, and where it is divided by its keys' sum (Katharopoulos et al. 2020,
arXiv:2006.16236) or normed before it is used (Qin et al. 2022, arXiv:2210.10340). Sources: the
second seed, 2.3 and item 4 of its checklist. Its "stable" block has a good feature map and no
normaliser: its context was measured to grow from 5.9 at a sequence of 10 to 301 at 512.

Both are measured on the model; a feature map can't be found by structure. One that is a module's
attribute `phi` or `feature_map` is evaluated too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from act_exporter.doctor.feature_map import FeatureMap, feature_map
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.formats import uses_fp16
from act_exporter.doctor.growth import Measured, Where, driven, in_float32, lengths, mixes
from act_exporter.doctor.subject import Subject
from act_exporter.layers import named_modules
from act_exporter.names import query_or_key

FAULTS = {
    "unbounded-feature-map": "The feature map of a linear attention grows exponentially.",
    "unnormalised-attention": "A linear attention's context grows with the sequence length.",
}

# RMS of the projections' outputs, from what is normed on. At 8, queries and keys reach 30: exp of
# both is still within float32, and a softplus with an offset (Mamba's) is past its bend.
_LEVELS = (2.0, 4.0, 8.0)

# As a power of that RMS, from 4 to 8. Query, key and value multiplied are 3, with squares as
# feature maps 5, Mamba's step, gate, state, input and output together 6; exp of the keys alone is
# 15 and more.
_POWER = 10.0

# As a power of the sequence length, at both doublings. A mean over the sequence is at 0 or below, a
# sum of random signs at 0.5, one of like signs at 1; a state that forgets (Mamba's) was measured at
# 0.3 and less from 4 tokens on, and stops growing.
_SUMMED = 0.4

# As a power of the RMS at some level: of what is summed over a sequence without a product of query
# and key it is 1, with one at least 2, by whatever feature map that grows.
_PRODUCT = 1.5

# What attentions, and their projections to query, key and value in one, are called.
_CALLED = re.compile("attn|attention|qkv|query_key_value", re.IGNORECASE)

# Places that are tried for mixing tokens before others are believed not to.
_TRIED = 4

_NAMES = ("phi", "feature_map")


@dataclass(frozen=True, slots=True)
class _Grown:
    """A place that grows: its RMS by the level or the length that was set."""

    where: Where
    source: Where
    rms: Mapping[float, float]

    @property
    def scope(self) -> str:
        """The module that has both the projection before the place and the place: what mixes."""
        if self.where.side == "output":
            return self.where.layer
        names = zip(self.where.layer.split("."), self.source.layer.split("."), strict=False)
        return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], names))

    @property
    def powers(self) -> list[float]:
        """The power of what was set that it grows by, from each to the next."""
        return [
            math.log(y2 / y1) / math.log(x2 / x1) if y2 < math.inf else math.inf
            for (x1, y1), (x2, y2) in itertools.pairwise(self.rms.items())
        ]


def check(subject: Subject) -> Iterator[Finding]:
    in_fp16 = uses_fp16(subject)
    subject = in_float32(subject)
    at_levels = {rms: driven(subject, rms) for rms in _LEVELS}
    at_lengths = {
        float(n): {
            where: own for where, own in driven(subject, 1.0, batch).items() if not own.pooled
        }
        for n, batch in lengths(subject)
    }
    maps = dict(_feature_maps(subject))
    unbounded = _mixing(subject, _grown(at_levels, _is_exponential))
    summed = _mixing(subject, _grown(at_lengths, _is_sum))
    exponential = {name: own for name, own in maps.items() if own.growth == "exponential"}
    if unbounded:
        also = next((own for own in summed if own.scope == unbounded[0].scope), None)
        yield _measured_unbounded(unbounded, also, exponential)
    elif exponential:
        yield _named_unbounded(exponential, in_fp16)
    # The same place of other blocks is the same code, and mended with it.
    mended = unbounded and summed and _is_like(unbounded[0], summed[0])
    if summed and not mended and _is_attention(subject, summed[0], at_levels):
        yield _unnormalised(summed)


def _is_exponential(powers: list[float]) -> bool:
    return powers[-1] > _POWER


def _is_sum(powers: list[float]) -> bool:
    return min(powers) > _SUMMED  # what forgets stops growing


def _is_attention(
    subject: Subject, own: _Grown, at_levels: Mapping[float, Mapping[Where, Measured]]
) -> bool:
    """Whether query and key are multiplied before it, or it or its projections are called so."""
    # Of bounded feature maps the product does not grow; then only names tell.
    names = {name: type(module).__name__ for name, module in named_modules(subject.model)}
    parts = [name for name in names if name.rpartition(".")[0] == own.scope]
    called = [names.get(own.scope, ""), *(name.rpartition(".")[2] for name in (own.scope, *parts))]
    if any(map(query_or_key, parts)) or any(map(_CALLED.search, called)):
        return True
    places = {level: at_level.get(own.where) for level, at_level in at_levels.items()}
    rms = {level: place.rms for level, place in places.items() if place is not None and place.rms}
    return max(_Grown(own.where, own.source, rms).powers, default=0.0) > _PRODUCT


def _grown(
    measured: Mapping[float, Mapping[Where, Measured]], is_grown: Callable[[list[float]], bool]
) -> list[_Grown]:
    """The places that grow, in the order of the forward; none where nothing could be measured."""
    found: list[_Grown] = []
    for where, (first, source, _) in next(iter(measured.values()), {}).items():
        rms = {x: places[where].rms for x, places in measured.items() if where in places}
        # A place that some of the forwards do not have, or that is silent, says nothing.
        if source is None or len(rms) < len(measured) or not 0 < first < math.inf:
            continue
        if min(rms.values()) > 0 and is_grown((own := _Grown(where, source, rms)).powers):
            found.append(own)
    return found


def _mixing(subject: Subject, grown: list[_Grown]) -> list[_Grown]:
    """From the first on that mixes tokens: those in the same place of other blocks."""
    for own in grown[:_TRIED]:
        if mixes(subject, own.where, own.source):
            same = {other.scope: other for other in reversed(grown) if _is_like(own, other)}
            return [own, *(other for scope, other in same.items() if scope != own.scope)]
    return []


def _is_like(one: _Grown, other: _Grown) -> bool:
    return re.sub(r"\d+", "*", one.scope) == re.sub(r"\d+", "*", other.scope)


def _feature_maps(subject: Subject) -> Iterator[tuple[str, FeatureMap]]:
    for name, module in named_modules(subject.model):
        for phi in (getattr(module, attribute, None) for attribute in _NAMES):
            if callable(phi) and (own := _evaluated(subject, phi)) is not None:
                yield name, own


def _evaluated(subject: Subject, phi: Callable[[torch.Tensor], Any]) -> FeatureMap | None:
    """None for what is called so and is none, or takes rows of one width alone."""
    with contextlib.suppress(Exception), subject.kept(weights=False), subject.seeded():
        return feature_map(phi)
    return None


def _measured_unbounded(
    unbounded: list[_Grown], summed: _Grown | None, maps: Mapping[str, FeatureMap]
) -> Finding:
    first = unbounded[0]
    low, high = list(first.rms.values())[::2]
    evidence: dict[str, float | int | str] = {
        "place": f"{first.where.side} of {first.where.layer}",
        **{f"context_rms_at_{level:g}": rms for level, rms in first.rms.items()},
        "power": first.powers[-1],
        "other_layers": len(unbounded) - 1,
    }
    if summed is not None:
        evidence["power_of_length"] = summed.powers[-1]
    if first.scope in maps:
        evidence["feature_map_power"] = maps[first.scope].exponent
    return Finding(
        fault="unbounded-feature-map",
        severity="critical",
        layer=first.scope or None,
        what=f"The attention context of {first.scope or 'the model'} grows from {low:.3g} to"
        f" {high:.3g} when the projections before it go from an RMS of {_LEVELS[0]:g} to"
        f" {_LEVELS[-1]:g}; softmax attention's would grow 4 times.",
        change="Use a feature map that is bounded or grows as its input does, and divide by the"
        " keys' sum: act_exporter.doctor.remedies.linear_attention.",
        why="With an exponential map a query or key that gets somewhat larger makes the context"
        " overflow.",
        evidence=evidence,
        strength=max(1.0, first.powers[-1] / _POWER),
    )


def _named_unbounded(maps: Mapping[str, FeatureMap], in_fp16: bool) -> Finding:
    name, own = next(iter(maps.items()))
    return Finding(
        fault="unbounded-feature-map",
        severity="critical" if in_fp16 else "warning",  # fp16 ends at exp(11)
        layer=name,
        what=f"The feature map of {name} grows exponentially, to {own.largest:.3g} at inputs of"
        " 32, though the attention's context stays in bounds.",
        change="Use a feature map that is bounded or grows as its input does"
        " (act_exporter.doctor.remedies.softmax_features, elu_features), or subtract the largest"
        " exponent first, as softmax does.",
        why="Features overflow, in fp16 from inputs of 11 on, before a normaliser can divide them.",
        evidence={
            "feature_map_power": own.exponent,
            "feature_map_largest": own.largest,
            "other_layers": len(maps) - 1,
        },
    )


def _unnormalised(summed: list[_Grown]) -> Finding:
    first = summed[0]
    (shortest, low), *_, (longest, high) = first.rms.items()
    return Finding(
        fault="unnormalised-attention",
        severity="critical",
        layer=first.scope or None,
        what=f"The attention context of {first.scope or 'the model'} grows from {low:.3g} at a"
        f" sequence of {shortest:g} to {high:.3g} at {longest:g}, its projections at an RMS of 1:"
        " it is a sum over the sequence, no mean.",
        change="Divide by the sum of the keys' features:"
        " act_exporter.doctor.remedies.linear_attention. A norm on the context keeps the stream"
        " calm, but not the context.",
        why="A longer batch makes the residual stream louder than all that the model was trained"
        " on.",
        evidence={
            "place": f"{first.where.side} of {first.where.layer}",
            **{f"context_rms_at_length_{n:g}": rms for n, rms in first.rms.items()},
            "power_of_length": first.powers[-1],
            "other_layers": len(summed) - 1,
        },
        strength=max(1.0, first.powers[-1] / _SUMMED),
    )
