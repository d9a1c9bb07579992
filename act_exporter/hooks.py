"""The hooks on a model and the operator that they call.

A hook does nothing but find the tensor and call one operator, which torch.compile cannot look
into: whether this step is sampled, whether this forward counts and what happens on an error is
decided inside it, so that none of it is traced and no flag makes a graph recompile. (A Python
flag, a counter or a row number in the hook each end in recompilation limits.) A hook therefore
holds nothing but tensors: its row, a key that says whose row it is, and the probe's flag. A
compiler may hand the operator copies of what it writes to, so nothing is known by its address.

Not seen, on purpose and without an error: forwards under vmap, func.grad and their like, forwards
outside training (evaluation, no_grad, inference mode), recomputation inside backward, programs that
are exported or traced, fake tensors, and copies of a watched model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Observer(Protocol):
    """What the operators hand their tensors to; called in the middle of a forward."""

    def begin(self) -> None:
        """A forward of the root in training begins."""

    def end(self, *, failed: bool) -> None:
        """The forward of the root is over; `failed` where an error came out of it."""

    def observe(self, x: torch.Tensor, row: torch.Tensor, index: int) -> None:
        """The tap number `index` saw `x`; its row is to be added to."""

    def failed(self, error: Exception) -> None:
        """Something went wrong, here or in a hook."""


_OBSERVERS: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()
"""Observers by number: the way from a key back to its observer."""

_NUMBERS = itertools.count()


def add_observer(observer: Observer) -> int:
    """Give it the number that the keys of its hooks hold."""
    _define_operators()
    number = next(_NUMBERS)
    _OBSERVERS[number] = observer
    return number


def remove_observer(number: int) -> None:
    """Hand it nothing any more, though a compiled graph may still have its hooks inside."""
    _OBSERVERS.pop(number, None)


@functools.cache
def _define_operators() -> Any:
    """The operators, once a process; raw, since a decorated one costs ten times as much."""
    make: Any = torch.library.Library  # has no types
    library = make("act_exporter", "DEF")
    for schema, run in (
        ("begin(Tensor(a!) flag, Tensor key, bool training) -> ()", _begin),
        ("end(Tensor(a!) flag, Tensor key, bool returned) -> ()", _end),
        ("observe(Tensor x, Tensor(a!) row, Tensor key, Tensor training) -> ()", _observe),
        # Writes to the flag in name only: an operator without an effect is optimised away.
        ("failed(Tensor(a!) flag, Tensor key, str what) -> ()", _failed_in_trace),
    ):
        # Called between the CUDA graphs that a compiler makes, not inside one, where neither the
        # flag nor the key could be looked at.
        name = library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
        library.impl(name, run, "CompositeExplicitAutograd")
        # Under vmap, func.grad and their like a tensor stands for many, or for a value and its
        # derivative: it is skipped, eager and compiled alike, before a transform can refuse it.
        library.impl(name, _skip, "FuncTorchDynamicLayerFrontMode")
        torch.library.register_fake(f"act_exporter::{name}", _skip, lib=library)
    _keep_out_of_dynamo(_Hook.__call__)
    return library


def _skip(*_: Any) -> None:
    """What an operator does where nothing is to be seen."""


def _keep_out_of_dynamo(function: Any) -> None:
    """Have `function` run as it is where torch.compile would make a graph of it alone.

    A module that is compiled by itself has its own hooks called beside its graph, not in it. Each
    would be compiled, and again for every shape. Inside a graph it is traced as before, which
    `torch.compiler.disable` would not let it be.
    """
    with contextlib.suppress(ImportError, AttributeError):  # private: may go away
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, strategy)


def _in_backward() -> bool:
    """Whether activation checkpointing runs a forward a second time, inside backward."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # private: may go away
    return task is not None and task() != -1


def _on_fake_tensors() -> bool:
    """Whether only shapes are being found out (FakeTensorMode): no operator mixes with those."""
    modes: Any = torch._C
    try:
        return modes._get_dispatch_mode(modes._TorchDispatchModeKey.FAKE) is not None
    except AttributeError:  # private: may go away
        return False


