"""The gradients' norms, taken at the end of backward, before anybody clips them.

At the optimizer's step it is too late: they are clipped by then (368 was seen as 1.0). So the
first parameter of a backward whose gradient is there asks the autograd engine to call back at that
backward's end, and there one norm a parameter is queued on the gradient's own device. Their copy to
the host leaves with the step's sample; sums over layers and over the model are made on the host.
"""

from __future__ import annotations

import contextlib
import operator
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from act_exporter.exceptions import SettingError
from act_exporter.graphs import capturing
from act_exporter.layers import ModuleTap
from act_exporter.norms import Pending, Shards, elements, find_shards, norms_of
from act_exporter.sample import Norms

# Modules that join a model in training are looked for this often, in sampled steps: the walk over
# all modules costs a third of what the norms of a small model cost.
_SCAN_EVERY = 100

# As in the probe: more copies under way mean that the host never catches up.
_PENDING_LIMIT = 4


Which = bool | Literal["all_ranks"]


class Scaler(Protocol):
    """What is needed of `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool:
        """Whether it scales at all."""

    def scale(self, outputs: Any) -> Any:
        """The tensor times the scale, without waiting for a device."""


class _Trigger:
    """The hook on a parameter. Holds nothing of the model: parameters outlive exporters."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = weakref.ref(gradients)

    def __call__(self, _parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return  # compiled autograd: a callback would break its graph
        try:
            gradients = self._gradients()
            if gradients is not None and gradients.wanted:
                gradients.begin()
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        gradients = self._gradients()
        if gradients is not None:
            gradients.failed(error)


class Gradients:
    """Hooks on the parameters of one model and the norms that they lead to.

    Each end of a backward overwrites what the one before it left, so that a step has the norm of
    the gradient that its micro-batches have added up. Nothing is counted of `torch.autograd.grad`,
    which accumulates nothing, and where optimizers step inside backward: at its end no gradient
    is left. Reentrant checkpointing runs backwards inside backward; each that begins before an
    outer parameter had its gradient costs the norms once more. Nothing is taken inside a captured
    CUDA graph and under compiled autograd.

    Args:
        model: whose parameters' gradients are meant.
        taps: whose modules have a norm of their own, where there are parameters in them.
        which: False for none, with no hook at all. "all_ranks" sums the squares of sharded
            parameters (DTensor) over the ranks: one small collective a backward, sampled or not,
            so all ranks must have an exporter that does so, or those that do wait for ever, and
            the model must be sharded by now. Without it the norms are of this rank's shards.
        scaler: the loss scaler in use, whose scale is in the gradients.
        on_error: told of anything that went wrong.

    Raises:
        SettingError: `which` is none of the above.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[ModuleTap],
        *,
        which: Which,
        scaler: Scaler | None,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        if which not in (True, False, "all_ranks"):
            raise SettingError(f"gradients={which!r}: expected True, False or 'all_ranks'")
        self.sampling = True  # whether the step under way is sampled
        self.seconds = 0.0  # spent here, on the host
        # Weakly, all of it: an exporter that nobody closed must not keep a model's memory.
        self._model = weakref.ref(model)
        self._watched = {tap.layer: weakref.ref(tap.module) for tap in taps}
        self._modules: list[weakref.ref[nn.Module]] = []
        self._listed: list[weakref.ref[nn.Parameter]] = []  # what stood in them, tied ones twice
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._scaler = scaler
        self._which = which
        self._on_error = on_error
        self._open = False  # whether a backward is under way that will call back
        self._taken = 0
        self._pending: Pending | None = None
        self._copies: deque[Pending] = deque()
        self._layers: dict[str, list[int]] = {}
        self._shards: list[Shards] = []
        self._handles: dict[int, tuple[weakref.ref[nn.Parameter], RemovableHandle]] = {}
        # Settled here: a rank that began to wait for the others later would do so alone.
        self._always = which == "all_ranks" and bool(find_shards(list(model.parameters())))
        self._contained(self._scan)

    @property
    def series(self) -> int:
        """How many layers have a norm, at most."""
        return sum(bool(own) for own in self._layers.values())

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done in this backward."""
        return (self.sampling or self._always) and not self._open

    def begin(self) -> None:
        """A parameter has its gradient: be called when all have."""
        self._contained(self._queue)

    def failed(self, error: Exception) -> None:
        """Something went wrong in a hook."""
        with contextlib.suppress(Exception):
            self._on_error("gradient", error)

    def take(self, step: int) -> None:
        """Send the norms of `step` towards the host."""
        pending, self._pending = self._pending, None
        self._open = False  # a backward that failed never calls back
        if pending is None or self._taken % _SCAN_EVERY == _SCAN_EVERY - 1:
            self._contained(self._scan)  # parameters may have been replaced, by FSDP for one
        self._taken += 1
        if pending is None:
            return
        if len(self._copies) >= _PENDING_LIMIT:
            error = RuntimeError(f"{_PENDING_LIMIT} norms have not reached the host; one is lost")
            self._on_error("gradient", error)
            return
        self._contained(lambda: self._send(pending, step))

    def _send(self, pending: Pending, step: int) -> None:
        pending.send(step)
        self._copies.append(pending)

    def arrived(self, scale: float | None) -> list[Norms]:
        """The norms that have reached the host since the last call, oldest first.

        Args:
            scale: the loss scale that is taken out of them where no scaler is known.
        """
        arrived = []
        while self._copies and all(event.query() for event in self._copies[0].events):
            norms = self._copies.popleft().norms().over(scale)
            if norms is not None:
                arrived.append(norms)
        return arrived

    def forget(self) -> None:
        """Drop what was not handed out: it belongs to no step, or to one that was undone."""
        self._copies.clear()
        self.drop()

    def drop(self) -> None:
        """What the step under way has had so far must not count."""
        self._pending = None
        self._open = False

    def close(self) -> None:
        """Remove all hooks."""
        self.sampling = self._always = False
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _contained(self, run: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            run()
        except Exception as error:
            self.failed(error)
        self.seconds += time.perf_counter() - started

    def _queue(self) -> None:
        # DDP and FSDP queue their own, which average gradients, as late as with the last parameter.
        # What is queued by a callback runs after all those.
        _call_at_end_of_backward(lambda: self._contained(self._queue_last))
        self._open = True

    def _queue_last(self) -> None:
        _call_at_end_of_backward(lambda: self._contained(self._end))

    def _end(self) -> None:
        self._open = False
        self._pending = None
        listed = self._list()
        known = [parameter() for parameter in self._listed]
        if len(listed) != len(known) or not all(map(operator.is_, listed, known)):
            self._scan()
        with torch.no_grad():
            pending = self._read()  # each rank, sampled or not
        self._pending = pending if self.sampling else None

    def _list(self) -> list[nn.Parameter]:
        modules = [module() for module in self._modules]
        return [
            parameter
            for module in modules
            if module is not None
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def _scan(self) -> None:
        """Learn which parameters there are and in which layers, and hook those that are new."""
        model = self._model()
        if model is None or not self._which:
            return
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._listed = [weakref.ref(parameter) for parameter in self._list()]
        parameters = list(model.parameters())
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        watched = {layer: module() for layer, module in self._watched.items()}
        self._layers = {
            layer: sorted({places[id(own)] for own in module.parameters() if id(own) in places})
            for layer, module in watched.items()
            if module is not None
        }
        self._shards = find_shards(parameters) if self._always else []
        for number in [number for number in self._handles if number not in places]:
            self._handles.pop(number)[1].remove()
        for parameter in parameters:
            known = self._handles.get(id(parameter))
            if parameter.requires_grad and (known is None or known[0]() is not parameter):
                register: Any = parameter.register_post_accumulate_grad_hook  # has no types
                handle = register(_Trigger(self))
                self._handles[id(parameter)] = weakref.ref(parameter), handle

    def _read(self) -> Pending | None:
        """Queue one norm a gradient; nothing here waits for a device."""
        if capturing():
            return None  # replays call nobody, so nobody would read them
        gradients = [
            parameter.grad if (parameter := known()) is not None else None
            for known in self._parameters
        ]
        groups = [
            (shards.places, shards.norms([gradients[place] for place in shards.places]))
            for shards in self._shards
        ]
        shared = {place for places, _ in groups for place in places}
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for place, gradient in enumerate(gradients):
            if gradient is None or place in shared:
                continue
            local = elements(gradient)
            places, tensors = alike.setdefault((local.device, local.dtype), ([], []))
            places.append(place)
            tensors.append(local)
        groups += [(places, norms_of(tensors)) for places, tensors in alike.values()]
        if not groups:
            return None
        scale = None
        if self._scaler is not None and self._scaler.is_enabled():
            # The public way to the scale that does not wait: `get_scale` does.
            scale = self._scaler.scale(torch.ones((), device=groups[0][1].device))
        return Pending(groups, self._layers, scale)


def _call_at_end_of_backward(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine  # as DDP and FSDP do; has no types
    engine.queue_callback(callback)
