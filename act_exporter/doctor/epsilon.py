"""Epsilons of norms, against the dtype that a norm reckons in and the variances that it meets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.doctor.finding import CERTAIN, Finding
from act_exporter.doctor.formats import FP16_MAX
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place

# A gradient through a row of one value is multiplied by 1 / sqrt(epsilon): by 316 of 1e-5, 1,000 of
# 1e-6. From 1e4 on it swamps the rest of the batch, and what is amplified is rounding.
_AMPLIFIED = 1e4


@dataclass(slots=True)
class _Met:
    """What a norm met in one forward.

    Attributes:
        module: the norm.
        dtype: of its input.
        like: an input of zeros, one row.
        smallest: variance (mean square, of an RMS norm) of the quietest row.
        broke: whether a finite input became one that is not.
        finite: whether the last input was finite.
    """

    module: nn.Module
    dtype: torch.dtype
    like: torch.Tensor
    smallest: float
    broke: bool = False
    finite: bool = True


def small_epsilons(subject: Subject, known: Mapping[str, nn.Module]) -> Iterator[Finding]:
    """One finding at most: of the norm that breaks, or would, or amplifies most.

    Args:
        subject: is run once more.
        known: the model's norms by name.
    """
    met = _meet(subject, known)
    broke = [name for name, one in met.items() if one.broke and one.smallest < 1 / _AMPLIFIED**2]
    if broke:
        yield _breaks(broke[0], met[broke[0]], len(broke) - 1)
        return
    zero = [name for name, one in met.items() if not _survives_zeros(one)]
    if zero:
        yield _would_break(zero[0], met[zero[0]], len(zero) - 1)
        return
    steep = {name: factor for name, one in met.items() if (factor := _amplification(one))}
    worst = max(steep, key=lambda name: steep[name], default=None)
    if worst is not None:
        yield _amplifies(worst, met[worst], steep[worst], len(steep) - 1)


def _meet(subject: Subject, known: Mapping[str, nn.Module]) -> dict[str, _Met]:
    met: dict[str, _Met] = {}

    def look(place: Place, tensor: torch.Tensor) -> None:
        if place.layer not in known or not _norms_rows(place.module, tensor):
            return
        values = tensor.detach()
        finite = bool(values.isfinite().all())
        if place.side == "output":
            one = met.get(place.layer)
            if one is not None and one.finite and not finite:
                one.broke |= _gain_is_finite(place.module)
            return
        smallest = _smallest(place.module, values)
        one = met.setdefault(
            place.layer,
            _Met(place.module, values.dtype, torch.zeros_like(values[:1]), smallest),
        )
        one.smallest = min(one.smallest, smallest)
        one.finite = finite

    with torch.no_grad():
        subject.trace(look=look)
    return met


def _norms_rows(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether it norms the last dimension; a batch's or group's statistics are others."""
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return False
    weight = getattr(module, "weight", None)
    return not isinstance(weight, torch.Tensor) or weight.shape[-1:] == tensor.shape[-1:]


def _gain_is_finite(module: nn.Module) -> bool:
    return all(bool(weight.isfinite().all()) for weight in module.parameters())


def _smallest(module: nn.Module, values: torch.Tensor) -> float:
    rows = values.double().flatten(0, -2)
    name = type(module).__name__.lower()
    # T5's LayerNorm takes no mean off, whatever its name.
    centred = "rms" not in name and "t5" not in name
    variance = rows.var(-1, correction=0) if centred else rows.square().mean(-1)
    variance = variance[variance.isfinite()]
    return float(variance.min()) if variance.numel() else 1.0


def _epsilon(module: nn.Module) -> float | None:
    """Under the names that norms give it; None where it is not told."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _survives_zeros(one: _Met) -> bool:
    if not _gain_is_finite(one.module):
        return True  # no epsilon helps
    with torch.no_grad():
        try:
            out = one.module.forward(one.like)
        except Exception:
            return True  # takes more than one argument; nothing can be said
    return not isinstance(out, torch.Tensor) or bool(out.isfinite().all())


def _amplification(one: _Met) -> float | None:
    """Of the quietest row, or a gradient through a row of one value; None if it is no matter."""
    epsilon = _epsilon(one.module)
    if epsilon is None or epsilon <= 0:
        return None
    seen: float = (one.smallest + epsilon) ** -0.5
    if seen >= _AMPLIFIED:
        return seen
    possible: float = epsilon**-0.5
    return possible if one.dtype == torch.float16 and possible > FP16_MAX else None


def _breaks(name: str, one: _Met, others: int) -> Finding:
    return Finding(
        fault="small-epsilon",
        severity="critical",
        layer=name,
        what=f"{name} makes NaN or infinity of a finite input: a row's variance"
        f" is {one.smallest:.3g}, and its epsilon {_written(one)} does not count in"
        f" {_short(one.dtype)}.",
        change=_CHANGE,
        why="It divides by the root of variance plus epsilon, which is 0 here.",
        evidence=_evidence(one, others),
        strength=CERTAIN,
    )


def _would_break(name: str, one: _Met, others: int) -> Finding:
    return Finding(
        fault="small-epsilon",
        severity="critical" if one.dtype == torch.float16 else "warning",
        layer=name,
        what=f"{name} makes NaN or infinity of a row of zeros in {_short(one.dtype)}: its epsilon"
        f" {_written(one)} does not count there.",
        change=_CHANGE,
        why="The first row without variance (padding, a dead token) makes the loss NaN.",
        evidence=_evidence(one, others),
    )


def _amplifies(name: str, one: _Met, factor: float, others: int) -> Finding:
    return Finding(
        fault="small-epsilon",
        severity="warning",
        layer=name,
        what=f"With its epsilon {_written(one)}, {name} multiplies the gradient of a row without"
        f" variance by {factor:.3g}; the smallest variance in this batch is {one.smallest:.3g}.",
        change=_CHANGE,
        why="Such a row's rounding errors, or its gradient, outweigh the rest of the batch.",
        evidence={**_evidence(one, others), "factor": factor},
        strength=factor / _AMPLIFIED,
    )


_CHANGE = "Set its epsilon to 1e-5, or 1e-6 where the norm reckons in float32 whatever comes in."


def _written(one: _Met) -> str:
    epsilon = _epsilon(one.module)
    return "" if epsilon is None else f"of {epsilon:.3g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _evidence(one: _Met, others: int) -> dict[str, float | int | str]:
    epsilon = _epsilon(one.module)
    return {
        "epsilon": -1.0 if epsilon is None else epsilon,
        "smallest_variance": one.smallest,
        "dtype": _short(one.dtype),
        "other_norms": others,
    }
