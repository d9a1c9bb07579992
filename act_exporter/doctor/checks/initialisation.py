"""Weights out of line with their like, and what is not a number.

A matrix is judged by its gain, RMS times sqrt(fan-in): the standard deviation alone says nothing,
"0.01 to 0.05" (the seed's checklist, item 2) is missed by each weight of a healthy T5,
nn.TransformerEncoder or CNN. Sources: Glorot and Bengio 2010; He et al. 2015 (arXiv:1502.01852);
GPT-2's 1 / sqrt(2 blocks) on the projections into the residual stream (Radford et al. 2019), and
Zhang et al. 2019 (arXiv:1901.09321) on why depth asks for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

import torch
from torch import nn

from act_exporter.doctor.finding import CERTAIN, Finding
from act_exporter.doctor.matrices import Matrix, matrices, rms
from act_exporter.doctor.norms import norms
from act_exporter.doctor.recorder import named_parameters
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Trace
from act_exporter.exceptions import NothingToWatchError
from act_exporter.layers import find_blocks, find_taps, named_modules

FAULTS = {
    "nonfinite-weight": "A weight is NaN or infinite.",
    "odd-weight": "A matrix is many times larger or smaller than its like.",
    "depth-scaling": "Whether projections into the residual stream are smaller for the depth.",
}

# Matrices for the same place in other blocks were within a factor of 2 of each other in all fresh
# models tried; 8 is worth a look, 30 is no initialisation's and hardly a training's doing.
_UNLIKE = 8.0
_PLAINLY = 30.0

# He's rule has the largest gain in use, 1.4; 0.02 makes 2.2 in the widest models. At 5 a norm may
# hide it, but the attention's logits are 25 times as large; without norms, at 3 each layer is 3
# times as loud as the one before, 59,000 times after ten.
_LOUD = 5.0
_LOUD_WITHOUT_NORMS = 3.0

# Embeddings start between 0.02 (GPT-2, BERT) and 1 (torch, T5), and may grow in training.
_LOUD_TABLE = 30.0

# A layer bears its weight out when it amplifies so many times more than its like; chance and the
# input's direction make less than 2.
_SHOWN = 5.0


@dataclass(frozen=True, slots=True)
class _Odd:
    """A matrix, its gain over the gain that it was compared with, and whether that was its like's.

    Attributes:
        shown: whether what it does to the batch bears it out.
    """

    matrix: Matrix
    ratio: float
    alike: bool
    shown: bool

    @property
    def off(self) -> float:
        return max(self.ratio, 1 / self.ratio)


def check(subject: Subject) -> Iterator[Finding]:
    yield from _nonfinite(subject.model)
    found = list(matrices(subject.model))
    odd = sorted(_odd(found, subject.plain), key=lambda one: (not one.shown, -one.off))
    if odd:
        yield _unlike(odd)
    else:
        yield from _all_loud(subject.model, found, subject.plain)
        yield from _loud_table(subject.model)
    yield from _depth_scaling(subject.model, found)


def _nonfinite(model: nn.Module) -> Iterator[Finding]:
    bad: dict[str | None, int] = {}
    first = ""
    layers = dict(named_modules(model))
    for name, weight in (*named_parameters(model).items(), *_buffers(model)):
        if not weight.is_floating_point():
            continue
        # Of the buffers a causal mask is made of infinities.
        wrong = ~weight.isfinite() if isinstance(weight, nn.Parameter) else weight.isnan()
        if count := int(wrong.sum()):
            first = first or name
            owner = name.rpartition(".")[0]
            layer = owner if owner in layers else None  # the model's very own
            bad[layer] = bad.get(layer, 0) + count
    if bad:
        layer = next(iter(bad))
        yield Finding(
            fault="nonfinite-weight",
            severity="critical",
            layer=layer,
            what=f"{bad[layer]} elements of the weights of {layer or 'the model'} are NaN or"
            f" infinite ({first}).",
            change="Go back to a checkpoint before this, and find what put it there: an update of a"
            " non-finite gradient, or a module that was never initialised.",
            why="Each forward through this layer gives NaN, and no update makes a NaN a number.",
            evidence={"nonfinite_elements": bad[layer], "other_layers": len(bad) - 1},
            strength=CERTAIN,
        )


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # A bare layer is among the named ones.
    owners = {id(module): (layer, module) for layer, module in (("", model), *named_modules(model))}
    for layer, module in owners.values():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{layer}.{name}".removeprefix("."), buffer


def _odd(found: Sequence[Matrix], trace: Trace) -> Iterator[_Odd]:
    kinds: dict[tuple[str, ...], list[Matrix]] = defaultdict(list)
    for matrix in found:
        kinds[matrix.kind].append(matrix)
    amplified = _amplification(trace)
    for matrix in found:
        if not matrix.gain:
            continue  # zero on purpose, as many residual projections start
        like = [one for one in kinds[matrix.kind] if one is not matrix and one.gain]
        rest = [one for one in found if one is not matrix and one.gain]
        if like:
            ratio = matrix.gain / median_low(one.gain for one in like)
            # Of two, the smaller one is as odd as the larger one, but the larger one does harm.
            if ratio >= _UNLIKE or (1 / ratio >= _UNLIKE and len(like) > 1):
                yield _Odd(matrix, ratio, True, _shown(matrix, like, amplified))
                continue
        if rest:
            # One of its kind, or all of a kind: kinds may differ by much more than like from like.
            ratio = matrix.gain / median_low(one.gain for one in rest)
            if ratio >= _PLAINLY and matrix.gain >= _LOUD:
                yield _Odd(matrix, ratio, False, _shown(matrix, rest, amplified))


def _shown(matrix: Matrix, others: Sequence[Matrix], amplified: Mapping[str, float]) -> bool:
    own = _nearest(matrix.layer, amplified)
    theirs = [value for one in others if (value := _nearest(one.layer, amplified))]
    return own is not None and bool(theirs) and own >= _SHOWN * median_low(theirs)


def _amplification(trace: Trace) -> dict[str, float]:
    """How many times louder each layer's output is than its input, by name."""
    before: dict[tuple[str, int], float] = {}
    amplified: dict[str, float] = {}
    for seen in trace.seen:
        call = (seen.layer, seen.place.call)
        if seen.place.side == "input":
            before[call] = seen.rms
        elif before.get(call):
            amplified[seen.layer] = max(amplified.get(seen.layer, 0.0), seen.rms / before[call])
    return amplified


