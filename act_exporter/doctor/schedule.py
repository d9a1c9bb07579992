"""The learning rates that a scheduler will set, without a step of the user's own."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from act_exporter.doctor.finding import NeedsMoreError

# Some 0.2 s of a LambdaLR's steps; a longer schedule is seen as far as that.
_STEPS = 20_000

# Of a schedule that does not say where it ends.
_STEPS_UNKNOWN = 5_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates from the next step on.

    Attributes:
        rates: of each step, as a share of the peak: of the group that comes to the highest rate.
        peaks: each group's highest rate.
        now: steps that had been made before.
        total: steps of the whole schedule; None where it does not say.
    """

    rates: list[float]
    peaks: list[float]
    now: int
    total: int | None


def ahead(scheduler: Any) -> Schedule:
    """Step a copy through.

    Raises:
        NeedsMoreError: it is none of torch's kind.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's is around it
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise NeedsMoreError("a scheduler of torch.optim.lr_scheduler that goes by steps")
    optimizer = _twin(scheduler.optimizer)
    # The twin stands in for the optimizer wherever the copy would hold it.
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    total = _total(scheduler)
    steps = _STEPS_UNKNOWN if total is None else min(total - scheduler.last_epoch, _STEPS)
    rates = [_rates(optimizer)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step before the optimizer's
        for _ in range(max(steps, 1) - 1):
            try:
                twin.step()
            except ValueError:
                break  # OneCycleLR, beyond its end
            rates.append(_rates(optimizer))
    peaks = [max(own) for own in zip(*rates, strict=True)]
    top = max(range(len(peaks)), key=peaks.__getitem__)
    shares = [own[top] / peaks[top] if peaks[top] > 0 else 0.0 for own in rates]
    return Schedule(shares, peaks, scheduler.last_epoch, total)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the same groups, but no parameters to speak of."""
    groups = [
        {
            **{name: copy.deepcopy(own) for name, own in group.items() if name != "params"},
            "lr": float(group["lr"]),
            "params": [torch.nn.Parameter(torch.zeros(1))],
        }
        for group in optimizer.param_groups
    ]
    twin = torch.optim.SGD(groups, lr=1.0)
    twin.defaults = dict(optimizer.defaults)  # OneCycleLR asks whether there are betas
    return twin


def _total(scheduler: Any) -> int | None:
    """Steps until it ends, where it says so."""
    name = type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", None)
    if parts is not None:
        totals = [_total(part) for part in parts]
        milestones = getattr(scheduler, "_milestones", [0])
        if name == "ChainedScheduler":
            return max((total for total in totals if total is not None), default=None)
        return None if totals[-1] is None else totals[-1] + milestones[-1]
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas:
        first = lambdas[0]
        known = first.keywords if isinstance(first, functools.partial) else {}
        total = known.get("num_training_steps")
        return int(total) if total else None
    # ConstantLR's and LinearLR's total_iters end a warm-up, not the schedule.
    attribute = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max"}
    attribute["PolynomialLR"] = "total_iters"
    total = getattr(scheduler, attribute.get(name, ""), None)
    return int(total) if total else None
