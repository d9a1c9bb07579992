"""Taking tensors: hooks on the watched modules, one operator, one matrix of rows a device.

A hook does nothing but find the tensor and call one operator, which torch.compile cannot look
into: whether this step is sampled, whether this forward counts and what happens on an error is
decided inside it, so that none of it is traced and no flag makes a graph recompile. (A Python
flag, a counter or a row number in the hook each end in recompilation limits.) A hook therefore
holds nothing but tensors: its row, a key that says whose row it is, and the probe's flag. A
compiler may hand the operator copies of what it writes to, so nothing is known by its address.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn

from act_exporter import statistics
from act_exporter.layers import Tap
from act_exporter.statistics import Array

_PROBES: weakref.WeakValueDictionary[int, Probe] = weakref.WeakValueDictionary()
"""Probes by number: the way from a key back to its probe."""

_NUMBERS = itertools.count()

_PENDING_LIMIT = 4
"""Copies to the host under way on an accelerator; more means that the host never catches up, and
the next sample is dropped and counted rather than waited for."""


@dataclass(slots=True)
class Sample:
    """What one sampled step left behind.

    Attributes:
        step: the step.
        rows: (taps, COLUMNS), on the host.
        values: what `Probe.record` was given since the last sample, by name.
    """

    step: int
    rows: Array
    values: dict[str, float]


@dataclass(slots=True)
class _Copy:
    """One sample on its way to the host."""

    step: int
    matrices: list[torch.Tensor]
    values: dict[str, torch.Tensor]
    events: list[torch.Event] = field(default_factory=list)

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)


class Probe:
    """Hooks on the taps of one model and the rows that they fill.

    Everything but the operator runs in the training thread, between steps.

    Args:
        model: whose forward in training mode, with gradients on, counts.
        taps: what to watch, one row each.
        exceed_threshold: for the share of elements with |x| above it.
        on_error: told of anything that went wrong inside a hook.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        *,
        exceed_threshold: float,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.sampling = True  # whether the step under way is sampled
        self.paused = False  # whether nothing counts: a save or a load runs the model or optimizer
        self.seconds = 0.0  # spent in the operator and in taking samples, on the host
        self._threshold = exceed_threshold
        self._limits = [tap.limit for tap in taps]
        self._on_error = on_error
        self._matrices: dict[torch.device, torch.Tensor] = {}
        self._recorded: dict[str, torch.Tensor] = {}
        self._copies: deque[_Copy] = deque()
        self._number = next(_NUMBERS)
        _PROBES[self._number] = self
        _define_operators()
        # Whether the forward under way is one of training: decided once, at the root.
        training = torch.zeros((), dtype=torch.bool)
        home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._handles = [model.register_forward_pre_hook(_BeginHook(training))]
        for index, tap in enumerate(taps):
            parameter = next(tap.module.parameters(), None)
            row = self._matrix(parameter.device if parameter is not None else home)[index]
            key = torch.tensor([self._number, index])
            if tap.tensor == "output":
                hook = _OutputHook(row, key, training)
                self._handles.append(tap.module.register_forward_hook(hook))
            else:
                pre_hook = _InputHook(row, key, training)
                self._handles.append(
                    tap.module.register_forward_pre_hook(pre_hook, with_kwargs=True)
                )

    def record(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep scalars for the next sample; those on a device are read with it, not here."""
        for name, value in values.items():
            # A copy, since `loss /= n` may follow; a few bytes on the value's own device.
            self._recorded[name] = value.detach().to(torch.float64, copy=True)

    def take(self, step: int) -> None:
        """Send the rows of the step that ends towards the host and start empty ones."""
        started = time.perf_counter()
        if len(self._copies) >= _PENDING_LIMIT:
            for matrix in self._matrices.values():
                statistics.clear(matrix)
            raise RuntimeError(f"{_PENDING_LIMIT} samples have not reached the host; one is lost")
        copy = _Copy(step, [], self._recorded)
        self._recorded = {}
        for matrix in self._matrices.values():
            copy.matrices.append(_to_host(matrix, copy.events))
            statistics.clear(matrix)
        copy.values = {name: _to_host(value, copy.events) for name, value in copy.values.items()}
        self._copies.append(copy)
        self.seconds += time.perf_counter() - started

    def arrived(self) -> list[Sample]:
        """The samples that have reached the host since the last call, oldest first."""
        samples = []
        while self._copies and self._copies[0].arrived():
            copy = self._copies.popleft()
            rows = statistics.merge([matrix.numpy() for matrix in copy.matrices])
            values = {name: float(value) for name, value in copy.values.items()}
            samples.append(Sample(copy.step, rows, values))
        return samples

    def forget(self) -> None:
        """Drop what was taken and not handed out: it belongs to steps that were rolled back."""
        self._copies.clear()
        self._recorded = {}
        for matrix in self._matrices.values():
            statistics.clear(matrix)

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        _PROBES.pop(self._number, None)

    def _matrix(self, device: torch.device) -> torch.Tensor:
        matrix = self._matrices.get(device)
        if matrix is None:
            matrix = statistics.empty_rows(len(self._limits), device)
            self._matrices[device] = matrix
        return matrix

    def _observe(self, x: torch.Tensor, row: torch.Tensor, index: int) -> None:
        if self.paused or not self.sampling:
            return
        started = time.perf_counter()
        try:
            if x.device != row.device:  # the model was moved since
                row = self._matrix(x.device)[index]
            statistics.count_call(row)
            limit = self._limits[index]
            if statistics.has_statistics(x) and (limit is None or x.numel() <= limit):
                add = statistics.add_on_cpu if x.is_cpu else statistics.add_on_device
                add(x, row, self._threshold)
        except Exception as error:
            self._on_error("hook", error)
        self.seconds += time.perf_counter() - started


def _in_backward() -> bool:
    """Whether activation checkpointing runs a forward a second time, inside backward."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # private: may go away
    return task is not None and task() != -1


def _to_host(tensor: torch.Tensor, events: list[torch.Event]) -> torch.Tensor:
    """A copy on the host, complete once the event that this may add to `events` has passed."""
    if tensor.is_cpu:
        return tensor.clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    events.append(event)
    return host


@functools.cache
def _define_operators() -> Any:
    """The two operators, once a process; raw, since a decorated one costs ten times as much."""
    make: Any = torch.library.Library  # has no types
    library = make("act_exporter", "DEF")
    for schema, run in (
        ("begin(Tensor(a!) flag, bool training) -> ()", _begin),
        ("observe(Tensor x, Tensor(a!) row, Tensor key, Tensor training) -> ()", _observe),
    ):
        name = library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"act_exporter::{name}", lambda *_: None, lib=library)
    return library


