"""Faults of the training around the model, and of its optimizer's state.

Sources: the second seed's checklist, items 5 and 6; PyTorch's AMP examples, "gradient clipping";
Kingma and Ba 2014; Wortsman et al. 2023, arXiv:2304.13013; A19, C02.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch

from tests.act_exporter.doctor.corpus import bodies, measures
from tests.act_exporter.doctor.corpus.measures import rms, shown
from tests.act_exporter.doctor.corpus.patient import (
    Batch,
    Body,
    Patient,
    Step,
    given,
    patient,
    trained,
    warm_up,
)


def clip_before_unscale(random: Random) -> Patient:
    """Gradients are clipped while they are still times the loss scale: to next to nothing."""
    body = bodies.body(random, (bodies.gpt, bodies.mlp, bodies.cnn, bodies.llama, bodies.gpt2))
    step = trained(random, body)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** random.randint(13, 16))
    step.unscale = False
    norm = float(torch.stack([g.norm() for g in measures.gradients(body).values()]).norm())
    return patient(
        "clipped before unscaling",
        body,
        f"scale {step.scaler.get_scale():.0f}",
        {"clip-before-unscale"},
        layers=frozenset({None}),
        given=given(step),
        # What is left of the norm is the bound over the scale.
        shown=shown("norm over what is left of it", norm * step.scaler.get_scale(), 100),
    )


def clip_after_step(random: Random) -> Patient:
    """Gradients are clipped when the optimizer has used them: not at all."""
    body = bodies.body(random, (bodies.gpt, bodies.mlp, bodies.cnn, bodies.llama, bodies.gpt2))
    step = trained(random, body)
    step.max_norm = None
    norm = float(torch.stack([g.norm() for g in measures.gradients(body).values()]).norm())
    late = LateClip(step, norm / random.uniform(2, 20))
    return patient(
        "clipped after the step",
        body,
        f"to {late.max_norm:.2g}",
        {"clip-after-step"},
        layers=frozenset({None}),
        given={**given(step), "train_step": late},
        shown=shown("norm that the optimizer saw over the bound", norm / late.max_norm, 1.5),
    )


@dataclass
class LateClip:
    """A step that clips at its end."""

    step: Step
    max_norm: float

    def __call__(self, batch: Batch) -> None:
        body, optimizer = self.step.body, self.step.optimizer
        optimizer.zero_grad()
        body.loss(batch).backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(body.model.parameters(), self.max_norm)


def high_rate(random: Random) -> Patient:
    """A learning rate at which the loss goes up at once."""
    body = bodies.body(random)
    step = trained(random, body)
    rate = 10 ** random.uniform(-0.5, 1)
    if isinstance(step.optimizer, torch.optim.SGD):
        rate *= 300
    for group in step.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = rate
    step.scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, warm_up(2, 500))
    before, *after = measures.losses(step, 3)
    worst = max(loss if math.isfinite(loss) else 1e30 for loss in after)
    return patient(
        "learning rate too high",
        body,
        f"{type(step.optimizer).__name__} at {rate:.2g}",
        {"learning-rate-too-high"},
        layers=frozenset({None}),
        given=given(step),
        shown=shown("loss after three steps over before", worst / before, 2),
    )


def no_warm_up(random: Random) -> Patient:
    """A transformer, Adam, and the full rate at the first step. Source: Xiong et al. 2020."""
    body = bodies.body(random, bodies.TEXT)
    step = trained(random, body)
    total = random.choice([500, 1000])
    schedule = random.choice(["cosine", "constant", "linear"])
    optimizer = step.optimizer
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    if schedule == "cosine":
        step.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    elif schedule == "linear":
        step.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)
    else:
        step.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, total)
    first = optimizer.param_groups[0]["lr"]
    return patient(
        "no warm-up",
        body,
        schedule,
        {"no-warmup"},
        layers=frozenset({None}),
        given=given(step),
        shown=shown("first rate over the peak", first / optimizer.param_groups[0]["initial_lr"], 1),
    )


def rate_jump(random: Random) -> Patient:
    """The rate jumps up in the midst: a milestone's factor upside down, or a restart."""
    body = bodies.body(random)
    step = trained(random, body)
    total, at = 600, random.randint(150, 400)
    factor = random.choice([10.0, 30.0, 100.0])
    sane = warm_up(50, total)
    step.scheduler = torch.optim.lr_scheduler.LambdaLR(
        step.optimizer, lambda done: sane(done) * (factor if done >= at else 1.0)
    )
    return patient(
        "jump of the learning rate",
        body,
        f"times {factor:g} at {at}",
        {"learning-rate-jump"},
        layers=frozenset({None}),
        given=given(step),
        shown=shown("rate over the one before", factor * sane(at) / sane(at - 1), 5),
    )


def _with_state(random: Random) -> tuple[Body, Step, str, torch.nn.Parameter]:
    """An AdamW that has taken some steps, and one of its parameters that has gradients."""
    body = bodies.body(random, (*bodies.TEXT, bodies.cnn))
    body.model.train()
    step = Step(
        body=body,
        optimizer=torch.optim.AdamW(body.model.parameters(), lr=random.choice([1e-4, 3e-4])),
    )
    for _ in range(random.randint(4, 8)):
        step(body.draw())
    found = measures.gradients(body)
    names = [
        name
        for name, parameter in body.model.named_parameters()
        if parameter.ndim >= 2 and name in found and float(found[name].norm()) > 1e-6
    ]
    name = random.choice(names)
    return body, step, name, body.model.get_parameter(name)


