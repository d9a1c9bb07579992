"""The optimizer: what it remembers, what it is told, and which parameters it has.

Sources: Kingma and Ba, "Adam" (2015); Wortsman et al., "Stable and low-precision training for
large-scale vision-language models" (2023): loss spikes follow squared gradients that the second
moment does not know yet; Wortsman et al., "Small-scale proxies" (2023) and PaLM (2022) on epsilon
as gradients become small; bigscience's tr8b-104B chronicles: a step counter that was not saved.
The article's section 5.1 ("check that the first and second moments are within a normal range").
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from torch import nn

from act_exporter.doctor.finding import CERTAIN, Finding, NeedsMoreError
from act_exporter.doctor.moments import Moments, is_float, moments_of, usual_growth
from act_exporter.doctor.recorder import named_parameters
from act_exporter.doctor.schedule import ahead
from act_exporter.doctor.step import Step
from act_exporter.doctor.subject import Subject
from act_exporter.norms import elements

FAULTS = {
    "nonfinite-moments": "The optimizer remembers NaN, infinite, or impossible values.",
    "large-moments": "Moments are far larger than gradients are.",
    "stale-moments": "The second moment is far smaller than squared gradients are now.",
    "lost-step": "The optimizer has moments, but its step counter says that it never stepped.",
    "epsilon": "Epsilon is as large as what it is added to, or nothing in the dtype in use.",
    "parameters-left-out": "The optimizer does not have all parameters that are trained.",
    "learning-rate-zero": "Parameters have a learning rate of 0, now and later.",
}

# A second moment forgets within 1 / (1 - beta2) steps; gradients of one parameter become a thousand
# times smaller within as many, and others' do not, nowhere but after a fault.
_LARGE = 1e3

# Batches differ by up to three times and Wortsman calls 2.3 a spike of one element's; ten times of
# a whole parameter is another world than the moment is of.
_STALE = 10.0

# Over the bound that betas set to |m| / sqrt(v); a change of betas on the way takes part of it.
_IMPOSSIBLE = 3.0

# Half of all elements; a few small ones are usual where a layer learns little.
_MANY = 0.5
# Epsilon of 100 times the second moment's root leaves 1 % of each update.
_EPSILON_CRITICAL = 100.0


def check(subject: Subject) -> Iterator[Finding]:
    """Read the optimizer's state, and hold it against the gradients of the batch.

    Raises:
        NeedsMoreError: there is no optimizer, or none that has stepped.
    """
    optimizer = subject.optimizer
    if optimizer is None:
        raise NeedsMoreError("an optimizer")
    names = {id(own): name for name, own in named_parameters(subject.model).items()}
    yield from _left_out(subject.model, optimizer, names)
    yield from _rates(subject, optimizer, names)
    bad = _nonfinite(optimizer, names)
    if bad is not None:
        yield bad
        return
    step = _step(subject)
    moments = list(moments_of(optimizer, names, step))
    yield from _epsilon(moments)
    if not any(optimizer.state.values()):
        raise NeedsMoreError("an optimizer that has stepped, for its moments")
    yield from _size(moments, exact=step is not None and bool(step.used))


def _step(subject: Subject) -> Step | None:
    try:
        return subject.step
    except NeedsMoreError:
        return None  # there is much to see without gradients


def _nonfinite(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Finding | None:
    bad: list[tuple[str, str]] = []
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if is_float(value):
                own = elements(value)
                negative = key in ("exp_avg_sq", "square_avg") and bool((own < 0).any())
                if negative or not bool(own.isfinite().all()):
                    bad.append((names.get(id(parameter), ""), key))
    if not bad:
        return None
    name, key = bad[0]
    return Finding(
        fault="nonfinite-moments",
        severity="critical",
        layer=name.rpartition(".")[0] or None,
        what=f"{key} of {name} is NaN, infinite or below 0, and so are {len(bad) - 1} others.",
        change="Go back to a checkpoint from before it, or start the optimizer's state anew with a"
        " warm-up.",
        why="The next step makes NaN of every weight that such a moment belongs to.",
        evidence={"moments": len(bad), "first": f"{name} {key}"},
        strength=CERTAIN,
    )


def _left_out(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[Finding]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(parameter) for parameter in own}
    trained = [p for p in model.parameters() if p.requires_grad]
    out = [p for p in trained if id(p) not in held]
    if not out:
        return
    if len(out) == len(trained) and {p.dtype for p in own}.isdisjoint({p.dtype for p in out}):
        return  # copies in another precision, which some optimizers step in the model's stead
    count, total = sum(p.numel() for p in out), sum(p.numel() for p in trained)
    none = len(out) == len(trained)
    yield Finding(
        fault="parameters-left-out",
        severity="critical" if count > _MANY * total else "warning",
        layer=names[id(out[0])].rpartition(".")[0] or None,
        what="The optimizer has none of the model's parameters."
        if none
        else f"{len(out)} parameters ({count / total:.0%} of what is to be trained) are in no"
        f" group, {names[id(out[0])]} for one.",
        change="Make the optimizer after the model has all its parts and is on its device, from"
        " model.parameters(); or set requires_grad_(False) where it is meant.",
        why="What no group has stays as it is, while its gradients are computed and clipped with.",
        evidence={"parameters": len(out), "elements": count, "share": count / total},
        strength=CERTAIN,
    )


def _rates(
    subject: Subject, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[Finding]:
    still = [g for g in optimizer.param_groups if float(g["lr"]) == 0 and g["params"]]
    if still and subject.scheduler is not None:
        try:
            peaks = ahead(subject.scheduler).peaks
        except NeedsMoreError:
            return
        still = [g for g, peak in zip(optimizer.param_groups, peaks, strict=True) if peak == 0]
    if not still:
        return
    everything = len(still) == len(optimizer.param_groups)
    name = names.get(id(still[0]["params"][0]), "")
    yield Finding(
        fault="learning-rate-zero",
        severity="critical" if everything else "warning",
        layer=None if everything else name.rpartition(".")[0] or None,
        what=f"{len(still)} of {len(optimizer.param_groups)} parameter groups have a rate of 0"
        + (" in the whole schedule." if subject.scheduler is not None else ", and no scheduler."),
        change="Set the rate, or look at what the scheduler multiplies.",
        why="Parameters with a rate of 0 do not learn.",
        evidence={"groups": len(still)},
        strength=CERTAIN,
    )


def _epsilon(moments: list[Moments]) -> Iterator[Finding]:
    for own in moments:
        epsilon = own.epsilon
        if epsilon is not None and float(torch.tensor(epsilon, dtype=own.dtype)) == 0:
            yield Finding(
                fault="epsilon",
                severity="critical",
                layer=None,
                what=f"An epsilon of {epsilon:g} is 0 in {str(own.dtype).removeprefix('torch.')}.",
                change="Take 1e-8 with float32 weights, 1e-4 and more where they are in float16.",
                why="A gradient of 0, and in float16 any below 2e-4, has a second moment of 0: the"
                " update is divided by nothing.",
                evidence={"epsilon": epsilon},
                strength=CERTAIN,
            )
            return
    known = [
        (own.epsilon / size, own)
        for own in moments
        if own.epsilon and (size := own.second or own.gradient)
    ]
    over = [(times, own) for times, own in known if times >= 1]
    elements_over = sum(own.count for _, own in over)
    total = sum(own.count for _, own in known)
    if not over or elements_over < _MANY * total:
        return
    typical = sorted(times for times, _ in over)[len(over) // 2]
    worst = max(over, key=lambda item: item[0])[1]
    yield Finding(
        fault="epsilon",
        severity="critical" if typical >= _EPSILON_CRITICAL else "warning",
        layer=None,
        what=f"An epsilon of {worst.epsilon:g} is {typical:.3g} times the gradients' own size, for"
        f" {elements_over / total:.0%} of the parameters.",
        change="Lower epsilon: 1e-8 is usual, and 1e-15 was used with small gradients.",
        why="Adam divides by sqrt(v) + epsilon: what is below epsilon learns that much slower than"
        " the rate says.",
        evidence={"epsilon": worst.epsilon or 0, "times": typical, "share": elements_over / total},
        strength=max(typical / _EPSILON_CRITICAL, 1.0),
    )


def _size(moments: list[Moments], *, exact: bool) -> Iterator[Finding]:
    large: list[tuple[bool, float, Moments]] = []
    stale: list[tuple[float, Moments]] = []
    lost = [own for own in moments if own.lost]
    usual = usual_growth(moments)
    # As a batch is learnt by heart, all gradients become smaller, and by as much.
    fallen = max(1.0, 1 / usual)
    # A gradient that is nothing but rounding (of a bias of attention's keys) has any size; moments
    # that are a thousand times too large are above most others.
    typical = statistics.median_low([own.elasticity for own in moments] or [0.0])
    for own in moments:
        if own.second is None:
            continue
        second, gradient = max(own.second, 1e-30), own.gradient
        wrong = (own.first or 0.0) / second / own.bound / _IMPOSSIBLE if own.bound else 0.0
        behind = gradient / second if gradient is not None else 0.0
        over = own.size / gradient / fallen / _LARGE if gradient is not None else 0.0
        if wrong > 1 and behind > _STALE:
            stale.append((wrong, own))
        elif wrong > 1:
            large.append((True, wrong, own))
        elif over > 1 and own.elasticity > typical:
            large.append((False, over, own))
        # Without the clipping in it, only what one parameter has and others have not is told.
        elif behind > _STALE * (1.0 if exact else max(usual, 1.0)):
            stale.append((behind / _STALE, own))
    if lost:
        yield _lost(lost)
    if large:
        yield _large(*max(large, key=lambda item: item[:2]), len(large) - 1)
    if stale:
        yield _stale(*max(stale, key=lambda item: item[0]), len(stale) - 1)


def _evidence(own: Moments, others: int) -> dict[str, float | int | str]:
    return {
        "first_rms": own.first or 0.0,
        "second_root": own.second or 0.0,
        **({"gradient_rms": own.gradient} if own.gradient is not None else {}),
        "others": others,
    }


def _lost(lost: list[Moments]) -> Finding:
    return Finding(
        fault="lost-step",
        severity="warning",
        layer=None,
        what=f"{len(lost)} parameters have moments, but a step counter of 0.",
        change="Save and load the optimizer's whole state, the step included.",
        why="Adam's correction for its first steps begins anew: the next updates are some 2.2, 1.6,"
        " 1.4 times too large (beta2 of 0.95).",
        evidence={"parameters": len(lost)},
        strength=CERTAIN,
    )


def _large(impossible: bool, strength: float, own: Moments, others: int) -> Finding:
    known = own.gradient is not None
    against = f"gradients of {own.gradient:.3g}" if known else "what they can be together"
    return Finding(
        fault="large-moments",
        # What gradients could have made, they may have made.
        severity="critical" if impossible else "warning",
        layer=own.layer or None,
        what=f"Moments of {own.layer} are {own.first or 0:.3g} and {own.second or 0:.3g} (rms),"
        f" against {against}; so are those of {others} other parameters.",
        change="Start the optimizer's state anew with a warm-up, or go back to before the gradients"
        " that they are of.",
        why="A first moment that is too large moves weights where no gradient points; a second one"
        " stops its layer's learning until it is forgotten.",
        evidence=_evidence(own, others),
        strength=max(strength, 1.0),
    )


def _stale(strength: float, own: Moments, others: int) -> Finding:
    return Finding(
        fault="stale-moments",
        severity="warning",
        layer=own.layer or None,
        what=f"Gradients of {own.layer} are {own.gradient or 0:.3g} (rms) where its second moment"
        f" knows of {own.second or 0:.3g}; likewise in {others} other parameters.",
        change="Lower beta2 (0.95), clip updates by the ratio (StableAdamW), or lower the rate"
        " until the moment has caught up.",
        why="Adam divides by what gradients were: while they are larger than that, updates are too"
        " large by the same factor.",
        evidence=_evidence(own, others),
        strength=max(strength, 1.0),
    )
