"""Taking tensors: hooked modules, one matrix of rows a device, and their samples on the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from act_exporter import statistics
from act_exporter.forwards import Forwards
from act_exporter.graphs import capturing
from act_exporter.hooks import (
    BeginHook,
    EndHook,
    InputHook,
    OutputHook,
    add_observer,
    remove_observer,
)
from act_exporter.layers import ModuleTap
from act_exporter.rows import COLUMNS, Array, empty, merge
from act_exporter.sample import Sample
from act_exporter.transfer import to_host

_PENDING_LIMIT = 4
"""Copies to the host under way on an accelerator; more mean that the host never catches up, and
the next sample is dropped and counted rather than waited for."""


@dataclass(slots=True)
class _Copy:
    """One sample on its way to the host."""

    step: int
    time: float
    depth: Array
    largest: Array
    # A tensor a device: its rows one after the other, then the values with these names.
    packed: list[tuple[torch.Tensor, list[str]]] = field(default_factory=list)
    events: list[torch.Event] = field(default_factory=list)
    lost: bool = False

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def sample(self, taps: int) -> Sample:
        size = taps * COLUMNS
        matrices: list[Array] = []
        if self.lost:
            self.packed = []
            matrices = [empty(taps)]
        values: dict[str, float] = {}
        for tensor, names in self.packed:
            numbers = tensor.double().numpy()
            matrices.append(numbers[:size].reshape(taps, COLUMNS))
            values.update(zip(names, numbers[size:].tolist(), strict=True))
        rows = merge(matrices)
        return Sample(self.step, self.time, rows, values, self.depth, self.largest, lost=self.lost)


class Probe:
    """Hooks on the taps of one model and the rows that they fill.

    Everything but the operator runs in the training thread, between steps.

    Args:
        model: whose forward in training mode, with gradients on, counts.
        taps: what to watch, one row each.
        exceed_threshold: for the share of elements with |x| above it.
        on_stuck: called in a forward when far more of them than usual came without a step's end;
            the rows should be taken.
        on_error: told of anything that went wrong inside a hook.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[ModuleTap],
        *,
        exceed_threshold: float,
        on_stuck: Callable[[], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.sampling = True  # whether the step under way is sampled
        self.paused = False  # whether nothing counts: a save or a load runs the model or optimizer
        self.seconds = 0.0  # spent in the operator, on the host
        self._forwards = Forwards()  # of the root in training since the last step
        self._captured = False  # whether a CUDA graph gathers at each of its replays
        self._threshold = exceed_threshold
        self._limits = [tap.limit for tap in taps]
        self._heads = [tap.heads.dim if tap.heads is not None else 0 for tap in taps]
        self._logits = [tap.is_logits for tap in taps]
        self._depth = np.full(len(taps), np.nan)
        self._largest = np.full(len(taps), np.nan)
        self._seen: list[torch.dtype | None] = [None] * len(taps)
        self._next_depth = 0
        self._on_stuck = on_stuck
        self._on_error = on_error
        self._matrices: dict[torch.device, torch.Tensor] = {}
        # As they were when the forward began that is not over or failed.
        self._before: dict[torch.device, torch.Tensor] | None = None
        self._failed = False  # whether that one is known to have failed
        self._recorded: dict[str, torch.Tensor] = {}
        self._copies: deque[_Copy] = deque()
        self._number = add_observer(self)
        # Whether the forward under way is one of training: decided once, at the root.
        training = _on_cpu(False)
        home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._handles: list[RemovableHandle] = []
        try:
            key = _on_cpu([self._number, 0])
            self._handles.append(model.register_forward_pre_hook(BeginHook(key, training)))
            for index, tap in enumerate(taps):
                parameter = next(tap.module.parameters(), None)
                row = self._matrix(parameter.device if parameter is not None else home)[index]
                self._hook(tap, row, _on_cpu([self._number, index]), training)
            # After those of the taps, one of which may be the root itself.
            end = EndHook(key, training)
            self._handles.append(model.register_forward_hook(end, always_call=True))
        except BaseException:
            self.close()
            raise

    def _hook(
        self, tap: ModuleTap, row: torch.Tensor, key: torch.Tensor, training: torch.Tensor
    ) -> None:
        if tap.tensor == "output":
            handle = tap.module.register_forward_hook(OutputHook(row, key, training))
        else:
            hook = InputHook(row, key, training)
            handle = tap.module.register_forward_pre_hook(hook, with_kwargs=True)
        self._handles.append(handle)

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last step; a graph that replays hides that."""
        return not self._forwards.count and not self._captured

    def record(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep scalars for the next sample; those on a device are read with it, not here.

        Inside a graph that is being captured nothing is kept: its tensors have no values yet.
        """
        if capturing():
            return
        for name, value in values.items():
            if value.numel() != 1:
                raise ValueError(f"{name} has {value.numel()} elements, not one")
            local = _whole(name, value.detach())
            # A copy, since `loss /= n` may follow; a few bytes on the value's own device.
            matrix = self._matrix(local.device)
            self._recorded[name] = local.reshape(()).to(matrix.dtype, copy=True)

    def take(self, step: int) -> None:
        """Send the rows gathered for `step` towards the host and start empty ones.

        Whatever happens there is a sample for the step, if a lost one: ranks count on it.
        """
        if self._failed:
            self._drop_failed()
        self._before = None  # one that makes the step itself is still under way, and counts
        copy = _Copy(step, time.time(), self._depth.copy(), self._largest.copy())
        pending = sum(not waiting.lost for waiting in self._copies)
        self._copies.append(copy)
        copy.lost = True
        if pending >= _PENDING_LIMIT:
            self._clear()
            raise RuntimeError(f"{_PENDING_LIMIT} samples have not reached the host; one is lost")
        self._send(copy)
        copy.lost = False

    def _send(self, copy: _Copy) -> None:
        recorded = self._recorded
        self._recorded = {}
        for device, matrix in self._matrices.items():
            values = {name: value for name, value in recorded.items() if value.device == device}
            packed = torch.cat([matrix.flatten(), *(value[None] for value in values.values())])
            copy.packed.append((to_host(packed, copy.events), list(values)))
            statistics.clear(matrix)

    def skip(self) -> None:
        """A step that is not sampled has ended: what a CUDA graph gathered in it does not count."""
        if self._captured:
            self._clear()

    def end_step(self) -> None:
        """A step has ended, sampled or not: what it had of forwards is usual."""
        self._forwards.end_step()

    def arrived(self) -> list[Sample]:
        """The samples that have reached the host since the last call or were lost, in order."""
        samples = []
        while self._copies and self._copies[0].arrived():
            samples.append(self._copies.popleft().sample(len(self._limits)))
        return samples

    def forget(self) -> None:
        """Drop what was taken and not handed out: it belongs to steps that were rolled back."""
        for copy in self._copies:
            copy.lost = True
        self._recorded = {}
        self._forwards.count = 0
        self._before = None
        self._clear()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        remove_observer(self._number)

    def begin(self) -> None:
        """A forward of the root in training begins."""
        if self.paused:
            return
        if capturing():
            self._captured = True
            return
        self._drop_failed()
        if self._forwards.is_stuck():
            self._on_stuck()
        self._forwards.count += 1
        if self.sampling:
            self._before = {device: matrix.clone() for device, matrix in self._matrices.items()}

    def end(self, *, failed: bool) -> None:
        """A forward of the root is over."""
        if self.paused:
            return
        self._failed = failed
        if not failed:
            self._before = None

    def _drop_failed(self) -> None:
        """Undo what a forward wrote that has not reached its end: out of memory, and tried again.

        One that a compiler made a graph of says nothing when it fails, so the next one asks.
        """
        if self._before is None:
            return
        for device, matrix in self._matrices.items():
            before = self._before.get(device)
            if before is None:
                statistics.clear(matrix)
            else:
                matrix.copy_(before)
        self._before = None
        self._failed = False
        self._forwards.count -= 1

    def observe(self, x: torch.Tensor, row: torch.Tensor, index: int) -> None:
        """The tap number `index` saw `x`."""
        if self.paused or not (self.sampling or capturing()):
            return
        started = time.perf_counter()
        if x.device != row.device:  # the model was moved since
            row = self._matrix(x.device)[index]
        limit = self._limits[index]
        if statistics.has_statistics(x) and (limit is None or x.numel() <= limit):
            statistics.add(x, row, self._threshold)
            if self._heads[index]:
                statistics.add_row_norm(x, row, self._heads[index])
            if self._logits[index]:
                statistics.note_log_partition(x, row)
        else:
            statistics.count_call(row)
        if x.dtype is not self._seen[index]:
            self._note(index, x.dtype)
        self.seconds += time.perf_counter() - started

    def _note(self, index: int, dtype: torch.dtype) -> None:
        """The tap ran for the first time, or in another dtype than before."""
        if self._seen[index] is None:
            self._depth[index] = self._next_depth
            self._next_depth += 1
        self._seen[index] = dtype
        self._largest[index] = torch.finfo(dtype).max if dtype.is_floating_point else np.nan

    def failed(self, error: Exception) -> None:
        """Something went wrong in a hook."""
        self._on_error("hook", error)

    def _clear(self) -> None:
        for matrix in self._matrices.values():
            statistics.clear(matrix)

    def _matrix(self, device: torch.device) -> torch.Tensor:
        if device.type == "meta":  # not materialised yet; where it will be, the first call tells
            device = torch.device("cpu")
        matrix = self._matrices.get(device)
        if matrix is None:
            matrix = statistics.empty_rows(len(self._limits), device)
            self._matrices[device] = matrix
            statistics.warm_up(device, self._threshold)
        return matrix


def _on_cpu(value: bool | list[int]) -> torch.Tensor:
    """What every hook reads: on the host, and writable, whatever mode it is made in."""
    with torch.inference_mode(False):
        return torch.tensor(value, device="cpu")


def _whole(name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's `value`, where that is all of it."""
    local = getattr(value, "to_local", None)
    if local is None:
        return value
    placements = getattr(value, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        # Joining it waits for all ranks, and whether all of them record is not known here.
        raise ValueError(f"{name} is spread over the ranks; record {name}.full_tensor()")
    whole: torch.Tensor = local()
    return whole