def _state_patient(kind: str, body: Body, step: Step, name: str, fault: str, **more) -> Patient:
    parameter = body.model.get_parameter(name)
    holders = {
        module_name
        for module_name, module in body.model.named_modules()
        if any(own is parameter for own in module._parameters.values())
    }
    return patient(kind, body, name, {fault}, layers=frozenset(holders), given=given(step), **more)


def nonfinite_moments(random: Random) -> Patient:
    """NaN or Inf in one moment of one parameter: the next step spoils it."""
    body, step, name, parameter = _with_state(random)
    moment = step.optimizer.state[parameter][random.choice(["exp_avg", "exp_avg_sq"])]
    moment.view(-1)[random.randrange(moment.numel())] = torch.nan
    bad = int((~measures.updates(step)[name].isfinite()).sum())
    return _state_patient(
        "non-finite moments",
        body,
        step,
        name,
        "nonfinite-moments",
        shown=shown("elements that the next step makes NaN", bad, 1),
    )


def large_moments(random: Random) -> Patient:
    """First moments of one parameter far too large: a loss scale that went into them."""
    body, step, name, parameter = _with_state(random)
    step.optimizer.state[parameter]["exp_avg"].mul_(10 ** random.uniform(4, 6))
    rate = step.optimizer.param_groups[0]["lr"]
    return _state_patient(
        "large moments",
        body,
        step,
        name,
        "large-moments",
        shown=shown("next update over the rate", rms(measures.updates(step)[name]) / rate, 100),
    )


def stale_moments(random: Random) -> Patient:
    """A second moment that has forgotten how large gradients are. Source: A19."""
    body, step, name, parameter = _with_state(random)
    state = step.optimizer.state[parameter]
    state["exp_avg_sq"].mul_(10 ** random.uniform(-10, -8))
    # Of a long training: nothing is corrected for a first step any more.
    state["step"].fill_(5000)
    state["exp_avg"].zero_()
    gradient = measures.gradients(body)[name]
    ratio = rms(gradient) / max(float(state["exp_avg_sq"].mean()) ** 0.5, 1e-30)
    return _state_patient(
        "stale second moments",
        body,
        step,
        name,
        "stale-moments",
        shown=shown("gradient over the root of its second moment", ratio, 30),
    )


def lost_step(random: Random) -> Patient:
    """Moments are loaded and the step counter is not. Source: C02, bigscience tr8b-104B."""
    body, step, name, _ = _with_state(random)
    before = rms(measures.updates(step)[name])
    for state in step.optimizer.state.values():
        state["step"].zero_()
    after = rms(measures.updates(step)[name])
    return patient(
        "step counter lost",
        body,
        name,
        {"lost-step"},
        given=given(step),
        # Bias correction as of a first step, of moments that are none.
        shown=shown("next update, more or less than before by", abs(after / before - 1), 0.05),
    )


def epsilon(random: Random) -> Patient:
    """Adam's epsilon is 0, and a weight whose gradient is 0 becomes 0/0; or it drowns the rest."""
    value = random.choice([0.0, 0.1, 1.0])
    body = bodies.body(random, bodies.TEXT)
    body.model.train()
    step = Step(
        body=body,
        optimizer=torch.optim.AdamW(body.model.parameters(), lr=3e-4, eps=value),
    )
    if value:
        for _ in range(random.randint(2, 6)):
            step(body.draw())
        sizes = torch.cat([update.flatten() for update in measures.updates(step).values()])
        figure = shown("rate over the median update", 3e-4 / float(sizes.abs().median()), 10)
    else:
        # A row that no batch has: its gradients are 0, and never anything else.
        changed = measures.updates(step).values()
        figure = shown(
            "weights that a step makes NaN", sum(int(u.isnan().sum()) for u in changed), 1
        )
    return patient(
        "Adam's epsilon", body, f"{value:g}", {"epsilon"}, given=given(step), shown=figure
    )


def left_out(random: Random) -> Patient:
    """The optimizer lacks some parameters: a block added later, or a wrong filter by name."""
    body = bodies.body(random, (*bodies.TEXT, bodies.cnn))
    gradients = measures.gradients(body)
    block = random.choice(
        [
            name
            for name, _ in body.model.named_modules()
            if name.rpartition(".")[2].isdigit()
            and any(g.startswith(f"{name}.") for g in gradients)
        ]
    )
    kept = [
        parameter
        for name, parameter in body.model.named_parameters()
        if not name.startswith(f"{block}.")
    ]
    optimizer = torch.optim.AdamW(kept, lr=3e-4)
    step = Step(
        body=body,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up(20, 500)),
    )
    for _ in range(random.choice([0, 3])):
        step(body.draw())
    changed = measures.updates(step)
    still = sum(
        float(gradients[name].norm()) > 0 and not changed[name].any()
        for name in gradients
        if name.startswith(f"{block}.")
    )
    return patient(
        "parameters left out",
        body,
        block,
        {"parameters-left-out"},
        layers=frozenset(
            {
                name
                for name, _ in body.model.named_modules()
                if name == block or name.startswith(f"{block}.")
            }
            | {None}
        ),
        given=given(step),
        shown=shown("parameters with a gradient that stay as they are", still, 1),
    )
