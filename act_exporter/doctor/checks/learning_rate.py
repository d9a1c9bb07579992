"""The learning rate: what a few steps at its peak do to the loss, and how the schedule gets there.

Sources: Goyal et al. (2017) and Xiong et al. (2020) on warm-up; Ma and Yarats (2021): Adam's second
moment is known after some 2 / (1 - beta2) steps; Kaplan et al. (2020), appendix D, for the rate by
size; Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer training
instabilities"; Loshchilov and Hutter (2017) on warm restarts. The article's checklist, item 6.

Whether a rate is too high is measured: a dozen steps on the batch, undone afterwards, and where the
loss rises once more at a tenth of the rate, and so on. Only where a lower rate mends it is it the
rate's fault.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.doctor.finding import Finding, NeedsMoreError, Severity
from act_exporter.doctor.recorder import losses, named_parameters
from act_exporter.doctor.schedule import Schedule, ahead
from act_exporter.doctor.subject import Subject
from act_exporter.layers import find_blocks

FAULTS = {
    "learning-rate-too-high": "A few steps at the peak rate raise the loss; at a lower one they do"
    " not.",
    "no-warmup": "The rate is at its peak from the first step on, with an optimizer that does not"
    " know the size of gradients yet.",
    "learning-rate-jump": "The schedule raises the rate at once by a lot.",
}

_TRIAL = 12

# By as much as the loss was at the start: at rates that train small models (transformers, CNN, MLP:
# measured) it rises by 0.1 of that at most, and by 0.8 and more at a hundred times those rates.
_RISEN, _RISING = 1.0, 0.5
_RISEN_STRENGTH = 10.0
# What a lower rate must come to for it to be the rate's fault.
_MENDED = 0.25
_LOWER = (0.1, 0.01, 1e-3)

# Kaplan's rule is within three times of what large runs take; ten times is out of all of them.
_OVER_USUAL = 10.0

# Adam knows the size of gradients after 2 / (1 - beta2) steps, and large runs warm up over one in a
# hundred of all. Five steps of Adam's 2,000, and half of the one in a hundred, are no warm-up.
_ADAM, _NOT_ADAM = 2.0, 0.0025
_SHARE, _NOT_SHARE = 0.01, 0.005

# One step may raise the rate by this share of the peak; a short linear warm-up takes a third.
_JUMP = 0.5
# Above all rates before; ConstantLR's own default is a jump of three times.
_JUMP_CRITICAL = 4.0


def check(subject: Subject) -> Iterator[Finding]:
    """Try the peak rate, and walk through the schedule.

    Raises:
        NeedsMoreError: there is no optimizer, no loss, or no scheduler.
    """
    if subject.optimizer is None:
        raise NeedsMoreError("an optimizer")
    schedule = ahead(subject.scheduler) if subject.scheduler is not None else None
    own = [float(group["lr"]) for group in subject.optimizer.param_groups]
    peaks = schedule.peaks if schedule is not None else own
    if max(peaks) > 0:
        yield from _too_high(subject, subject.optimizer, peaks, schedule)
    if schedule is None:
        raise NeedsMoreError("a scheduler, for warm-up and jumps")
    yield from _warmup(subject.model, subject.optimizer, schedule)
    yield from _jump(schedule)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Some steps on one batch.

    Attributes:
        losses: before each step, and after the last; up to the first that is no number.
        update: norm of the first step's update over that of the weights, the largest of a matrix.
        layer: whose.
    """

    losses: list[float]
    update: float
    layer: str

    @property
    def end(self) -> float:
        """The median of the last three, or NaN."""
        return statistics.median(self.losses[-3:]) if math.isfinite(self.losses[-1]) else math.nan

    @property
    def rise(self) -> float:
        """By how much the loss has risen above the lowest before, at most, over what it began with.

        Not its end alone: at rates of 100 times the usual the loss of one batch may rise a hundred
        times, and fall to nothing as the batch is learnt by heart.
        """
        if not math.isfinite(self.losses[-1]):
            return math.inf
        lowest = itertools.accumulate(self.losses, min)
        risen = max(loss - low for loss, low in zip(self.losses, lowest, strict=True))
        return risen / abs(self.losses[0]) if self.losses[0] else 0.0


def _tried(
    subject: Subject, optimizer: torch.optim.Optimizer, peaks: list[float], *, ramp: bool
) -> _Trial:
    found: list[float] = []
    update, layer = 0.0, ""
    # A matrix that starts at zero moves by any number of times itself.
    matrices = [own for own in named_parameters(subject.model).items() if own[1].ndim >= 2]
    with subject.kept(), subject.seeded(), torch.enable_grad():
        before = [(name, own, own.detach().clone()) for name, own in matrices if own.any()]
        for number in range(_TRIAL + 1):
            share = min(1.0, (number + 1) / (_TRIAL / 2)) if ramp else 1.0
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            # Only a training step of the user's own scales its loss.
            scaler = subject.scaler if subject.train_step is not None else None
            scale = scaler.get_scale() if scaler is not None else 1.0
            with losses() as own:
                subject.run_step(subject.batch)
            if subject.train_step is None:
                optimizer.step()
                optimizer.zero_grad()
            found.append(sum(own) / scale)
            for name, parameter, old in before:
                moved = float((parameter.detach() - old).norm() / old.norm())
                if moved > update:
                    update, layer = moved, name.rpartition(".")[0]
            before = []
            if not math.isfinite(found[-1]):
                break
    return _Trial(found, update, layer)


