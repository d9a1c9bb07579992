"""What is examined: the model, a batch, and whatever else of the training was given."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from act_exporter.doctor.finding import NeedsMoreError
from act_exporter.doctor.recorder import watched
from act_exporter.doctor.step import Step
from act_exporter.doctor.trace import Look, Trace, traced

Batch = Any
"""A mapping (keyword arguments), a tuple or list (arguments), or one argument."""

# Dropout and sampled routes fall alike in all forwards that are compared.
_SEED = 0

# Enough to see what repeats and which lengths there are; a whole epoch would not fit.
_BATCHES = 64


@dataclass(frozen=True)
class Subject:
    """Arguments of `examine`, and the ways in which checks may use them.

    Checks leave the subject as they found it: what changes weights, gradients, buffers or any state
    of the training goes inside `kept()`.
    """

    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    batches: Iterable[Batch] | None = None
    train_step: Callable[[Batch], Any] | None = None

    @cached_property
    def plain(self) -> Trace:
        """What the model's forward does with the batch, as it is, without gradients."""
        with torch.no_grad():
            return self.trace()

    def trace(self, batch: Batch | None = None, look: Look | None = None) -> Trace:
        """What a forward does; see `traced`. Under the caller's grad mode and autocast.

        Args:
            batch: in place of the subject's own.
            look: called with each tensor as it is made.
        """
        given = self.batch if batch is None else batch
        with self.kept(weights=False), self.seeded():
            return traced(self.model, lambda: called(self.model, given), look)

    @cached_property
    def step(self) -> Step:
        """One training step: `train_step`, else a backward of the loss that the model returns.

        Raises:
            NeedsMoreError: neither can be had.
        """
        with self.kept(), self.seeded(), torch.enable_grad():
            return watched(self.model, lambda: self.run_step(self.batch), self.scaler)

    @cached_property
    def more_batches(self) -> list[Batch]:
        """The first of `batches`, which may be an iterator that can be read only once."""
        if self.batches is None:  # a loader that streams has no length to be asked for
            return []
        with self.seeded():  # a loader that shuffles draws its order
            return list(itertools.islice(self.batches, _BATCHES))

    def run_step(self, batch: Batch) -> Any:
        """Backward, clipping and the optimizer's step as the user has them, else a backward alone.

        Inside `kept()` and `seeded()`.

        Returns:
            What `train_step` does, else the loss.
        """
        # Without the optimizer that it steps, its state could not be put back.
        if self.train_step is not None and self.optimizer is not None:
            return self.train_step(batch)
        loss = self.loss(called(self.model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """The same random numbers each time; torch's, numpy's and Python's afterwards as before."""
        kinds = {parameter.device.type for parameter in self.model.parameters()}
        kind = "xpu" if "xpu" in kinds else "cuda"  # mps has a state of another kind
        # All of them, since the seed is set on all; of more than one torch warns unless told.
        devices = range(torch.get_device_module(kind).device_count())
        numpys, pythons = np.random.get_state(), random.getstate()
        try:
            with torch.random.fork_rng(devices, device_type=kind):
                torch.manual_seed(_SEED)
                np.random.seed(_SEED)
                random.seed(_SEED)
                yield
        finally:
            np.random.set_state(numpys)
            random.setstate(pythons)

    def loss(self, output: Any) -> torch.Tensor:
        """The loss in a model's output.

        Raises:
            NeedsMoreError: there is none that would be no guess.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        loss = getattr(output, "loss", loss)
        if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return loss
        raise NeedsMoreError('a model whose output is its loss, or has it as "loss"')

    def _parameters(self) -> list[torch.Tensor]:
        """The model's, and those that only the optimizer has: a learnt weight of the loss, say."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = itertools.chain(self.model.parameters(), *(group["params"] for group in groups))
        return list({id(parameter): parameter for parameter in own}.values())

    @contextlib.contextmanager
    def kept(self, *, weights: bool = True) -> Iterator[None]:
        """Put everything back at the end, whatever happens inside.

        Args:
            weights: False where only forwards run, which leave the optimizer alone; spares a copy
                of its state.
        """
        parameters = self._parameters()
        # A forward may change parameters too: an `nn.Embedding` with `max_norm` does.
        tensors = [*self.model.buffers(), *parameters]
        buffers = [(own, dict(own)) for own in (m._buffers for m in self.model.modules())]
        states: list[tuple[Any, Any]] = []
        restore_optimizer: Callable[[], None] = lambda: None  # noqa: E731
        if weights:
            owners = (self.scheduler, self.scaler)
            states = [(own, copy.deepcopy(own.state_dict())) for own in owners if own is not None]
            if self.optimizer is not None:
                restore_optimizer = _remembered(self.optimizer)
        values = [tensor.detach().clone() for tensor in tensors]
        gradients = [(p, p.grad, p.requires_grad) for p in parameters]
        for parameter, _, _ in gradients:
            parameter.grad = None  # the user's own are not added to
        # GradScaler's own note of where in a step it is; a step that raised would leave it there.
        stages = getattr(self.scaler, "_per_optimizer_states", {})
        stages_before = dict(stages)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        finally:
            for own, before in buffers:  # some are assigned anew: self.ema = ...
                own.clear()
                own.update(before)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
                restore_optimizer()
            for own, state in states:
                own.load_state_dict(state)
            stages.clear()
            stages.update(stages_before)
            for parameter, gradient, required in gradients:
                parameter.grad = gradient
                if parameter.requires_grad != required:
                    parameter.requires_grad_(required)
            for module, training in modes:
                module.training = training


def _remembered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that makes it what it is now, to the same objects.

    `load_state_dict` would not: it casts moments to the weights' dtype, and replaces the groups.
    """
    owners: list[dict[Any, Any]] = [*optimizer.param_groups, *optimizer.state.values()]
    insides = [(own, {key: _copied(value) for key, value in own.items()}) for own in owners]
    tensors = [(v, v.clone()) for own in owners for v in own.values() if torch.is_tensor(v)]
    groups, states = list(optimizer.param_groups), dict(optimizer.state)

    def restore() -> None:
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(states)
        for own, inside in insides:
            own.clear()
            own.update(inside)
        for tensor, value in tensors:
            tensor.copy_(value)

    return restore


def _copied(value: Any) -> Any:
    """The value, lists and dicts anew, and the tensors in them, parameters or not, the same."""
    if isinstance(value, dict):
        return {key: _copied(inside) for key, inside in value.items()}
    return [_copied(inside) for inside in value] if isinstance(value, list) else value


def called(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch, as `Batch` says."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)
