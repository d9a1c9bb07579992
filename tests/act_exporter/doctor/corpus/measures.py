"""What shows a fault without the doctor: plain forwards, backwards and steps, and their figures."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from tests.act_exporter.doctor.corpus.patient import Batch, Body, NotShownError, Step


def shown(name: str, value: float, at_least: float) -> dict[str, float]:
    """The figure, by its name.

    Raises:
        NotShownError: it is below what makes it a fault, or NaN.
    """
    if not value >= at_least:
        raise NotShownError(f"{name} is {value:g}")
    return {name: value}


@contextlib.contextmanager
def fixed(model: nn.Module) -> Iterator[None]:
    """Dropout alike each time; buffers and random numbers afterwards as before."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)


def tensors(body: Body, side: str = "output") -> dict[str, torch.Tensor]:
    """Each module's input or output in a forward of the body's batch: its last call's.

    Raises:
        NotShownError: the forward raises.
    """
    found: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, module in body.model.named_modules():

            def note(_module, args, kwargs, output, name=name) -> None:
                given = output if side == "output" else (*args, *kwargs.values())
                parts = given if isinstance(given, tuple | list) else (given,)
                for part in parts:
                    if isinstance(part, torch.Tensor) and part.is_floating_point():
                        found[name] = part.detach().clone()
                        return

            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        with fixed(body.model), torch.no_grad():
            body.model(**body.batch)
    return found


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def loss(body: Body, batch: Batch | None = None) -> float:
    with fixed(body.model), torch.no_grad():
        return float(body.loss(body.batch if batch is None else batch))


def gradients(body: Body) -> dict[str, torch.Tensor]:
    """Of each parameter that has one, by its name."""
    parameters = dict(body.model.named_parameters())
    with fixed(body.model):
        found = torch.autograd.grad(
            body.loss(body.batch), list(parameters.values()), allow_unused=True
        )
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }


def updates(step: Step) -> dict[str, torch.Tensor]:
    """By what one step changes each parameter."""
    own = step.copied()
    before = {name: p.detach().clone() for name, p in own.body.model.named_parameters()}
    with torch.random.fork_rng():
        own(own.body.batch)
    return {name: p.detach() - before[name] for name, p in own.body.model.named_parameters()}


def losses(step: Step, steps: int) -> list[float]:
    """Of the body's batch, before and after each of some steps on it."""
    own = step.copied()
    found = [loss(own.body)]
    for _ in range(steps):
        own(own.body.batch)
        found.append(loss(own.body))
    return found


def in_half(body: Body) -> Body:
    """The same with weights and vectors in fp16."""
    own = copy.deepcopy(body)
    own.model.half()
    own.batch = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in own.batch.items()
    }
    return own
