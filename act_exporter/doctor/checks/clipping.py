"""When gradients are clipped: after unscaling, after ranks were averaged, before the step.

Sources: "Working with unscaled gradients" in PyTorch's examples of automatic mixed precision;
Pascanu, Mikolov and Bengio (2013) on clipping by norm; the article's section 5.1 ("make sure that
gradients are clipped after synchronisation") and its checklist, item 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from act_exporter.doctor.finding import CERTAIN, Finding, NeedsMoreError
from act_exporter.doctor.step import Event, Step
from act_exporter.doctor.subject import Subject

FAULTS = {
    "clip-before-unscale": "Gradients are clipped while the loss scale is still in them.",
    "clip-before-sync": "Gradients are clipped before they are averaged over ranks.",
    "clip-after-step": "Gradients are clipped after the optimizer has used them.",
    "step-before-unscale": "The optimizer steps with the loss scale still in the gradients.",
    "clip-missing": "Gradients are not clipped, or to a norm that they never reach.",
}

# A division by the loss scale or by the number of ranks is by 2 and more; what else is done to
# gradients between clipping and the step (weight decay by hand, noise) changes their norm less.
_RESCALED = 2.0

# Gradients in bfloat16 are rounded by up to 0.4 %.
_ALIKE = 1e-2

# A limit of 1,000 times the norm is there to measure the norm (the article's own example has 1e10).
_NEVER = 1e3


def check(subject: Subject) -> Iterator[Finding]:
    """Run one training step, and see in which order things are done.

    Raises:
        NeedsMoreError: there is no training step, or no optimizer with which to undo it.
    """
    if subject.train_step is None:
        raise NeedsMoreError("a train_step")
    if subject.optimizer is None:
        raise NeedsMoreError("the optimizer that train_step steps")
    step = subject.step
    events = step.events
    clips = [place for place, event in enumerate(events) if event.kind in ("clip", "clip value")]
    clips = clips or _by_hand(step)
    if not clips:
        yield from _scaled_step(step)
        yield _missing(step, "Gradients are not clipped")
        return
    place = clips[-1]
    clip, earlier, later = events[place], events[:place], events[place + 1 :]
    evidence: dict[str, float | int | str] = {"max_norm": clip.amount, "norm": clip.before}
    steps = [event for event in later if event.kind == "step"]
    if not steps and any(event.kind == "step" for event in earlier):
        yield _after_step(clip, evidence)
    elif step.scale > 1 and _is_scaled(earlier):
        yield _before_unscale(clip, step.scale, evidence)
    elif steps and (scale := _rescaled(step, clip)) > _RESCALED:
        yield _before_unscale(clip, scale, evidence)
    elif (how := _unsynchronised(step, earlier, later)) is not None:
        yield _before_sync(clip, how, evidence)
    elif clip.kind == "clip" and clip.amount >= _NEVER * clip.before > 0:
        yield _missing(step, f"Gradients are clipped to a norm of {clip.amount:g}, which is never")
    yield from _scaled_step(step)


def _by_hand(step: Step) -> list[int]:
    """Where gradients have become smaller with nothing known being called: a clip in other words.

    Made an event of its own.
    """
    for place, (event, following) in enumerate(zip(step.events, step.events[1:], strict=False)):
        before, after = event.after, following.before
        if following.kind not in ("unscale", "step") or not 0 < _RESCALED * after < before:
            continue
        if math.isclose(before / after, step.scale, rel_tol=_ALIKE):
            # Unscaled by hand; what follows is in true units.
            step.events.insert(place + 1, Event("unscale", before, after))
            return []
        if event.kind in ("backward", "unscale", "reduce"):
            step.events.insert(place + 1, Event("clip", before, after, after))
            return [place + 1]
    return []


def _rescaled(step: Step, clip: Event) -> float:
    """How many times smaller all gradients have become alike between the clip and the step.

    Those that are gone by then are left out: a last layer's may be cancelled for the first epochs.
    """
    before = step.gradients
    shares = [
        own.rms / before[name].rms
        for name, own in step.used.items()
        if own.rms > 0 and name in before and before[name].rms > 0
    ]
    if not shares or not math.isclose(min(shares), max(shares), rel_tol=_ALIKE):
        return 1.0
    whole = math.hypot(*(own.rms * own.elements**0.5 for own in before.values()))
    return clip.after / whole / shares[0]


def _is_scaled(events: list[Event]) -> bool:
    """Whether the loss scale is in the gradients after these."""
    kinds = [event.kind for event in events]
    return "scale" in kinds and "unscale" not in kinds[kinds.index("scale") :]


def _unsynchronised(step: Step, earlier: list[Event], later: list[Event]) -> str | None:
    """How gradients are averaged over ranks after the clip; None where they are not."""
    elements = sum(gradient.elements for gradient in step.gradients.values())
    until = next((place for place, own in enumerate(later) if own.kind == "step"), len(later))
    between = later[:until]
    # Norms, counters and losses are reduced too, but those are few numbers.
    reduced = sum(event.amount for event in between if event.kind == "reduce")
    if elements and reduced >= elements / 2:
        return f"{reduced:.0f} elements are reduced over ranks after the clip"
    backward = [event for event in earlier if event.kind == "backward"]
    if backward and not backward[-1].synchronised and any(e.kind == "backward" for e in between):
        return "the last backward before the clip was inside no_sync(), and others follow"
    return None


def _before_unscale(clip: Event, scale: float, evidence: dict[str, float | int | str]) -> Finding:
    return Finding(
        fault="clip-before-unscale",
        severity="critical",
        layer=None,
        what=f"Gradients are clipped to {clip.amount:g} while they are {scale:g} times too large:"
        f" what the optimizer gets has a norm of {clip.after / scale:.3g} at most.",
        change="Call scaler.unscale_(optimizer) before clipping, as"
        " act_exporter.doctor.remedies.clip_gradients does.",
        why="Clipped with the loss scale in them, gradients are as many times too small, and differ"
        " whenever the scale does.",
        evidence={**evidence, "scale": scale},
        strength=CERTAIN,
    )


def _before_sync(clip: Event, how: str, evidence: dict[str, float | int | str]) -> Finding:
    return Finding(
        fault="clip-before-sync",
        severity="critical",
        layer=None,
        what=f"Gradients are clipped to {clip.amount:g} before ranks are averaged: {how}.",
        change="Clip once, after the gradients of all ranks are averaged and before the step.",
        why="Each rank clips by a norm of its own, so the average is no gradient of the batch, and"
        " the norm of the sum is not bounded by the limit.",
        evidence=evidence,
        strength=CERTAIN,
    )


def _after_step(clip: Event, evidence: dict[str, float | int | str]) -> Finding:
    return Finding(
        fault="clip-after-step",
        severity="warning",
        layer=None,
        what=f"Gradients are clipped to {clip.amount:g} after optimizer.step() has used them.",
        change="Clip between backward and optimizer.step().",
        why="Clipped gradients that nobody reads bound nothing.",
        evidence=evidence,
        strength=CERTAIN,
    )


def _scaled_step(step: Step) -> Iterator[Finding]:
    for place, event in enumerate(step.events):
        if event.kind == "step" and step.scale > 1 and _is_scaled(step.events[:place]):
            yield Finding(
                fault="step-before-unscale",
                severity="critical",
                layer=None,
                what=f"optimizer.step() gets gradients that are {step.scale:g} times too large.",
                change="Call scaler.step(optimizer) in place of optimizer.step().",
                why="The loss scale multiplies each update, or with Adam what epsilon and clipping"
                " are compared with; and steps with infinite gradients are not skipped.",
                evidence={"scale": step.scale, "norm": event.before},
                strength=CERTAIN,
            )
            return


def _missing(step: Step, what: str) -> Finding:
    norm = next((event.before for event in step.events if event.kind == "step"), 0.0)
    return Finding(
        fault="clip-missing",
        severity="info",
        layer=None,
        what=f"{what}; their norm is {norm:.3g} in this step.",
        change="Clip by norm between backward and the step, at a few times the usual norm (1.0 in"
        " most large runs); act_exporter.doctor.remedies.clip_gradients also drops what is not"
        " finite.",
        why="It is the last guard between one bad batch and the weights.",
        evidence={"norm": norm},
    )