def _nearest(layer: str, amplified: Mapping[str, float]) -> float | None:
    """The layer's own, or that of the module that uses its weight."""
    while layer and layer not in amplified:
        layer = layer.rpartition(".")[0]
    return amplified.get(layer)


def _unlike(odd: Sequence[_Odd]) -> Finding:
    worst = odd[0]
    matrix = worst.matrix
    larger = worst.ratio > 1
    plain = worst.off >= _PLAINLY
    # Alone of its kind it may be meant so: an untied head of T5's starts at sqrt(width).
    critical = plain and larger and worst.shown
    like = "its like" if worst.alike else "the model's other matrices"
    return Finding(
        fault="odd-weight",
        severity="critical" if critical else "warning" if plain else "info",
        layer=matrix.layer,
        what=f"{matrix.name} is {worst.off:.3g} times as {'large' if larger else 'small'} as {like}"
        f" (standard deviation {matrix.rms:.3g}, gain {matrix.gain:.3g}).",
        change=f"Initialise it with std {_asked(worst):.3g}"
        f"{', as its like' if worst.alike else ' or less'}"
        " (act_exporter.doctor.remedies.initialise); in a trained model go back to before it"
        f" {'grew' if larger else 'shrank'}.",
        why="Its output is louder by the same factor, and so is what its gradient does to the"
        " layers before."
        if larger
        else "Its output, and the gradient through it, are smaller by the same factor.",
        evidence={
            "times_its_like": worst.ratio,
            "std": matrix.rms,
            "gain": matrix.gain,
            "fan_in": matrix.fan_in,
            "other_matrices": len(odd) - 1,
        },
        strength=worst.off / (_PLAINLY if plain else _UNLIKE),
    )


