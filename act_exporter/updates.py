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
import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from act_exporter.layers import Tap
from act_exporter.norms import norms_of
from act_exporter.statistics import Array
from act_exporter.transfer import to_host

# Elements of a matrix, at most: the RMS of so many normal ones is known to 2 %, a share to 1.6 %.
_ELEMENTS = 1024

# Matrices that are looked at; of more, so many spread over the depth. It bounds what a look costs
# on the host, about 40 microseconds a matrix, and its memory, a mebibyte in float32.
_MATRICES = 128

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

# Tensor classes whose memory is what it seems; others (quantised, of adapters) have an inner life.
_PLAIN = (torch.Tensor, nn.Parameter)

# Distance of two sampled elements, modulo the row: by this part of a row no few of them fall on the
# same columns or next to each other (a power of two would see one column of a matrix only).
_GOLDEN = 0.618


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did to the weights; a part is missing where nothing is known.

    Attributes:
        step: the step.
        values: "update_ratio", RMS of the update over that of the weights; "update_rms", RMS of
            the update over the learning rate, of parameters whose rate is known and above 0;
            "update_unchanged_ratio", of the elements with a gradient other than 0 the share that
            the step left bitwise as it was, 0 to 1, of parameters whose rate is not 0.
        ratios: watched layer to the first of these, over its own matrices.
        unchanged: watched layer to the last of these.
    """

    step: int
    values: dict[str, float]
    ratios: dict[str, float]
    unchanged: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The matrices of a model that are sampled, by place.

    Attributes:
        references: to them.
        places: identity to place.
        layers: names of the watched layers that have any.
        pairs: (2, n), a layer's number and the place of a matrix in it.
    """

    references: list[weakref.ref[nn.Parameter]]
    places: dict[int, int]
    layers: list[str]
    pairs: npt.NDArray[np.int64]

    def place(self, parameter: nn.Parameter) -> int | None:
        place = self.places.get(id(parameter))
        known = place is not None and self.references[place]() is parameter
        return place if known else None

    def trainable(self) -> set[int]:
        return {
            place
            for place, reference in enumerate(self.references)
            if (parameter := reference()) is not None and parameter.requires_grad
        }


@dataclass(slots=True)
class _Copied:
    """Matrices of one optimizer, device and dtype before its step.

    Attributes:
        places: of the matrices.
        rates: their learning rates, NaN where unknown.
        before: their sampled elements, one matrix after the other.
        sizes: how many of each.
    """

    places: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Compared:
    """The same after the step.

    Attributes:
        counts: (3, matrices) places, sampled elements, all elements.
        rates: learning rates.
        norms: (4 * matrices,) Euclidean norms of the change, the weights, and of ones where there
            was a gradient and where such an element did not change.
    """

    counts: npt.NDArray[np.int64]
    rates: Array
    norms: torch.Tensor


