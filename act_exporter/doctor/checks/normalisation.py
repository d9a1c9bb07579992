"""Norms: where they stand, which one is missing, and what their gains and epsilons do.

Sources: the seed's checklist, item 3, and its section 3.2; Xiong et al. 2020 (arXiv:2002.04745) on
pre- and post-norm; Ba et al. 2016 (arXiv:1607.06450), Zhang and Sennrich 2019 (arXiv:1910.07467)
on what a norm does; Zhang et al. 2019 (arXiv:1901.09321) on residual stacks without any; Liu et
al. 2022 (Swin V2, arXiv:2111.09883) on pre-norm amplitudes. An epsilon is judged by what it is in
the dtype that the norm reckons in, which is tried, and by the smallest variance in the batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import nn

from act_exporter.doctor.epsilon import small_epsilons
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.gains import loud_gains
from act_exporter.doctor.norms import Block, norms, same, stacks
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place, Trace

FAULTS = {
    "missing-norm": "A block, a residual stack or a model's end has no norm where its like have.",
    "large-gain": "A norm's gain makes its output loud.",
    "small-epsilon": "A norm's epsilon does not keep it from dividing by next to nothing.",
    "norm-order": "Whether blocks norm what they take (pre-norm) or what they give (post-norm).",
}

_ORDERS = {
    "pre": "norm what they take (pre-norm)",
    "post": "norm what they give (post-norm)",
    "pre and post": "norm what they take and what they give",
    "branch": "norm what their branches take or give, not the stream",
    "none": "have no norm",
}

# Where a norm is missing, what comes after it takes the stream as it is. So many times as loud as a
# norm would make it, an attention's logits are 64 times as large, as with a gain of 8.
_LOUD = 8.0

# A pre-norm stream to which each of two sublayers a block adds as much as it began with has grown 8
# times after 30 blocks; the head's logits grow with it.
_GROWN = 8.0

# A stack of fewer feed-forward blocks does well without norms (Zhang et al. 2019 begin at 10
# layers); no transformer does.
_DEEP = 4
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)

# An output that has its input in it correlates with it; of 1,000 elements chance makes 0.03.
_RESIDUAL = 0.1


def check(subject: Subject) -> Iterator[Finding]:
    trace = subject.plain
    known = norms(subject.model)
    found = [stack for stack in stacks(subject.model, trace) if len(stack) > 1]
    names = {block.name for stack in found for block in stack}
    missing = [
        *(f for stack in found for f in _missing(stack, trace, known)),
        *(f for stack in found for f in _normless(stack, subject)),
        *(f for stack in found for f in _no_final(stack, trace, known, names)),
    ]
    yield from missing[:1]
    yield from loud_gains(known, trace)
    yield from small_epsilons(subject, known)
    yield from _order([block for stack in found for block in stack])


def _missing(
    stack: Sequence[Block], trace: Trace, known: Mapping[str, nn.Module]
) -> Iterator[Finding]:
    """A block without a norm that its like have."""
    have = Counter(norm for block in stack for norm in block.norms)
    usual = [norm for norm, count in have.items() if 2 * count >= len(stack)]
    lacking = [
        (block, norm)
        for norm in usual
        for block in stack
        if norm not in block.norms
        and _has_place(block, norm, stack)
        and not _normed(block, norm, trace, known)
    ]
    if not lacking:
        return
    loudness = [_loudness(block, norm, stack, trace) for block, norm in lacking]
    worst = max(range(len(lacking)), key=lambda index: loudness[index])
    (block, norm), times = lacking[worst], loudness[worst]
    yield Finding(
        fault="missing-norm",
        severity="critical" if times >= _LOUD else "warning",
        layer=f"{block.name}.{norm}" if _is_module(block, norm) else block.name,
        what=f"{block.name} has no {norm}, {have[norm]} of {len(stack)} blocks like it have; what"
        f" passes there is {times:.3g} times as loud as what these norms put out.",
        change=f"Put the norm back that the other blocks have at {norm}.",
        why="What comes after it takes the stream as loud as it is, and answers as loudly.",
        evidence={"times_as_loud": times, "other_places": len(lacking) - 1},
        strength=max(1.0, times / _LOUD),
    )


def _loudness(block: Block, norm: str, stack: Sequence[Block], trace: Trace) -> float:
    """What passes where a norm is missing, over what the norm puts out in the other blocks."""
    there = f"{block.name}.{norm}"
    like = {f"{one.name}.{norm}" for one in stack if norm in one.norms}
    usual = median(s.rms for s in trace.outputs() if s.layer in like)
    passes = next((s for s in trace.seen if s.layer == there), block.first)
    return passes.rms / usual if usual else 1.0


def _is_module(block: Block, path: str) -> bool:
    return path in dict(block.module.named_modules())


def _has_place(block: Block, norm: str, stack: Sequence[Block]) -> bool:
    """Whether the block has what the norm is a part of; another kind of layer has not."""
    parent = norm.rpartition(".")[0]
    if not parent:
        return True
    like = {type(one.module.get_submodule(parent)) for one in stack if norm in one.norms}
    # An identity, or a list of nothing, is the shortcut of a block that needs none.
    return (
        _is_module(block, parent)
        and type(block.module.get_submodule(parent)) in like
        and any(block.module.get_submodule(parent).children())
    )


def _normed(block: Block, norm: str, trace: Trace, known: Mapping[str, nn.Module]) -> bool:
    """Whether what comes there was normed just before, as the first block's input often is."""
    there = f"{block.name}.{norm}"
    takes = next((s for s in trace.seen if s.layer == there), block.first)
    return any(s.layer in known and same(s, takes) for s in trace.outputs())


