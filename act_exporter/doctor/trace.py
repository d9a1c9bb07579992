"""What happens in one forward: each tensor that goes into a module or comes out, in order."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from act_exporter.layers import named_modules
from act_exporter.taps import Side

_log = logging.getLogger(__name__)

Look = Callable[["Place", torch.Tensor], None]
"""Called with each tensor while it is there; sees what statistics do not hold, changes nothing."""

# The median of |x| is taken over as many elements, strided: of more it costs a sort of everything,
# and says no more.
_MEDIAN_ELEMENTS = 65_536

# Statistics take some 30 bytes an element: of as many at a time, 30 MB beside an activation of any
# size, and large enough that the number of calls costs nothing.
_PART_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was seen.

    Attributes:
        layer: the module's own name in the model, without wrappers' parts.
        side: whether it is the module's input or its output.
        reference: to the module, which a place must not keep alive in a report.
        call: how often the module had been called before in this forward.
    """

    layer: str
    side: Side
    reference: weakref.ref[nn.Module]
    call: int

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            ReferenceError: it is no more.
        """
        module = self.reference()
        if module is None:
            raise ReferenceError(f"{self.layer} is no more")
        return module


@dataclass(frozen=True, slots=True)
class Seen:
    """One tensor of a forward. Statistics are over its finite elements, in float32; 0 if none.

    Attributes:
        place: where.
        shape: of the tensor.
        dtype: of the tensor.
        absmax, mean_abs, median_abs, rms: of |x|; the median of up to 65,536 elements.
        mean, std: of x.
        nonfinite: elements that are NaN or infinite.
    """

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    absmax: float
    mean_abs: float
    median_abs: float
    rms: float
    mean: float
    std: float
    nonfinite: int

    @property
    def layer(self) -> str:
        return self.place.layer


@dataclass(slots=True)
class Trace:
    """A forward.

    Attributes:
        seen: floating-point tensors, a module's input when it begins, its output when it ends.
        output: what the model returned; None where it raised.
        error: what it raised.
    """

    seen: list[Seen] = field(default_factory=list)
    output: Any = None
    error: Exception | None = None

    def outputs(self) -> Iterator[Seen]:
        """Outputs, in the order in which the modules ended."""
        return (seen for seen in self.seen if seen.place.side == "output")


def traced(model: nn.Module, forward: Callable[[], Any], look: Look | None = None) -> Trace:
    """Run `forward`, and note what goes into and comes out of the modules of `model`.

    What it raises stands in the trace, which then ends there.

    Raises:
        Exception: what `look` raises, when the forward is over.
    """
    trace = Trace()
    calls: dict[str, int] = {}
    failures: list[Exception] = []

    def note(place: Place, found: Any) -> None:
        tensor = first_float(found)
        if tensor is None:
            return
        # What breaks here is the doctor's own, too little memory too, and no fault of the forward.
        try:
            trace.seen.append(_statistics(place, tensor.detach()))
        except Exception:
            _log.debug("a tensor of %s is left out", place.layer, exc_info=True)
        try:
            if look is not None and not failures:
                look(place, tensor)
        except Exception as error:
            failures.append(error)

    def hooks(name: str, module: nn.Module) -> Iterator[Any]:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            note(Place(name, "input", weakref.ref(module), calls[name]), (args, kwargs))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            note(Place(name, "output", weakref.ref(module), calls[name]), output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    with contextlib.ExitStack() as stack:
        for name, module in named_modules(model):
            for handle in hooks(name, module):
                stack.callback(handle.remove)
        # In eval mode torch's own encoder would run its layers in one piece, without their modules.
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled; its import takes seconds
            # A compiled module does not show what is fused in it, and compiles anew for our hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            trace.output = forward()
        except Exception as error:
            trace.error = error
    if failures:
        raise failures[0]
    return trace


def first_float(found: Any) -> torch.Tensor | None:
    """The first floating-point tensor in arguments or in a module's output."""
    return next(floats(found), None)


def floats(found: Any) -> Iterator[torch.Tensor]:
    """All floating-point tensors that have elements, in arguments or in a module's output.

    Sparse and nested ones are left out: few operations know them.
    """
    if isinstance(found, torch.Tensor):
        if found.layout == torch.strided and found.is_floating_point() and found.numel():
            yield found
    elif isinstance(found, Mapping):
        yield from floats(list(found.values()))
    elif isinstance(found, tuple | list):
        for inside in found:
            yield from floats(inside)


def _statistics(place: Place, tensor: torch.Tensor) -> Seen:
    values = tensor.flatten()
    stride = -(-values.numel() // _MEDIAN_ELEMENTS)
    sample = _finite(values[::stride]).abs()
    parts = torch.stack([_sums(_finite(part)) for part in torch.split(values, _PART_ELEMENTS)])
    counts, largest, sizes, squares, means, deviations = parts.cpu().unbind(1)
    finite = int(counts.sum())
    count = max(finite, 1)
    mean = (counts * means).sum() / count
    # Of the parts' means too; of sums of squares alone a constant would seem to vary.
    variance = (deviations + counts * (means - mean).square()).sum() / count
    return Seen(
        place=place,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        absmax=float(largest.max()),
        mean_abs=float(sizes.sum() / count),
        median_abs=float(sample.median()) if sample.numel() else 0.0,
        rms=float((squares.sum() / count).sqrt()),
        mean=float(mean),
        std=float(variance.sqrt()),
        nonfinite=values.numel() - finite,
    )


def _finite(values: torch.Tensor) -> torch.Tensor:
    values = values.float()
    finite = values.isfinite()
    return values if bool(finite.all()) else values[finite]


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Count, largest size, sum of sizes and of squares, mean, sum of squared deviations."""
    if not values.numel():
        return torch.zeros(6, dtype=torch.float64, device=values.device)
    double = values.double()  # squares of float32's largest numbers
    size, mean = double.abs(), double.mean()
    found = [size.max(), size.sum(), double.square().sum(), mean, (double - mean).square().sum()]
    return torch.stack([torch.full_like(mean, values.numel()), *found])
