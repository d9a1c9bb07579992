"""What one step changed: elements before it, compared with those after it, and the sums of that.

Before and after are taken on the weights' own device, where nothing waits for it; the sums over
layers and over the model are made on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import Optimizer

from act_exporter.matrices import Matrices, local_elements, sample
from act_exporter.norms import norms_of
from act_exporter.rows import Array
from act_exporter.sample import Update


@dataclass(slots=True)
class Copied:
    """Matrices of one optimizer, device and dtype before its step.

    Attributes:
        places: of the matrices.
        rates: their learning rates, NaN where unknown.
        before: their sampled elements, one matrix after the other.
        sizes: how many of each.
    """

    places: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Compared:
    """The same after the step.

    Attributes:
        counts: (3, matrices) places, sampled elements, all elements.
        rates: learning rates.
        norms: (4 * matrices,) Euclidean norms of the change, the weights, and of ones where there
            was a gradient and where such an element did not change.
    """

    counts: npt.NDArray[np.int64]
    rates: Array
    norms: torch.Tensor


def learning_rate(group: Mapping[str, Any]) -> float | None:
    """That of an optimizer's group, where it is a number on the host.

    Reading one from a device would wait, and some optimizers (Adafactor with relative steps) have
    none.
    """
    rate = group.get("lr")
    if isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.is_cpu):
        return float(rate)
    return None


def places_of(optimizer: Optimizer, matrices: Matrices) -> dict[int, float | None]:
    """Place of each matrix of the optimizer, and its learning rate."""
    return {
        place: rate
        for group in optimizer.param_groups
        for rate in [learning_rate(group)]
        for parameter in group["params"]
        if (place := matrices.place(parameter)) is not None
    }


def copy_elements(optimizer: Optimizer, matrices: Matrices) -> list[Copied]:
    """The elements of the optimizer's matrices, before its step."""
    alike: dict[tuple[torch.device, torch.dtype], Copied] = {}
    for place, rate in places_of(optimizer, matrices).items():
        parameter = matrices.references[place]()
        local = None if parameter is None else local_elements(parameter)
        if parameter is None or local is None or not parameter.requires_grad:
            continue
        part = alike.setdefault((local.device, local.dtype), Copied())
        part.places.append(place)
        part.rates.append(math.nan if rate is None else rate)
        part.before.append(sample(local))
        part.sizes.append(part.before[-1].numel())
    for part in alike.values():
        part.before = [torch.cat(part.before)]  # one kernel a device and dtype; copies
    return list(alike.values())


def compare(part: Copied, matrices: Matrices) -> Compared | None:
    """What became of it after the step; None where nothing can be compared."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    counts: list[tuple[int, int, int]] = []
    rates: list[float] = []
    old = part.before[0]
    copied = zip(part.places, part.rates, part.sizes, torch.split(old, part.sizes), strict=True)
    for place, rate, size, elements in copied:
        parameter = matrices.references[place]()
        local = None if parameter is None else local_elements(parameter)
        gradient = parameter.grad if parameter is not None else None
        near = None if gradient is None else local_elements(gradient)
        # One without a gradient is not stepped; and no other memory is like that before.
        if local is None or near is None or near.shape != local.shape:
            continue
        now = sample(local)
        if (now.dtype, now.device, now.numel()) != (old.dtype, old.device, size):
            continue
        before.append(elements)
        after.append(now)
        gradients.append(sample(near))
        counts.append((place, size, local.numel()))
        rates.append(rate)
    if not before:
        return None
    old, new = torch.cat(before), torch.cat(after)
    touched = torch.cat(gradients) != 0
    same = touched & (old == new)
    # In 16 bits neither a difference nor a sum would be right.
    wide = torch.float64 if old.dtype is torch.float64 else torch.float32
    old = old.to(wide)
    sizes = [size for _, size, _ in counts]
    numbers = (new.to(wide) - old, old, touched.to(wide), same.to(wide))
    norms = norms_of([piece for number in numbers for piece in torch.split(number, sizes)])
    return Compared(np.array(counts, dtype=np.int64).T, np.array(rates), norms)


def add_up(step: int, parts: Sequence[Compared], matrices: Matrices) -> Update:
    """The update of the whole step, of parts that are on the host, at least one."""
    places, sampled, elements = np.concatenate([part.counts for part in parts], axis=1)
    rates = np.concatenate([part.rates for part in parts])
    rows = [part.norms.double().numpy().reshape(4, -1) for part in parts]
    with np.errstate(over="ignore", invalid="ignore"):
        # What was counted of a sample stands for the whole matrix.
        change, weights, touched, same = np.concatenate(rows, axis=1) ** 2 * elements / sampled
    known = rates > 0
    # A rate of 0 leaves everything as it is, on purpose.
    touched, same = np.where(rates == 0, 0, [touched, same])
    values = {
        "update_ratio": _root(change.sum(), weights.sum()),
        "update_rms": _root((change[known] / rates[known] ** 2).sum(), elements[known].sum()),
        "update_unchanged_ratio": _share(same.sum(), touched.sum()),
    }
    changes, all_weights = _by_layer(matrices, places, change), _by_layer(matrices, places, weights)
    alike, all_touched = _by_layer(matrices, places, same), _by_layer(matrices, places, touched)
    return Update(
        step,
        _known(values),
        _known({name: _root(changes[name], all_weights[name]) for name in changes}),
        _known({name: _share(alike[name], all_touched[name]) for name in alike}),
    )


def _by_layer(matrices: Matrices, places: npt.NDArray[np.int64], sums: Array) -> dict[str, float]:
    number, place = matrices.pairs
    whole = np.zeros(len(matrices.references))
    whole[places] = sums
    names = matrices.layers
    totals = np.bincount(number, weights=whole[place], minlength=len(names))
    return dict(zip(names, totals.tolist(), strict=True))


def _root(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole > 0 else _share(part, whole)


def _share(part: float, whole: float) -> float | None:
    """None of nothing; NaN where one of them is."""
    return None if whole == 0 else float(part / whole)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