def _normless(stack: Sequence[Block], subject: Subject) -> Iterator[Finding]:
    """A deep residual stack without any norm inside its blocks."""
    if any(block.norms for block in stack) or not (len(stack) >= _DEEP or _attends(stack[0])):
        return
    if not _is_residual(stack, subject):
        return
    first, last = stack[0].first.rms, stack[-1].last.rms
    growth = last / first if first else 1.0
    yield Finding(
        fault="missing-norm",
        severity="critical" if growth >= _LOUD else "warning",
        layer=stack[0].name,
        what=f"None of {len(stack)} residual blocks from {stack[0].name} on has a norm; the stream"
        f" grows {growth:.3g} times over them.",
        change="Norm what each sublayer takes (act_exporter.doctor.remedies.add_norm on its first"
        ' layer, side="input"), or start the last matrix of each at zero (Fixup).',
        why="Without, each block multiplies the stream, and its gradient, by a factor.",
        evidence={"growth": growth, "blocks": len(stack)},
        strength=max(1.0, growth / _LOUD),
    )


def _attends(block: Block) -> bool:
    parts = block.module.named_modules()
    return any(_ATTENTION.search(name) or _ATTENTION.search(type(p).__name__) for name, p in parts)


def _is_residual(stack: Sequence[Block], subject: Subject) -> bool:
    """Whether the blocks' outputs have their inputs in them, measured."""
    names = {block.name for block in stack}
    taken: dict[str, torch.Tensor] = {}
    alike: dict[str, float] = {}

    def look(place: Place, tensor: torch.Tensor) -> None:
        if place.layer not in names or place.layer in alike:
            return
        if place.side == "input":
            taken[place.layer] = tensor.detach().float().clone()
        elif place.layer in taken:
            alike[place.layer] = _correlation(taken.pop(place.layer), tensor.detach().float())

    with torch.no_grad():
        subject.trace(look=look)
    return bool(alike) and median(alike.values()) >= _RESIDUAL


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return 0.0
    # Without the channels' means: two rectified tensors are alike in being positive.
    one, other = (t - t.mean(0, keepdim=True) for t in (one, other))
    size = one.norm() * other.norm()
    return float((one * other).sum() / size) if size else 0.0


def _no_final(
    stack: Sequence[Block], trace: Trace, known: Mapping[str, nn.Module], blocks: set[str]
) -> Iterator[Finding]:
    """A pre-norm stream that leaves the model as loud as it has become."""
    if any(block.order != "pre" for block in stack):
        return
    last = stack[-1]
    end = next(n for n, seen in enumerate(trace.seen) if seen is last.last)
    for seen in trace.seen[end + 1 :]:
        if seen.layer in known:
            return
        if seen.layer in blocks:
            break  # the next stack has begun
    growth = last.last.rms / stack[0].first.rms if stack[0].first.rms else 1.0
    yield Finding(
        fault="missing-norm",
        severity="warning",
        layer=last.name,
        what=f"Blocks are pre-norm, but nothing norms the stream after {last.name}, where it has"
        f" grown {growth:.3g} times.",
        change="Add a norm after the last block.",
        why="The head takes the sum of all that blocks have added; its logits grow with the depth.",
        evidence={"growth": growth, "output_rms": last.last.rms},
        strength=max(1.0, growth / _GROWN),
    )


def _order(blocks: Sequence[Block]) -> Iterator[Finding]:
    if not blocks:
        return
    orders = Counter(block.order for block in blocks)
    order, count = orders.most_common(1)[0]
    change = "Nothing."
    if order == "post":
        change = "If training is unstable, move the norms before the sublayers, or warm up longer."
    yield Finding(
        fault="norm-order",
        severity="info",
        layer=None,
        what=f"{count} of {len(blocks)} blocks {_ORDERS[order]}.",
        change=change,
        why="Gradients of post-norm blocks near the output are large at the start (Xiong et al."
        " 2020); pre-norm ones are not, their stream grows with depth instead.",
        evidence={name: orders[name] for name in orders},
    )
