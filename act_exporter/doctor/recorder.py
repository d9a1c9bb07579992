"""Watches one training step: patches what a trainer calls, and puts everything back."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from act_exporter.doctor.step import Event, Flow, Gradient, Kind, Step
from act_exporter.doctor.trace import Place, traced
from act_exporter.layers import named_modules
from act_exporter.norms import elements


def watched(model: nn.Module, run: Callable[[], Any], scaler: Any = None) -> Step:
    """Run a training step, and tell what happened in it.

    Raises:
        Exception: what `run` raises.
    """
    recorder = _Recorder(model)
    with recorder.recording(type(scaler) if scaler is not None else torch.amp.GradScaler):
        recorder.step.trace = traced(model, run, recorder.look)
    if recorder.step.trace.error is not None:
        raise recorder.step.trace.error
    return recorder.step


@contextlib.contextmanager
def losses() -> Iterator[list[float]]:
    """What each backward inside begins with, the loss scale included; cheap."""
    found: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            found.append(float(tensors.detach()))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield found
    finally:
        torch.autograd.backward = original


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its layer's own name and its own: "blocks.0.attn.q.weight"."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for layer, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{layer}.{name}", parameter))
    for name, parameter in model.named_parameters():  # the model's very own
        found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


class _Recorder:
    """Notes what is called while a step runs; changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.step = Step()
        self._model = model
        self._names = {id(own): name for name, own in named_parameters(model).items()}
        self._hooks = contextlib.ExitStack()

    @contextlib.contextmanager
    def recording(self, scaler: type) -> Iterator[None]:
        clipping = torch.nn.utils.clip_grad
        with self._hooks, contextlib.ExitStack() as stack:
            # What `clip_grad_norm_` calls, whatever name a trainer has imported it by.
            patches: tuple[tuple[Any, str, Kind], ...] = (
                (torch.autograd, "backward", "backward"),
                (clipping, "_clip_grads_with_norm_", "clip"),
                (torch.nn.utils, "clip_grads_with_norm_", "clip"),
                (clipping, "clip_grad_value_", "clip value"),
                (torch.nn.utils, "clip_grad_value_", "clip value"),
                *((own, "scale", "scale") for own in scaler.__mro__ if "scale" in vars(own)),
                *(
                    (own, "unscale_", "unscale")
                    for own in scaler.__mro__
                    if "unscale_" in vars(own)
                ),
            )
            for owner, name, kind in patches:
                original = getattr(owner, name, None)
                if original is not None:
                    setattr(owner, name, self._noted(original, kind))
                    stack.callback(setattr, owner, name, original)
            hook: Any = register_optimizer_step_pre_hook(self._optimizer_steps)
            stack.callback(hook.remove)
            for parameter in self._model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    register: Any = parameter.register_post_accumulate_grad_hook  # has no types
                    handle = register(self._accumulated)
                    stack.callback(handle.remove)
            if dist.is_available() and dist.is_initialized():
                stack.enter_context(_Collectives(self._reduced))
            yield

    def look(self, place: Place, tensor: torch.Tensor) -> None:
        """See the gradient of a tensor of the forward when backward comes to it."""
        # The loss itself is in no unit that a tensor's could be compared with.
        if not tensor.requires_grad or tensor.numel() == 1:
            return
        value = _norm(tensor.detach())[0]
        self.step.places.append(place)

        def reached(gradient: torch.Tensor) -> None:
            self._flow(place, place.layer, gradient, value)

        # A module's input may be a parameter, learnt queries say, which outlives the step.
        handle = tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        self._hooks.callback(handle.remove)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        layer = self._names[id(parameter)].rpartition(".")[0]
        if parameter.grad is not None:
            self._flow(None, layer, parameter.grad, _norm(parameter.detach())[0])

    def _flow(self, place: Place | None, layer: str, gradient: torch.Tensor, value: float) -> None:
        norm, nonfinite = _norm(gradient.detach())
        self.step.flow.append(Flow(place, layer, norm / self.step.scale, value, nonfinite))

    def _noted(self, original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._total()
            synchronised = bool(getattr(self._model, "require_backward_grad_sync", True))
            result = original(*args, **kwargs)
            if kind == "scale":
                scaler = args[0]
                if scaler.is_enabled():
                    self._note(kind, before, scaler.get_scale())
                return result
            if kind == "unscale" and not args[0].is_enabled():
                return result
            limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
            amount = float(limit) if kind in ("clip", "clip value") and limit is not None else 0.0
            self._note(kind, before, amount, synchronised)
            if kind == "backward":
                root = args[0] if args else kwargs.get("tensors")
                if isinstance(root, torch.Tensor) and root.numel() == 1:
                    self.step.loss = float(root.detach()) / self.step.scale
                self.step.gradients = self._gradients(self.step.scale)
            return result

        return run

    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer unscales by itself, if a GradScaler has told it the scale.
        if getattr(optimizer, "grad_scale", None) is not None:
            self._note("unscale", self._total())
        self._note("step", self._total())
        unscaled = any(event.kind == "unscale" for event in self.step.events)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {self._names[id(p)] for p in own if id(p) in self._names}
        factor = self.step.scale if getattr(optimizer, "grad_scale", None) is not None else 1.0
        factor = factor if unscaled else 1.0
        used = self._gradients(factor)
        self.step.used |= {name: used[name] for name in mine if name in used}

    def _reduced(self, count: int) -> None:
        self._note("reduce", self._total(), float(count))

    def _note(
        self, kind: Kind, before: float, amount: float = 0.0, synchronised: bool = True
    ) -> None:
        self.step.events.append(Event(kind, before, self._total(), amount, synchronised))

    def _total(self) -> float:
        norms = [_norm(p.grad)[0] for p in self._model.parameters() if p.grad is not None]
        return math.hypot(*norms)

    def _gradients(self, scale: float) -> dict[str, Gradient]:
        found = {}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                norm, nonfinite = _norm(parameter.grad)
                count = elements(parameter.grad).numel()
                rms = norm / max(count - nonfinite, 1) ** 0.5 / scale
                value = _norm(parameter.detach())[0] / max(count, 1) ** 0.5
                found[self._names[id(parameter)]] = Gradient(rms, value, count, nonfinite)
        return found


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells how many elements each reduction over ranks has."""

    def __init__(self, told: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional") and "reduce" in name:
            tensors = tree_leaves(args)
            found = (x.numel() for x in tensors if isinstance(x, torch.Tensor))
            self._told(sum(found))
        return result


def _norm(tensor: torch.Tensor) -> tuple[float, int]:
    """Euclidean norm of what is finite, and how many elements are not."""
    local = elements(tensor)
    if not local.numel():
        return 0.0, 0
    norm = float(torch.linalg.vector_norm(local, dtype=torch.float64))
    if norm < float("inf"):  # False for NaN
        return norm, 0
    finite = local[local.isfinite()]
    norm = float(torch.linalg.vector_norm(finite, dtype=torch.float64))
    return norm, local.numel() - finite.numel()
