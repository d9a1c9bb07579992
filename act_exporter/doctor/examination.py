"""Walks the checklist."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from act_exporter.doctor.causes import ordered
from act_exporter.doctor.checks import CHECKS
from act_exporter.doctor.finding import Finding, NeedsMoreError, UnusableBatchError
from act_exporter.doctor.report import Report
from act_exporter.doctor.subject import Batch, Subject
from act_exporter.doctor.trace import Trace
from act_exporter.exceptions import one_line

_log = logging.getLogger(__name__)


def examine(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    batches: Iterable[Batch] | None = None,
    train_step: Callable[[Batch], Any] | None = None,
    *,
    on_check: Callable[[str], None] = lambda name: None,
) -> Report:
    """Find out why a model is unstable, or would be.

    Runs some dozens of forwards and some backwards of the batch, and with an optimizer 13 to 52
    training steps, `train_step` where it is given. Weights, buffers, gradients, the states of all
    that is given, and random numbers (of torch, numpy and Python) are afterwards what they were.

    Args:
        model: the model, on its device, in the mode (train or eval) to be examined.
        batch: a mapping (keyword arguments of the model), a tuple or list (its arguments), or its
            one argument. Gradients are examined where the model returns its loss, or an output
            with one as "loss".
        optimizer: the model's.
        scheduler: of the learning rate; it is stepped through on a copy.
        scaler: a `torch.amp.GradScaler`.
        batches: some more of the data, a few dozen will do; read once.
        train_step: one whole training step of a batch, backward, clipping and `optimizer.step()`
            included, with the objects given here.
        on_check: told each check's name before it runs.

    Returns:
        The findings, the worst first; and which checks did not run, and what they need.
    """
    subject = Subject(model, batch, optimizer, scheduler, scaler, batches, train_step)
    findings: list[Finding] = []
    not_run: dict[str, str] = {}
    unusable: str | None = None
    if any(map(is_lazy, model.parameters())):  # there is no weight to look at, nor to put back
        unusable = "needs a model that has run once, so that its lazy modules have weights"
    for module in CHECKS:
        name = _name(module)
        if unusable is not None:
            not_run[name] = unusable
            continue
        on_check(name)
        try:
            findings += module.check(subject)  # what it yields before it raises counts
        except UnusableBatchError as error:
            unusable = f"needs {error}"
        except NeedsMoreError as error:
            not_run[name] = f"needs {error}"
        except Exception as error:
            # One check that a model of an unforeseen kind breaks must not cost the others.
            _log.debug("check %s failed", name, exc_info=True)
            not_run[name] = f"failed: {one_line(error)}"
    # Of a batch that no forward takes there is none to look at.
    plain = _plain(subject) if unusable is None else Trace()
    return Report(
        findings=ordered(findings, [seen.layer for seen in plain.seen]),
        not_run=not_run,
        checks=tuple(map(_name, CHECKS)),
        profile=tuple(plain.seen),
        error=None if plain.error is None else one_line(plain.error),
    )


def _plain(subject: Subject) -> Trace:
    """The forward, empty where looking at it failed: then the checks have said why."""
    try:
        return subject.plain
    except Exception:
        return Trace()


def _name(check: ModuleType) -> str:
    return check.__name__.rpartition(".")[2]
