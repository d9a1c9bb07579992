"""The norms of a model, and where they stand in the order in which its modules ran."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from act_exporter.doctor.trace import Seen, Trace
from act_exporter.layers import find_blocks, named_modules

Order = Literal["pre", "post", "pre and post", "branch", "none"]
"""A norm on what a block takes, on what it gives, both, inside only, or nowhere."""

_NORM = re.compile(r"norm|^ln|^rms", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it ran.

    Attributes:
        name: its own.
        module: the block.
        first, last: what it took and gave.
        norms: names of the norms that ran inside, without the block's own, in order.
        order: where they stand.
    """

    name: str
    module: nn.Module
    first: Seen
    last: Seen
    norms: tuple[str, ...]
    order: Order


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that norm, by name: called so by their class, and made of no other modules."""
    return {
        name: module
        for name, module in named_modules(model)
        if _NORM.search(type(module).__name__) and not list(module.children())
    }


def stacks(model: nn.Module, trace: Trace) -> list[list[Block]]:
    """Blocks that ran and follow each other: of an encoder one list, of its decoder another."""
    modules = dict(named_modules(model))
    known = norms(model)
    found: dict[tuple[str, type], list[Block]] = {}
    for name in find_blocks(model):
        block = _block(name, modules[name], trace.seen, known)
        if block is not None:
            key = (name.rpartition(".")[0], type(modules[name]))
            found.setdefault(key, []).append(block)
    return list(found.values())


def same(one: Seen, other: Seen) -> bool:
    """Whether two tensors are one: no chance makes all of these equal."""
    return one.rms > 0 and (one.rms, one.absmax, one.mean, one.std, one.nonfinite) == (
        other.rms,
        other.absmax,
        other.mean,
        other.std,
        other.nonfinite,
    )


def _block(
    name: str, module: nn.Module, seen: Sequence[Seen], known: Mapping[str, nn.Module]
) -> Block | None:
    own = [s for s in seen if s.layer == name and s.place.call == 0]
    first = next((s for s in own if s.place.side == "input"), None)
    last = next((s for s in own if s.place.side == "output"), None)
    if first is None or last is None:
        return None  # a mere list of parts, or one that did not run to its end
    inside = [s for s in seen if s.layer in known and s.layer.startswith(f"{name}.")]
    pre = any(s.place.side == "input" and same(s, first) for s in inside)
    post = any(s.place.side == "output" and same(s, last) for s in inside)
    ran = tuple(dict.fromkeys(s.layer.removeprefix(f"{name}.") for s in inside))
    order: Order = "branch" if ran else "none"
    if pre or post:
        order = "pre and post" if pre and post else "pre" if pre else "post"
    return Block(name, module, first, last, ran, order)
