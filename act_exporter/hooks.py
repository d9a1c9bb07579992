"""The hooks on a model and the operator that they call.

A hook does nothing but find the tensor and call one operator, which torch.compile cannot look
into: whether this step is sampled, whether this forward counts and what happens on an error is
decided inside it, so that none of it is traced and no flag makes a graph recompile. (A Python
flag, a counter or a row number in the hook each end in recompilation limits.) A hook therefore
holds nothing but tensors: its row, a key that says whose row it is, and the probe's flag. A
compiler may hand the operator copies of what it writes to, so nothing is known by its address.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Observer(Protocol):
    """What the operators hand their tensors to; called in the middle of a forward."""

    def begin(self) -> None:
        """A forward of the root in training begins."""

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
    """The two operators, once a process; raw, since a decorated one costs ten times as much."""
    make: Any = torch.library.Library  # has no types
    library = make("act_exporter", "DEF")
    for schema, run in (
        ("begin(Tensor(a!) flag, Tensor key, bool training) -> ()", _begin),
        ("observe(Tensor x, Tensor(a!) row, Tensor key, Tensor training) -> ()", _observe),
    ):
        name = library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"act_exporter::{name}", lambda *_: None, lib=library)
    return library


def _in_backward() -> bool:
    """Whether activation checkpointing runs a forward a second time, inside backward."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # private: may go away
    return task is not None and task() != -1


def _begin(flag: torch.Tensor, key: torch.Tensor, training: bool) -> None:
    # Inside reentrant checkpointing gradients are off, in an evaluation too: only the root knows.
    if _in_backward():
        return
    flag.fill_(training)
    with _contained(key) as observer:
        if training and observer is not None:
            observer.begin()


def _observe(x: torch.Tensor, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
    if training.numpy() and not _in_backward():
        with _contained(key) as observer:
            if observer is not None:
                observer.observe(x, row, int(key[1]))


@contextlib.contextmanager
def _contained(key: torch.Tensor) -> Iterator[Observer | None]:
    """The key's observer; what goes wrong inside is told to it and goes no further."""
    observer = _OBSERVERS.get(int(key[0]))
    try:
        yield observer
    except Exception as error:
        if observer is not None:
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
    elif is_dataclass(value):
        parts = vars(value).values()
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

    def __reduce__(self) -> tuple[type[_Unwatched], tuple[()]]:
        return _Unwatched, ()

    # Nothing is returned: what a hook returns replaces the module's input or output.
    def run(self, module: nn.Module, *values: Any) -> None:
        if torch.compiler.is_exporting():
            return  # an exported program must load where this package is not
        if torch.compiler.is_compiling():
            self.call(module, *values)
            return
        with _contained(self.key):
            self.call(module, *values)

    def call(self, module: nn.Module, *values: Any) -> None:
        raise NotImplementedError


class _Unwatched:
    """What a copied or unpickled model has in a hook's place: a copy is not what trains here."""

    def __call__(self, *_: Any) -> None:
        pass


class _TapHook(_Hook):
    def __init__(self, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
        super().__init__(key, training)
        self.row = row

    def call(self, module: nn.Module, *values: Any) -> None:
        x = _first_tensor(values)
        if x is not None:
            torch.ops.act_exporter.observe(x.detach(), self.row, self.key, self.training)


class OutputHook(_TapHook):
    """A forward hook on a module whose output is watched."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.run(module, output)


class InputHook(_TapHook):
    """A forward pre-hook, with keywords, on a module whose input is watched."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.run(module, args, kwargs)


class BeginHook(_Hook):
    """A forward pre-hook on the root: decides whether this is a forward of training."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.run(module)

    def call(self, module: nn.Module, *values: Any) -> None:
        training = module.training and torch.is_grad_enabled()
        torch.ops.act_exporter.begin(self.training, self.key, training)


class EndHook(_Hook):
    """A forward hook on the root, called whatever happens in it: no forward is under way."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.run(module)

    def call(self, module: nn.Module, *values: Any) -> None:
        # A part that is called by itself, to sample or to evaluate, is no training forward.
        torch.ops.act_exporter.begin(self.training, self.key, False)