def _asked(odd: _Odd) -> float:
    """The standard deviation of its like, else LeCun's."""
    gain = odd.matrix.gain / odd.ratio if odd.alike else 1.0
    return gain / math.sqrt(odd.matrix.fan_in)


def _all_loud(model: nn.Module, found: Sequence[Matrix], trace: Trace) -> Iterator[Finding]:
    gains = [matrix.gain for matrix in found]
    limit = _LOUD if norms(model) else _LOUD_WITHOUT_NORMS
    if not gains or median(gains) < limit:
        return
    amplified = _amplification(trace)
    own = [value for one in found if (value := amplified.get(one.layer))]
    worst = max(found, key=lambda one: one.gain)
    yield Finding(
        fault="odd-weight",
        severity="critical" if own and median(own) >= limit else "warning",
        layer=worst.layer,
        what=f"Half of the model's {len(found)} matrices make their input {median(gains):.3g} times"
        f" louder, {worst.name} most ({worst.gain:.3g}).",
        change="Initialise matrices with std = 1 / sqrt(fan-in) or less"
        " (act_exporter.doctor.remedies.initialise).",
        why="Of that a layer's output is as loud as its input, at any depth.",
        evidence={"median_gain": median(gains), "largest_gain": worst.gain},
        strength=median(gains) / limit,
    )


def _loud_table(model: nn.Module) -> Iterator[Finding]:
    tables = {n: m for n, m in named_modules(model) if isinstance(m, nn.Embedding)}
    size, layer = max(((rms(m.weight), n) for n, m in tables.items()), default=(0.0, ""))
    if size >= _LOUD_TABLE:
        yield Finding(
            fault="odd-weight",
            severity="warning",
            layer=layer,
            what=f"The rows of {layer} are {size:.3g} large; embeddings start between 0.02 and 1.",
            change="Initialise it with std 1 or less.",
            why="What the blocks add is small beside it, and nothing is learnt from them.",
            evidence={"std": size},
            strength=size / _LOUD_TABLE,
        )


def _depth_scaling(model: nn.Module, found: Sequence[Matrix]) -> Iterator[Finding]:
    try:
        taps = find_taps(model)
    except NothingToWatchError:
        return
    takes = {tap.layer for tap in taps if tap.tensor == "input"}
    residual = {
        # torch's own attention hands its last matrix to a function.
        f"{tap.layer}.out_proj" if isinstance(tap.module, nn.MultiheadAttention) else tap.layer
        for tap in taps
        if tap.tensor == "output" and tap.layer in takes
    }
    ratios = []
    blocks = find_blocks(model)
    for block in blocks:
        inside = [m for m in found if m.layer.startswith(f"{block}.")]
        for own in inside:
            # Of one fan-in, so that rules of initialisation that go by it cancel out.
            peers = [
                m.rms
                for m in inside
                if m.layer not in residual and m.fan_in == own.fan_in and m.rms
            ]
            if own.layer in residual and peers:
                ratios.append(own.rms / median(peers))
    # Of encoder and decoder each has a stream of its own.
    depth = max(Counter(block.rpartition(".")[0] for block in blocks).values(), default=0)
    if depth < 2 or not ratios:
        return
    ratio, asked = median(ratios), (2 * depth) ** -0.5
    scaled = ratio <= 1.25 * asked
    first = next(m.layer for m in found if m.layer in residual)
    yield Finding(
        fault="depth-scaling",
        severity="info",
        layer=first,
        what=f"Projections into the residual stream are {ratio:.2f} of their like; 1 / sqrt(2 x"
        f" {depth} blocks) is {asked:.2f}: {'scaled' if scaled else 'not scaled'} for depth.",
        change="Nothing."
        if scaled
        else "If the residual stream grows too much with depth, start them smaller by that factor"
        " (act_exporter.doctor.remedies.scale_for_depth).",
        why="2 N sublayers add to the stream; at 1 / sqrt(2 N) each they add as much as one would.",
        evidence={"times_their_like": ratio, "asked_for_by_depth": asked, "blocks": depth},
    )
