"""How what lies between a model's projections grows: with their scale, and with the sequence.

All projections' outputs are brought to one RMS while the model runs. What is between two of them (a
softmax, a feature map, a gate) then gets inputs of a known scale, whatever is wrong before it, and
one forward tells of all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from act_exporter.doctor.formats import has_fp16_weights
from act_exporter.doctor.lookups import leaves
from act_exporter.doctor.subject import Batch, Subject
from act_exporter.doctor.trace import Place, Seen
from act_exporter.layers import is_projection, named_modules
from act_exporter.taps import Side

# Times the loudness of a place by which its second half moves when the first half is turned round.
# Mixing moves it by about as much as it is loud; where nothing is mixed only rounding moves it.
_MOVED = 0.01

# The shortest sequence worth cutting. Below four tokens a state that forgets (Mamba's) still grows
# as a sum does: power 0.6 from 2 to 8, 0.3 from 4 to 16.
_SHORTEST = 16


class Where(NamedTuple):
    """A tensor of a forward: `Place` without the module."""

    layer: str
    side: Side
    call: int


class Measured(NamedTuple):
    """A tensor between projections.

    Attributes:
        rms: infinite where an element is not finite.
        source: the last projection that ran before; None if none did.
        pooled: whether no projection before it has put out a sequence of its length.
    """

    rms: float
    source: Where | None
    pooled: bool


def in_float32(subject: Subject) -> Subject:
    """The subject, or a copy in float32 of one that would overflow in fp16 when it is driven."""
    if not has_fp16_weights(subject.model):
        return subject

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    model = copy.deepcopy(subject.model).float()
    return dataclasses.replace(subject, model=model, batch=_each(subject.batch, cast))


def driven(subject: Subject, rms: float, batch: Batch | None = None) -> dict[Where, Measured]:
    """What is between the projections when each of their outputs has the given RMS.

    That are the inputs of projections, and the outputs of modules that have some in them. In the
    order of the forward; it ends where the model raises.
    """
    with torch.no_grad(), _hooked(subject.model, lambda where, out: _brought(out, rms)):
        trace = subject.trace(batch)
    return dict(_between(trace.seen))


def mixes(subject: Subject, where: Where, source: Where) -> bool:
    """Whether tokens at a place depend on other tokens of the projection's output before it."""

    def turned(own: Where, out: torch.Tensor) -> torch.Tensor:
        if own != source:
            return out
        out = out.clone()
        out[..., : out.shape[-2] // 2, :] *= -1
        return out

    later = []
    for change in (lambda _own, out: out, turned):
        with torch.no_grad(), _hooked(subject.model, change):
            later.append(_second_half(subject, where))
    before, after = later
    if before is None or after is None or before.shape != after.shape:
        return False
    return float((after - before).norm()) > _MOVED * float(before.norm())


def lengths(subject: Subject) -> list[tuple[int, Batch]]:
    """The batch at a sequence of one, two and four times a length, each with its length.

    The quarter, the half and the whole; or, of a short one, itself some times over, where no table
    of positions or tokens can be overrun by that. None where it can be neither.
    """
    length = max((_length(tensor) for _, tensor in leaves(subject.batch)), default=0)
    if length >= _SHORTEST:
        parts = (length // 4, length // 2, length // 4 * 4)
        return [(n, _each(subject.batch, partial(_cut, length=length, to=n))) for n in parts]
    tables = any(isinstance(module, nn.Embedding) for module in subject.model.modules())
    if length and not tables:
        least = -(-_SHORTEST // (2 * length))
        times = (least, 2 * least, 4 * least)
        longer = ((n, partial(_repeated, length=length, times=n)) for n in times)
        return [(length * n, _each(subject.batch, change)) for n, change in longer]
    return []


@contextlib.contextmanager
def _hooked(
    model: nn.Module, change: Callable[[Where, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Change the outputs of all projections, of those that give several the first."""
    calls: dict[str, int] = {}

    def hook(name: str) -> Callable[..., Any]:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            calls[name] = calls.get(name, -1) + 1
            first, *rest = output if isinstance(output, tuple) and output else (output,)
            if not isinstance(first, torch.Tensor) or not first.is_floating_point():
                return None
            changed = change(Where(name, "output", calls[name]), first)
            return (changed, *rest) if isinstance(output, tuple) else changed

        return after

    with contextlib.ExitStack() as stack:
        for name, module in named_modules(model):
            if is_projection(module):
                stack.callback(module.register_forward_hook(hook(name)).remove)
        yield


def _brought(out: torch.Tensor, rms: float) -> torch.Tensor:
    """What was not finite is 0 then, so that what comes after can be measured all the same."""
    finite = out.float().nan_to_num(0, 0, 0)
    now = float(torch.linalg.vector_norm(finite, dtype=torch.float64)) / math.sqrt(out.numel() or 1)
    return (finite * (rms / now)).to(out.dtype) if now else out


def _between(seen: list[Seen]) -> Iterator[tuple[Where, Measured]]:
    source: Where | None = None
    before: set[int] = set()
    for own in seen:
        where = Where(own.layer, own.place.side, own.place.call)
        projection = is_projection(own.place.module)
        output = own.place.side == "output"
        if projection and output:
            source = where
            before.update(own.shape[-2:-1])
        elif len(own.shape) > 2 and (projection or (output and _has_some(own.place))):
            rms = math.inf if own.nonfinite else own.rms
            yield where, Measured(rms, source, own.shape[-2] not in before)


def _has_some(place: Place) -> bool:
    return any(map(is_projection, place.module.modules()))


def _second_half(subject: Subject, where: Where) -> torch.Tensor | None:
    found: list[torch.Tensor] = []

    def look(place: Place, tensor: torch.Tensor) -> None:
        if (place.layer, place.side, place.call) == where:
            found.append(tensor[..., tensor.shape[-2] // 2 :, :].float().clone())

    subject.trace(look=look)
    return found[0] if found else None


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _each(inside, change) for name, inside in batch.items()}
    if isinstance(batch, tuple | list):
        return [_each(inside, change) for inside in batch]
    return batch


def _length(tensor: torch.Tensor) -> int:
    """Of the sequence, where a tensor has one: (batch, sequence) or (batch, sequence, width)."""
    return tensor.shape[1] if tensor.ndim in (2, 3) else 0


def _along(tensor: torch.Tensor, length: int) -> list[int]:
    """The dimensions of a tensor that are the sequence."""
    if tensor.ndim == 4 and tensor.shape[-2:] == (length, length):
        return [2, 3]  # a mask
    return [1] if _length(tensor) == length else []


def _cut(tensor: torch.Tensor, length: int, to: int) -> torch.Tensor:
    for dim in _along(tensor, length):
        tensor = tensor.narrow(dim, 0, to)
    return tensor


def _repeated(tensor: torch.Tensor, length: int, times: int) -> torch.Tensor:
    for dim in _along(tensor, length):
        tensor = torch.cat([tensor] * times, dim)
    return tensor
