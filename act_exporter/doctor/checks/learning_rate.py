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

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.doctor.finding import CERTAIN, Finding, NeedsMoreError, Severity
from act_exporter.doctor.recorder import losses
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

# On the batch that it is trained on, a loss that ends at half as much again was not noise.
_RISEN = 1.5
# A loss that is no higher than this, at a lower rate, says that steps as such work.
_MENDED = 1.02
_LOWER = (0.1, 0.01, 1e-3)

# Kaplan's rule is within three times of what large runs take; ten times is out of all of them.
_OVER_USUAL = 10.0

# A warm-up of the lesser of one in a hundred steps (what large runs take) and the 2 / (1 - beta2)
# that Adam needs; a tenth of that is hardly one.
_WARMUP_SHARE, _HARDLY = 0.01, 0.1

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
    yield from _warmup(subject.optimizer, schedule)
    yield from _jump(schedule)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Some steps on one batch.

    Attributes:
        start, end: the loss before, and the median of the last three.
        update: norm of the first step's update over that of the weights, the largest of a matrix.
        layer: whose.
    """

    start: float
    end: float
    update: float
    layer: str

    @property
    def rise(self) -> float:
        """How many times the loss at the end is that at the start; infinite where it is none."""
        if not math.isfinite(self.end):
            return math.inf
        return self.end / self.start if self.start > 0 else 1.0 + self.end - self.start


def _tried(
    subject: Subject, optimizer: torch.optim.Optimizer, peaks: list[float], *, ramp: bool
) -> _Trial:
    found: list[float] = []
    update, layer = 0.0, ""
    matrices = [(n, p) for n, p in subject.model.named_parameters() if p.ndim >= 2]
    with subject.kept(), subject.seeded(), torch.enable_grad():
        for number in range(_TRIAL + 1):
            share = min(1.0, (number + 1) / (_TRIAL / 2)) if ramp else 1.0
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            scale = subject.scaler.get_scale() if subject.scaler is not None else 1.0
            before = [p.detach().clone() for _, p in matrices] if not number else []
            with losses() as own:
                subject.run_step(subject.batch)
            if subject.train_step is None:
                optimizer.step()
                optimizer.zero_grad()
            found.append(sum(own) / scale)
            for (name, parameter), old in zip(matrices, before, strict=False):
                moved = float((parameter.detach() - old).norm() / old.norm().clamp_min(1e-12))
                # A matrix that starts at zero moves by any number of times itself.
                if update < moved and float(old.abs().max()) > 0:
                    update, layer = moved, name.rpartition(".")[0]
            if not math.isfinite(found[-1]):
                break
    return _Trial(
        found[0],
        statistics.median(found[-3:]) if math.isfinite(found[-1]) else math.nan,
        update,
        layer,
    )


def _too_high(
    subject: Subject,
    optimizer: torch.optim.Optimizer,
    peaks: list[float],
    schedule: Schedule | None,
) -> Iterator[Finding]:
    ramp = schedule is not None and schedule.rates[0] < _JUMP
    trial = _tried(subject, optimizer, peaks, ramp=ramp)
    peak = max(peaks)
    if not math.isfinite(trial.start):
        return
    usual = _usual(subject.model, optimizer)
    evidence: dict[str, float | int | str] = {
        "peak": peak,
        "loss_before": trial.start,
        "loss_after": trial.end,
        "steps": _TRIAL,
        "update_share": trial.update,
        "update_layer": trial.layer,
    }
    if usual is not None:
        evidence["usual_for_size"] = usual
    if trial.rise >= _RISEN:
        for factor in _LOWER:
            lower = [own * factor for own in peaks]
            if _tried(subject, optimizer, lower, ramp=ramp).rise <= _MENDED:
                break
        else:
            return  # not the rate's fault
        what = (
            f"{_TRIAL} steps at the peak rate of {peak:.3g} take the loss from {trial.start:.3g} to"
            f" {trial.end:.3g}; at {peak * factor:.3g} they do not."
        )
        severity: Severity = "critical"
        strength = min(trial.rise / _RISEN, CERTAIN)
        evidence["mended_at"] = peak * factor
    elif usual is not None and peak >= _OVER_USUAL * usual:
        what = (
            f"The peak rate of {peak:.3g} is {peak / usual:.3g} times the usual one for this size."
        )
        severity, strength = "warning", peak / usual / _OVER_USUAL
    else:
        return
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


def _warmup(optimizer: torch.optim.Optimizer, schedule: Schedule) -> Iterator[Finding]:
    fresh = not any(optimizer.state.values())
    if not (fresh and schedule.now <= 1 and _is_adaptive(optimizer)) or max(schedule.peaks) <= 0:
        return
    steps = next(place for place, share in enumerate(schedule.rates) if share > 0.99)
    needed = 2 / max(1 - float(optimizer.param_groups[0]["betas"][1]), 1e-6)
    if schedule.total is not None:
        needed = min(needed, _WARMUP_SHARE * schedule.total)
    if steps > 1 and steps >= _HARDLY * needed:
        return
    share = f" of {schedule.total}" if schedule.total is not None else ""
    yield Finding(
        fault="no-warmup",
        severity="warning",
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
    above, place = max(found)
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