def _begin(flag: torch.Tensor, key: torch.Tensor, training: bool) -> None:
    try:
        # Inside reentrant checkpointing gradients are off, in an evaluation too: only the root
        # knows.
        if _in_backward():
            return
        before = bool(flag.numpy())
        flag.fill_(training)
        observer = _OBSERVERS.get(int(key[0]))
        if observer is None:
            return
        if training:
            observer.begin()
        elif before:  # an evaluation inside of one in training, whose end is not seen any more
            observer.end(failed=False)
    except Exception as error:
        _tell(key, error)


def _end(flag: torch.Tensor, key: torch.Tensor, returned: bool) -> None:
    try:
        if _in_backward():
            return
        training = bool(flag.numpy())
        # A part that is called by itself, to sample or to evaluate, is no training forward.
        flag.fill_(False)
        observer = _OBSERVERS.get(int(key[0]))
        if training and observer is not None:
            # A model may return None, and be called again while an error is handled; not both.
            observer.end(failed=not returned and sys.exception() is not None)
    except Exception as error:
        _tell(key, error)


def _observe(x: torch.Tensor, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
    try:
        if training.numpy() and not _in_backward():
            observer = _OBSERVERS.get(int(key[0]))
            if observer is not None:
                observer.observe(x, row, int(key[1]))
    except Exception as error:
        _tell(key, error)


def _failed_in_trace(flag: torch.Tensor, key: torch.Tensor, what: str) -> None:
    _tell(key, RuntimeError(f"while the model was compiled: {what}"))


def _tell(key: torch.Tensor, error: Exception) -> None:
    """Tell the key's observer what went wrong; that this may go wrong too changes nothing."""
    with contextlib.suppress(Exception):
        observer = _OBSERVERS.get(int(key[0]))
        if observer is not None and not _on_fake_tensors():
            observer.failed(error)


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of what a module takes or returns, on this rank; None if there is none."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", None)  # a DTensor's shard
        return value if local is None else local()
    parts: Any = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        # By its fields: one with slots has no __dict__, and one may have a field left unset.
        parts = [getattr(value, name, None) for name in value.__dataclass_fields__]
    for part in parts:
        tensor = _first_tensor(part)
        if tensor is not None:
            return tensor
    return None


class _Hook:
    """A class, not a closure, so that a hooked model can be copied and pickled."""

    def __init__(self, key: torch.Tensor, training: torch.Tensor) -> None:
        self.key = key
        self.training = training

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()

    # Nothing is returned: what a hook returns replaces the module's input or output.
    def __call__(self, module: nn.Module, *values: Any) -> None:
        # A program that is exported or traced must load where this package is not.
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return
        try:
            self.run(module, *values)
        except Exception as error:
            if torch.compiler.is_compiling():
                # The message of an error in a trace is not always a constant there.
                name = type(error).__name__
                torch.ops.act_exporter.failed(self.training, self.key, name)
            else:
                _tell(self.key, error)

    def run(self, module: nn.Module, *values: Any) -> None:
        raise NotImplementedError


class Unwatched:
    """What a copied or unpickled model has in a hook's place: a copy is not what trains here."""

    def __call__(self, *_: Any) -> None:
        pass


class _TapHook(_Hook):
    def __init__(self, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
        super().__init__(key, training)
        self.row = row

    def observe(self, value: Any) -> None:
        x = _first_tensor(value)
        if x is not None:
            torch.ops.act_exporter.observe(x.detach(), self.row, self.key, self.training)


class OutputHook(_TapHook):
    """A forward hook on a module whose output is watched."""

    def run(self, module: nn.Module, *values: Any) -> None:
        self.observe(values[-1])


class InputHook(_TapHook):
    """A forward pre-hook, with keywords, on a module whose input is watched."""

    def run(self, module: nn.Module, *values: Any) -> None:
        self.observe(values)


class BeginHook(_Hook):
    """A forward pre-hook on the root: decides whether this is a forward of training."""

    def run(self, module: nn.Module, *values: Any) -> None:
        training = module.training and torch.is_grad_enabled()
        torch.ops.act_exporter.begin(self.training, self.key, training)


class EndHook(_Hook):
    """A forward hook on the root, called whatever happens in it: no forward is under way."""

    def run(self, module: nn.Module, *values: Any) -> None:
        torch.ops.act_exporter.end(self.training, self.key, values[-1] is not None)