@dataclass(slots=True)
class _Look:
    """One step of each optimizer, and once sent on its way to the host."""

    matrices: _Matrices
    step: int | None = None
    begun: dict[int, list[_Copied]] = field(default_factory=dict)  # by the optimizer's identity
    stepped: set[int] = field(default_factory=set)  # places of the matrices whose step has ended
    compared: list[_Compared] = field(default_factory=list)
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
        places, sampled, elements = np.concatenate([part.counts for part in self.compared], axis=1)
        rates = np.concatenate([part.rates for part in self.compared])
        rows = [part.norms.double().numpy().reshape(4, -1) for part in self.compared]
        with np.errstate(over="ignore", invalid="ignore"):
            # What was counted of a sample stands for the whole matrix.
            change, weights, touched, same = np.concatenate(rows, axis=1) ** 2 * elements / sampled
        known = rates > 0
        # A rate of 0 leaves everything as it is, on purpose.
        touched, same = np.where(rates == 0, 0, [touched, same])
        values = {
            "update_ratio": _root(change.sum(), weights.sum()),
            "update_rms": _root((change[known] / rates[known] ** 2).sum(), elements[known].sum()),
            "update_unchanged_ratio": _share(same.sum(), touched.sum()),
        }
        changes, all_weights = self._by_layer(places, change), self._by_layer(places, weights)
        alike, all_touched = self._by_layer(places, same), self._by_layer(places, touched)
        return Update(
            step,
            _known(values),
            _known({name: _root(changes[name], all_weights[name]) for name in changes}),
            _known({name: _share(alike[name], all_touched[name]) for name in alike}),
        )

    def _by_layer(self, places: npt.NDArray[np.int64], sums: Array) -> dict[str, float]:
        number, place = self.matrices.pairs
        whole = np.zeros(len(self.matrices.references))
        whole[places] = sums
        names = self.matrices.layers
        totals = np.bincount(number, weights=whole[place], minlength=len(names))
        return dict(zip(names, totals.tolist(), strict=True))


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
        taps: Sequence[Tap],
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
        self._matrices = _Matrices([], {}, [], np.zeros((2, 0), dtype=np.int64))
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
        if look is not None and not look.stepped.isdisjoint(_places(optimizer, look.matrices)):
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
        look.begun[id(optimizer)] = self._copy(optimizer, look.matrices)

    def _end(self, optimizer: Optimizer) -> None:
        look = self._look
        if look is None or id(optimizer) not in look.begun:
            return
        parts = look.begun.pop(id(optimizer))
        look.stepped |= _places(optimizer, look.matrices).keys()
        look.compared += [
            compared
            for part in parts
            if (compared := self._compare(part, look.matrices)) is not None
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
            self._matrices = self._scan()
        self._looks += 1

    def _scan(self) -> _Matrices:
        """Which matrices there are and in which layers."""
        model = self._model()
        found = [] if model is None else [own for own in model.parameters() if own.ndim >= 2]
        if len(found) > _MATRICES:
            spread = np.linspace(0, len(found) - 1, _MATRICES).round().astype(int)
            found = [found[place] for place in spread.tolist()]
        places = {id(parameter): place for place, parameter in enumerate(found)}
        layers: list[str] = []
        pairs: list[tuple[int, int]] = []
        for layer, reference in self._watched.items():
            module = reference()
            own = [] if module is None else list(module.parameters())
            inside = {places[id(parameter)] for parameter in own if id(parameter) in places}
            if inside:
                pairs += [(len(layers), place) for place in sorted(inside)]
                layers.append(layer)
        return _Matrices(
            [weakref.ref(parameter) for parameter in found],
            places,
            layers,
            np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        )

    def _copy(self, optimizer: Optimizer, matrices: _Matrices) -> list[_Copied]:
        alike: dict[tuple[torch.device, torch.dtype], _Copied] = {}
        for place, rate in _places(optimizer, matrices).items():
            parameter = matrices.references[place]()
            local = None if parameter is None else _local(parameter)
            if parameter is None or local is None or not parameter.requires_grad:
                continue
            part = alike.setdefault((local.device, local.dtype), _Copied())
            part.places.append(place)
            part.rates.append(math.nan if rate is None else rate)
            part.before.append(_sample(local))
            part.sizes.append(part.before[-1].numel())
        for part in alike.values():
            part.before = [torch.cat(part.before)]  # one kernel a device and dtype; copies
        return list(alike.values())

    def _compare(self, part: _Copied, matrices: _Matrices) -> _Compared | None:
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        counts: list[tuple[int, int, int]] = []
        rates: list[float] = []
        old = part.before[0]
        copied = zip(part.places, part.rates, part.sizes, torch.split(old, part.sizes), strict=True)
        for place, rate, size, elements in copied:
            parameter = matrices.references[place]()
            local = None if parameter is None else _local(parameter)
            gradient = parameter.grad if parameter is not None else None
            near = None if gradient is None else _local(gradient)
            # One without a gradient is not stepped; and no other memory is like that before.
            if local is None or near is None or near.shape != local.shape:
                continue
            now = _sample(local)
            if (now.dtype, now.device, now.numel()) != (old.dtype, old.device, size):
                continue
            before.append(elements)
            after.append(now)
            gradients.append(_sample(near))
            counts.append((place, size, local.numel()))
            rates.append(rate)
        if not before:
            return None
        old, new = torch.cat(before), torch.cat(after)
        touched = torch.cat(gradients) != 0
        same = touched & (old == new)
        # In 16 bits neither a difference nor a sum would be right.
        wide = torch.float64 if old.dtype is torch.float64 else torch.float32
        old = old.to(wide)
        sizes = [size for _, size, _ in counts]
        numbers = (new.to(wide) - old, old, touched.to(wide), same.to(wide))
        norms = norms_of([piece for number in numbers for piece in torch.split(number, sizes)])
        return _Compared(np.array(counts, dtype=np.int64).T, np.array(rates), norms)


def learning_rate(group: Mapping[str, Any]) -> float | None:
    """That of an optimizer's group, where it is a number on the host.

    Reading one from a device would wait, and some optimizers (Adafactor with relative steps) have
    none.
    """
    rate = group.get("lr")
    if isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.is_cpu):
        return float(rate)
    return None


def _places(optimizer: Optimizer, matrices: _Matrices) -> dict[int, float | None]:
    """Place of each matrix of the optimizer, and its learning rate."""
    return {
        place: rate
        for group in optimizer.param_groups
        for rate in [learning_rate(group)]
        for parameter in group["params"]
        if (place := matrices.place(parameter)) is not None
    }


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """What is on this rank, where its memory can be read as a row of real numbers."""
    shard = getattr(tensor, "to_local", None)  # a DTensor, whose module takes 0.8 s to import
    local: torch.Tensor = tensor if shard is None else shard()
    readable = (
        type(local) in _PLAIN
        and local.layout is torch.strided
        and local.is_floating_point()
        and not local.is_meta
        and local.numel() > 0
        and local.is_contiguous()
    )
    return local if readable else None


def _sample(local: torch.Tensor) -> torch.Tensor:
    """(elements,): a view of some of the elements, always the same ones."""
    stride = _stride(local.shape[-1], local.numel())
    count = (local.numel() + stride - 1) // stride
    return local.as_strided((count,), (stride,), local.storage_offset())


@functools.lru_cache(maxsize=1024)
def _stride(width: int, elements: int) -> int:
    """Distance of the sampled elements of a matrix of this width: they change columns each time."""
    least = math.ceil(elements / _ELEMENTS)
    if least == 1:
        return 1
    golden = max(round(_GOLDEN * width), 1)
    stride = least if least < golden else golden + math.ceil((least - golden) / width) * width
    while math.gcd(stride, width) != 1:
        stride += 1
    return stride


def _root(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole > 0 else _share(part, whole)


def _share(part: float, whole: float) -> float | None:
    """None of nothing; NaN where one of them is."""
    return None if whole == 0 else float(part / whole)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
