"""One training step as it happened: what backward passed through, and what became of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from act_exporter.doctor.trace import Place, Trace

Kind = Literal["scale", "backward", "unscale", "clip", "clip value", "reduce", "step"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the gradients, or to the loss that they come from.

    Attributes:
        kind: what.
        before: Euclidean norm of all gradients before it, the loss scale included.
        after: likewise, after it.
        amount: the loss scale; the norm or value that is clipped to; elements reduced over ranks.
        synchronised: of a backward: whether `DistributedDataParallel` averages over ranks in it.
    """

    kind: Kind
    before: float
    after: float
    amount: float = 0.0
    synchronised: bool = True


@dataclass(frozen=True, slots=True)
class Flow:
    """A gradient as backward reached it.

    Attributes:
        place: of the tensor that it is the gradient of; None of a parameter.
        layer: the module's own name.
        gradient: its Euclidean norm, over its finite elements, without the loss scale.
        value: the tensor's own norm.
        nonfinite: elements that are NaN or infinite.
    """

    place: Place | None
    layer: str
    gradient: float
    value: float
    nonfinite: int

    @property
    def elasticity(self) -> float:
        """How much the loss changes as the tensor changes by a share of itself.

        Depth and units leave it alone: a layer that halves its output doubles what the gradient of
        that output is, and the product stays.
        """
        return self.gradient * self.value


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient, without the loss scale.

    Attributes:
        rms: of its finite elements.
        value: the parameter's own rms.
        elements: how many it has.
        nonfinite: how many of them are NaN or infinite.
    """

    rms: float
    value: float
    elements: int
    nonfinite: int

    @property
    def elasticity(self) -> float:
        """How much the loss changes as the parameter changes by a share of itself."""
        return self.rms * self.value * self.elements


@dataclass(slots=True)
class Step:
    """One training step.

    Attributes:
        events: in order.
        places: tensors of the forward that a gradient may come to, in order.
        flow: gradients in the order in which backward reached them.
        gradients: by the parameter's name, as the last backward left them.
        used: likewise, as the optimizer's step got them: clipped, say. Empty where none stepped.
        loss: that the last backward began with, without the loss scale; None where it was several.
        trace: the forwards in it.
    """

    events: list[Event] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    flow: list[Flow] = field(default_factory=list)
    gradients: dict[str, Gradient] = field(default_factory=dict)
    used: dict[str, Gradient] = field(default_factory=dict)
    loss: float | None = None
    trace: Trace = field(default_factory=Trace)

    @property
    def scale(self) -> float:
        """Of the loss; 1 where there is none."""
        return next((event.amount for event in self.events if event.kind == "scale"), 1.0)
