"""The forward in other number formats than the model's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Trace
from act_exporter.layers import named_modules

FP16_MAX = float(torch.finfo(torch.float16).max)


def has_fp16_weights(model: nn.Module) -> bool:
    return any(parameter.dtype == torch.float16 for parameter in model.parameters())


def uses_fp16(subject: Subject) -> bool:
    """Whether numbers have to fit into float16: a loss scale is of no use without it."""
    scaled = subject.scaler is not None and bool(subject.scaler.is_enabled())
    return scaled or has_fp16_weights(subject.model)


def autocast(subject: Subject, dtype: torch.dtype, kept: Sequence[str] = ()) -> Trace:
    """The forward under autocast, on the model's device, without gradients.

    Args:
        subject: the model and batch.
        dtype: what matrices and attentions reckon in.
        kept: names of modules which, with all inside, reckon in float32.
    """
    device = next((p.device.type for p in subject.model.parameters()), "cpu")
    modules = dict(named_modules(subject.model))
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for name in kept:
            stack.enter_context(_in_float32(modules[name], device))
        stack.enter_context(torch.autocast(device, dtype))
        return subject.trace()


@contextlib.contextmanager
def _in_float32(module: nn.Module, device: str) -> Iterator[None]:
    """Autocast switched off in a module's forward, and its arguments as float32."""
    forward: Callable[..., Any] = module.forward
    own = "forward" in vars(module)

    def precise(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return forward(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    module.forward = precise
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


def whole(subject: Subject, dtype: torch.dtype) -> Trace:
    """The forward of a copy of the model, all of it and the batch in `dtype`.

    The error of a model that cannot be copied stands in the trace.
    """
    try:
        model = copy.deepcopy(subject.model).to(dtype)
    except Exception as error:
        return Trace(error=error)  # DDP holds a process group, for one
    with torch.no_grad():
        return Subject(model, _cast(subject.batch, dtype)).trace()


def _cast(found: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors as `dtype`, in the containers that they are in."""
    if isinstance(found, torch.Tensor):
        return found.to(dtype) if found.is_floating_point() else found
    if isinstance(found, dict):
        return {name: _cast(value, dtype) for name, value in found.items()}
    if isinstance(found, Mapping):
        # A tokenizer's own mapping: what a forward takes are its items.
        return _cast(dict(found), dtype)
    if isinstance(found, tuple | list) and not hasattr(found, "_fields"):
        return type(found)(_cast(value, dtype) for value in found)
    return found
