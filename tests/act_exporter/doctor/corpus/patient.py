"""What the corpus hands out: a model with its batch and its training, and what is wrong with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class NotShownError(Exception):
    """The draw has no fault that can be measured; another one is to be drawn."""


@dataclass(kw_only=True)
class Body:
    """A healthy model.

    Attributes:
        name: architecture and size, for people.
        model: the model, with its own initialisation.
        draw: makes another random batch, the model's keyword arguments, labels included.
        vocabulary: how many token ids there are; None where it takes vectors.
    """

    name: str
    model: nn.Module
    draw: Callable[[], Batch]
    vocabulary: int | None = None
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        self.batch = self.draw()

    def loss(self, batch: Batch) -> torch.Tensor:
        output = self.model(**batch)
        loss: torch.Tensor = output["loss"]
        return loss


@dataclass(kw_only=True)
class Step:
    """One training step, as `examine` takes it.

    Attributes:
        unscale: whether gradients are unscaled before they are clipped.
        half: whether the forward runs in fp16 autocast.
    """

    body: Body
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    max_norm: float | None = 1.0
    unscale: bool = True
    half: bool = False

    def __call__(self, batch: Batch) -> None:
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            loss = self.body.loss(batch)
        parameters = list(self.body.model.parameters())
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            if self.unscale:
                self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def copied(self) -> Step:
        """The same step of a model of its own, for measurements that train, at the rate of now."""
        own = copy.deepcopy(self)
        own.scheduler = None
        # A scheduler has put a step onto the optimizer that is the first one's, copied or not.
        vars(own.optimizer).pop("step", None)
        return own


@dataclass(kw_only=True)
class Patient:
    """One example.

    Attributes:
        kind: of its fault; "healthy".
        name: kind, model, place and size, for people.
        body: the model and its batch.
        faults: ids of which the first finding's must be one; empty for a healthy one.
        layers: names of which the first finding's layer must be one; empty where it is not judged.
        given: what else `examine` is given.
        shown: figures of the measurement that showed the fault without the doctor.
    """

    kind: str
    name: str
    body: Body
    faults: frozenset[str] = frozenset()
    layers: frozenset[str | None] = frozenset()
    given: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, float] = field(default_factory=dict)


def patient(kind: str, body: Body, what: str, faults: set[str], **more: Any) -> Patient:
    """A sick one.

    Args:
        kind: of the fault.
        body: with the fault in it.
        what: place or size, for people.
        faults: ids that are right.
        more: further fields.
    """
    return Patient(
        kind=kind,
        name=f"{kind} | {body.name} | {what}",
        body=body,
        faults=frozenset(faults),
        **more,
    )


def warm_up(peak: int, total: int) -> Callable[[int], float]:
    """Linear for `peak` steps, then a cosine down to a tenth: a schedule for `LambdaLR`."""

    def factor(done: int) -> float:
        falling = min(max(done - peak, 0) / (total - peak), 1.0)
        return min((done + 1) / peak, 0.55 + 0.45 * math.cos(math.pi * falling))

    return factor


def trained(random: Random, body: Body, *, steps: int = 0, half: bool = False) -> Step:
    """A sane training: AdamW or SGD, a warm-up, clipping, and a scaler where fp16 is used.

    Args:
        random: for its settings.
        body: what is trained.
        steps: taken at once, at the schedule's first rates.
        half: whether it runs in fp16 autocast.
    """
    parameters = body.model.parameters()
    if body.vocabulary is None and random.random() < 0.3:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, lr=random.choice([1e-3, 1e-2]), momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(
            parameters,
            lr=random.choice([1e-4, 3e-4, 1e-3]),
            betas=random.choice([(0.9, 0.999), (0.9, 0.95)]),
        )
    total = random.choice([500, 1000, 2000])
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warm_up(random.randint(total // 50, total // 10), total)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if half else None
    step = Step(body=body, optimizer=optimizer, scheduler=scheduler, scaler=scaler, half=half)
    for _ in range(steps):
        step(body.draw())
    return step


def given(step: Step, batches: int = 0) -> dict[str, Any]:
    """What `examine` is given of a training."""
    parts: dict[str, Any] = {
        "optimizer": step.optimizer,
        "scheduler": step.scheduler,
        "scaler": step.scaler,
        "train_step": step,
    }
    if batches:
        parts["batches"] = [step.body.draw() for _ in range(batches)]
    return {name: part for name, part in parts.items() if part is not None}
