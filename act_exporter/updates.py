"""What the optimizers' steps do to the weights, from a sample of each.

No activation shows a lost step counter of Adam (a first update 2.24 times the right one, under
normal gradients), nor weights in 16 bits whose updates are rounded away. So some elements of each
matrix are copied before a step and compared after it, on their own device and without waiting for
it; sums over layers and over the model are made on the host.

From the end of one step to the end of the next each optimizer steps once, wherever the step's end
is said to be: at that of the first of several optimizers, or before most of those that step inside
backward. So a look is of every optimizer once, and complete when each trainable matrix was stepped
or one begins to be stepped anew.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from act_exporter.changes import Compared, Copied, add_up, compare, copy_elements, places_of
from act_exporter.layers import ModuleTap
from act_exporter.matrices import Matrices
from act_exporter.sample import Update
from act_exporter.transfer import to_host

# Each so-many-th sampled step is looked at: a look costs more than the statistics of a small step.
_LOOK_EVERY = 10

AFTER_RESUME = 10
"""Sampled steps in a row that are looked at after a restored state or a rollback: the wrong updates
of a lost optimizer state are the first five (2.2 to 1.2 times the right ones, measured)."""

# Likewise where there is no window yet. Adam's updates are largest at first (0.92 of the learning
# rate, 0.29 after 200 steps): looked at each tenth step from the start, a window would still be of
# those after 1,000 steps, and twice the right update would lie below its mean.
_AT_FIRST = 200

# Looks after which the matrices are looked for anew: a walk over the modules costs like a look.
_SCAN_EVERY = 10

# As in the probe: more copies under way mean that the host never catches up.
_PENDING_LIMIT = 4


@dataclass(slots=True)
class _Look:
    """One step of each optimizer, and once sent on its way to the host."""

    matrices: Matrices
    step: int | None = None
    begun: dict[int, list[Copied]] = field(default_factory=dict)  # by the optimizer's identity
    stepped: set[int] = field(default_factory=set)  # places of the matrices whose step has ended
    compared: list[Compared] = field(default_factory=list)
    skipped: list[torch.Tensor] = field(default_factory=list)  # not 0 where a scaler skips
    events: list[torch.Event] = field(default_factory=list)

    def is_complete(self) -> bool:
        return self.stepped >= self.matrices.trainable()

    def send(self) -> None:
        for compared in self.compared:
            compared.norms = to_host(compared.norms, self.events)
        self.skipped = [to_host(found, self.events) for found in self.skipped]

    def update(self, step: int) -> Update | None:
        """None of a step that a scaler skipped, or in which nothing could be compared."""
        if not self.compared or any(bool(found.any()) for found in self.skipped):
            return None
        return add_up(step, self.compared, self.matrices)


class Updates:
    """Samples of one model's weights around its optimizers' steps.

    Looked at are parameters with two dimensions or more, of a sharded one (DTensor) this rank's
    part; not those that are not contiguous, not real numbers, or of a tensor class of their own.
    Gradients are asked for after the step, since they may be made by a closure inside it: of an
    optimizer that drops them there it is not known what was left unchanged. Nothing is kept of a
    step that a loss scaler skips.

    Args:
        model: whose parameters are meant.
        taps: whose modules have values of their own, where there are matrices in them.
        enabled: False for nothing at all.
        on_error: told of anything that went wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[ModuleTap],
        *,
        enabled: bool,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.sampling = True  # whether the step under way is sampled
        self.seconds = 0.0  # spent here, on the host
        # Weakly, all of it: an exporter that nobody closed must not keep a model's memory.
        self._model = weakref.ref(model)
        self._watched = {tap.layer: weakref.ref(tap.module) for tap in taps}
        self._enabled = enabled
        self._on_error = on_error
        self._matrices = Matrices([], {}, [], np.zeros((2, 0), dtype=np.int64))
        self._look: _Look | None = None
        self._copies: deque[_Look] = deque()
        self._often = _AT_FIRST  # looks that are made in a row
        self._since = 0  # sampled steps since the last look
        self._looks = 0
        if enabled:
            self._contained(self._learn_matrices)

    @property
    def series(self) -> int:
        """How many layers have values, at most."""
        return len(self._matrices.layers)

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done around an optimizer's step."""
        due = self._often > 0 or self._since >= _LOOK_EVERY - 1
        return self._enabled and (self._look is not None or (self.sampling and due))

    def begin(self, optimizer: Optimizer) -> None:
        """A step of `optimizer` begins."""
        if self.wanted:
            self._contained(lambda: self._begin(optimizer))

    def end(self, optimizer: Optimizer) -> None:
        """It has ended."""
        if self._look is not None:
            self._contained(lambda: self._end(optimizer))

    def take(self, step: int) -> None:
        """The sampled `step` has ended, as its first optimizer has or the trainer says."""
        if self._enabled:
            self._contained(lambda: self._take(step))

    def arrived(self) -> list[Update]:
        """What has reached the host since the last call, oldest first."""
        arrived = []
        while self._copies and all(event.query() for event in self._copies[0].events):
            look = self._copies.popleft()
            update = look.update(look.step or 0)
            if update is not None:
                arrived.append(update)
        return arrived

    def look_often(self, *, learnt: bool) -> None:
        """Look at each of the next sampled steps: a state was restored, or a window is learnt anew.

        Args:
            learnt: whether there is a window that the next updates are held against.
        """
        self._often = AFTER_RESUME if learnt else _AT_FIRST

    def forget(self) -> None:
        """Drop what was not handed out: it belongs to no step, or to one that was undone."""
        self._copies.clear()
        self.drop()

    def drop(self) -> None:
        """What the step under way has had so far must not count."""
        self._look = None

    def close(self) -> None:
        """Look no more."""
        self._enabled = False
        self.forget()

    def _contained(self, run: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            with torch.no_grad():
                run()
        except Exception as error:
            self._failed(error)
        self.seconds += time.perf_counter() - started

    def _failed(self, error: Exception) -> None:
        self._look = None
        with contextlib.suppress(Exception):
            self._on_error("update", error)

    def _begin(self, optimizer: Optimizer) -> None:
        look = self._look
        if look is not None and not look.stepped.isdisjoint(places_of(optimizer, look.matrices)):
            if look.step is None:
                return  # several steps before one is told of: the first is the sample
            self._send(look)
            look = None
            if not self.wanted:
                return
        if look is None:
            self._learn_matrices()
            look = self._look = _Look(self._matrices)
        # One that calls its base class's `step` in its own begins twice: the second time counts.
        look.begun[id(optimizer)] = copy_elements(optimizer, look.matrices)

    def _end(self, optimizer: Optimizer) -> None:
        look = self._look
        if look is None or id(optimizer) not in look.begun:
            return
        parts = look.begun.pop(id(optimizer))
        look.stepped |= places_of(optimizer, look.matrices).keys()
        look.compared += [
            compared for part in parts if (compared := compare(part, look.matrices)) is not None
        ]
        # Set while a GradScaler calls an optimizer that skips by itself (a fused one).
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            look.skipped.append(found.detach().clone())
        if look.step is not None and look.is_complete():
            self._send(look)

    def _take(self, step: int) -> None:
        look = self._look
        self._since += 1
        if look is None or not look.stepped:
            return
        if look.step is not None:
            self._send(look)
            return
        self._since, self._often = 0, max(self._often - 1, 0)
        look.step = step
        if look.is_complete():
            self._send(look)

    def _send(self, look: _Look) -> None:
        self._look = None
        if len(self._copies) >= _PENDING_LIMIT:
            raise RuntimeError(f"{_PENDING_LIMIT} updates have not reached the host; one is lost")
        look.send()
        self._copies.append(look)

    def _learn_matrices(self) -> None:
        """Look for them at first, where some are gone, and now and then, since others may join."""
        known = self._matrices.references
        gone = any(reference() is None for reference in known)
        if gone or self._looks % _SCAN_EVERY == 0:
            self._matrices = Matrices.find(self._model(), self._watched)
        self._looks += 1
