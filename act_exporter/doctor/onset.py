"""Where in a forward the first NaN or infinity was made.

A tap's number says where one was seen. It was made in the module whose output it is when the input
was finite; in the code of the module around it when it is there between two parts, in the sum of a
residual stream for one (huggingface/transformers PR 19229: LongT5's feed-forward output and
residual are finite in fp16, their sum is not, and guards around the attention did not help).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from act_exporter.doctor.trace import Seen, Trace, floats


@dataclass(frozen=True, slots=True)
class Onset:
    """Where a forward first was not finite.

    Attributes:
        layer: the innermost module in whose code that was; None for the model's own.
        parts: whether it happened between or after parts of this module, or in the module itself.
        seen: the tensor that was the first one.
        before: the last tensor before it, finite; None if there is none.
        largest: absmax of what `before` and the module's input are, at most.
    """

    layer: str | None
    parts: bool
    seen: Seen
    before: Seen | None
    largest: float

    @property
    def where(self) -> str:
        """In words."""
        own = self.layer or "the model"
        if not self.parts:
            return f"in {own}"
        after = f" after {self.before.layer}" if self.before else ""
        return f"in {own}'s own code{after}, by a sum or product"


def first_nonfinite(trace: Trace, plain: Trace | None = None) -> Onset | None:
    """The first one of `trace`; None where there is none.

    Args:
        trace: of a forward.
        plain: of the same forward in another precision. What is infinite there too is so on purpose
            (a mask) or has another cause.
    """
    known = _known(plain)
    given = {(s.layer, s.place.call): s.nonfinite for s in trace.outputs()}
    for index, seen in enumerate(trace.seen):
        if seen.nonfinite <= known.get((seen.layer, seen.place.side, seen.place.call), 0):
            continue
        if given.get((seen.layer, seen.place.call)) == 0:
            continue  # what it took was infinite, what it gave is not: a softmax' mask
        layer, parts = _made_in(trace.seen, index)
        operands = [trace.seen[index - 1]] if index else []
        operands += [s for s in trace.seen[:index] if parts and _begins(s, layer)][-1:]
        return Onset(
            layer=layer,
            parts=parts,
            seen=seen,
            before=operands[0] if operands else None,
            largest=max((operand.absmax for operand in operands), default=0.0),
        )
    return None


def is_finite(trace: Trace) -> bool:
    """Whether the forward ended, and all that it returned is numbers; -inf is a masked logit."""
    return trace.error is None and not any(
        bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in floats(trace.output)
    )


def _known(plain: Trace | None) -> dict[tuple[str, str, int], int]:
    seen = plain.seen if plain is not None else []
    return {(s.layer, s.place.side, s.place.call): s.nonfinite for s in seen}


def _begins(seen: Seen, layer: str | None) -> bool:
    return seen.layer == layer and seen.place.side == "input"


def _made_in(seen: Sequence[Seen], index: int) -> tuple[str | None, bool]:
    """The innermost module that was running, and whether between or after parts of it."""
    own = seen[index]
    if own.place.side == "input":
        return next(_running(seen[:index]), None), True
    begun = [n for n in range(index) if _same_call(seen[n], own)]
    # Without a floating-point input (an embedding has none) the module before says nothing of it.
    parts = bool(begun) and begun[-1] < index - 1
    return own.layer, parts


def _same_call(one: Seen, other: Seen) -> bool:
    return one.place.side == "input" and (one.layer, one.place.call) == (
        other.layer,
        other.place.call,
    )


def _running(seen: Sequence[Seen]) -> Iterator[str]:
    """Modules that have begun and not ended, the innermost first."""
    ended = {(s.layer, s.place.call) for s in seen if s.place.side == "output"}
    for one in reversed(seen):
        if one.place.side == "input" and (one.layer, one.place.call) not in ended:
            yield one.layer