def _begin(flag: torch.Tensor, training: bool) -> None:
    # Inside reentrant checkpointing gradients are off, in an evaluation too: only the root knows.
    if not _in_backward():
        flag.fill_(training)


def _observe(x: torch.Tensor, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
    if training.numpy() and not _in_backward():
        number, index = key.tolist()
        probe = _PROBES.get(number)
        if probe is not None:
            probe._observe(x, row, index)


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

    def __reduce__(self) -> tuple[type[_Unwatched], tuple[()]]:
        return _Unwatched, ()


class _Unwatched:
    """What a copied or unpickled model has in a hook's place: a copy is not what trains here."""

    def __call__(self, *_: Any) -> None:
        pass


class _TensorHook(_Hook):
    def __init__(self, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor) -> None:
        self.row = row
        self.key = key
        self.training = training

    def observe(self, *candidates: Any) -> None:
        # Nothing is returned: what a hook returns replaces the module's input or output.
        if torch.compiler.is_compiling():
            self._observe(candidates)
            return
        try:
            self._observe(candidates)
        except Exception as error:
            probe = _PROBES.get(int(self.key[0]))
            if probe is not None:
                probe._on_error("hook", error)

    def _observe(self, candidates: Any) -> None:
        x = _first_tensor(candidates)
        if x is not None:
            torch.ops.act_exporter.observe(x.detach(), self.row, self.key, self.training)


class _OutputHook(_TensorHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.observe(output)


class _InputHook(_TensorHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.observe(args, kwargs)


class _BeginHook(_Hook):
    def __init__(self, flag: torch.Tensor) -> None:
        self.flag = flag

    def __call__(self, module: nn.Module, args: Any) -> None:
        training = module.training and torch.is_grad_enabled()
        torch.ops.act_exporter.begin(self.flag, training)