def _too_high(
    subject: Subject,
    optimizer: torch.optim.Optimizer,
    peaks: list[float],
    schedule: Schedule | None,
) -> Iterator[Finding]:
    ramp = schedule is not None and schedule.rates[0] < _JUMP
    trial = _tried(subject, optimizer, peaks, ramp=ramp)
    peak, rise, start = max(peaks), trial.rise, trial.losses[0]
    if not math.isfinite(start):
        return
    usual = _usual(subject.model, optimizer)
    evidence: dict[str, float | int | str] = {
        "peak": peak,
        "loss_before": start,
        "loss_after": trial.end,
        "loss_highest": max(trial.losses),
        "steps": _TRIAL,
        "update_share": trial.update,
        "update_layer": trial.layer,
    }
    severity: Severity = "critical" if rise >= _RISEN else "warning"
    if rise >= _RISING:
        for factor in _LOWER:
            lower = _tried(subject, optimizer, [own * factor for own in peaks], ramp=ramp)
            if lower.rise <= _MENDED and lower.end <= start:
                break
        else:
            return  # not the rate's fault
        what = (
            f"{_TRIAL} steps at the peak rate of {peak:.3g} raise the loss from"
            f" {min(trial.losses):.3g} to {max(trial.losses):.3g}; at {peak * factor:.3g} not."
        )
        # Other causes of a rise are measured where they are; of two, theirs comes first.
        strength = min(rise / _RISING, _RISEN_STRENGTH)
        evidence["mended_at"] = peak * factor
    elif usual is not None and peak >= _OVER_USUAL * usual:
        what = (
            f"The peak rate of {peak:.3g} is {peak / usual:.3g} times the usual one for this size."
        )
        strength = peak / usual / _OVER_USUAL
    else:
        return
    evidence |= {"usual_for_size": usual} if usual is not None else {}
    yield Finding(
        fault="learning-rate-too-high",
        severity=severity,
        layer=None,
        what=what,
        change="Lower the peak rate to where the loss falls, and warm up to it.",
        why="Updates as large as the weights throw away what the weights have learnt.",
        evidence=evidence,
        strength=strength,
    )


def _usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> float | None:
    """Adam's rate for a transformer of this size; None where the rule is about something else."""
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not (_is_adaptive(optimizer) and embeds and len(find_blocks(model)) >= 2):
        return None
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    size = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    # It comes to nothing at 12 billion; larger models take 1e-4 and a little less.
    return max(0.003239 - 0.0001395 * math.log(max(size, 1)), 5e-5)


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    return "betas" in optimizer.param_groups[0]


def _warmup(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
) -> Iterator[Finding]:
    fresh = not any(optimizer.state.values())
    if not (fresh and schedule.now <= 1 and _is_adaptive(optimizer)) or max(schedule.peaks) <= 0:
        return
    steps = next(place for place, share in enumerate(schedule.rates) if share > 0.99)
    needed = _ADAM / max(1 - float(optimizer.param_groups[0]["betas"][1]), 1e-6)
    none = _NOT_ADAM * needed
    if schedule.total is not None:
        needed = min(needed, _SHARE * schedule.total)
        none = min(none, _NOT_SHARE * schedule.total)
    if steps > max(none, 1) and schedule.rates[0] < _JUMP:
        return
    share = f" of {schedule.total}" if schedule.total is not None else ""
    yield Finding(
        fault="no-warmup",
        # Transformers are known to need it; what else Adam trains mostly does without.
        severity="info" if _usual(model, optimizer) is None else "warning",
        layer=None,
        what=f"The rate is at its peak of {max(schedule.peaks):.3g} after {steps} steps{share}.",
        change=f"Warm up over some {max(needed, 10):.0f} steps, from next to nothing.",
        why="Adam's first updates are as large as the rate whatever the gradient is, and its second"
        " moment knows the size of gradients only later.",
        evidence={"warmup_steps": steps, "needed_steps": needed, "peak": max(schedule.peaks)},
    )


def _jump(schedule: Schedule) -> Iterator[Finding]:
    highest = 0.0
    found: list[tuple[float, int]] = []
    for place, (before, after) in enumerate(zip(schedule.rates, schedule.rates[1:], strict=False)):
        highest = max(highest, before)
        # From the first step to the second it is a missing warm-up, if anything.
        if place and after - before >= _JUMP:
            found.append((after / max(highest, 1e-9), place + 1))
    if not found:
        return
    above, place = max(found, key=lambda item: round(item[0], 2))  # the first of such
    step = schedule.now + place
    before, after = schedule.rates[place - 1], schedule.rates[place]
    peak = max(schedule.peaks)
    restart = above <= 1.01
    yield Finding(
        fault="learning-rate-jump",
        severity="critical" if above >= _JUMP_CRITICAL else "warning",
        layer=None,
        what=f"At step {step} the rate goes from {before * peak:.3g} to {after * peak:.3g} at once"
        + (", where it has been before." if restart else "."),
        change="Warm up again after each restart."
        if restart
        else "Reach the higher rate over some hundred steps.",
        why="What was in balance with small updates is thrown out of it by large ones.",
        evidence={"step": step, "before": before * peak, "after": after * peak},
        strength=max(above / _JUMP_CRITICAL, 1.0),
    )
