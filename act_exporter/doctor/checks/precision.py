"""The batch in float32, bfloat16 and float16: where a number does not fit, and how near others are.

Sources: the seed's checklist, item 7; huggingface/transformers issue 5651 (a T5's feed-forward
output of 66,246 in fp16), PR 19229 (a residual sum of two finite numbers), stas00/ml-engineering's
debug/pytorch.md (the way up to it, module by module); Micikevicius et al. 2018 (arXiv:1710.03740);
state-spaces/mamba issue 6 (weights kept in bf16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.formats import FP16_MAX, autocast, uses_fp16, whole
from act_exporter.doctor.onset import Onset, first_nonfinite, is_finite
from act_exporter.doctor.spacing import lost_updates
from act_exporter.doctor.subject import Batch, Subject
from act_exporter.doctor.trace import Trace, floats

FAULTS = {
    "nonfinite-activation": "The forward makes NaN or infinity, in float32 too.",
    "fp16-overflow": "A number does not fit into float16, and the output is NaN or infinite.",
    "bf16-overflow": "The output is finite in float32, and not in bfloat16.",
    "low-headroom": "A tensor comes within a factor of 2 of float16's largest number.",
    "keep-in-fp32": "Layers which, kept in float32, make the forward finite in float16.",
    "bf16-lost-updates": "Weights in bfloat16 are too coarse for the optimizer's steps.",
}

# What an alert on headroom asks for too: one more doubling, a hot batch or a dropout's 1 / (1 - p)
# of a half, and it overflows.
_HEADROOM = 0.5

# Of more layers than this "keep these in float32" is no advice; bfloat16 is.
_KEPT = 8


def check(subject: Subject) -> Iterator[Finding]:
    yield from lost_updates(subject)
    if not _all_finite(subject.batch):
        return  # the data's fault, not a number format's
    own = _weights_dtype(subject.model)
    reference = subject.plain
    if own != torch.float32:
        reference = whole(subject, torch.float32)
    if subject.plain.error is not None and not subject.plain.seen:
        return
    if (onset := _broken(reference)) is not None:
        yield _nonfinite(onset)
        return
    uses = uses_fp16(subject)
    found = list(_fp16(subject, reference, own, uses))
    yield from found or _headroom(reference, uses)
    if own == torch.float16:
        return
    bf16 = subject.plain if own == torch.bfloat16 else autocast(subject, torch.bfloat16)
    if (onset := _broken(bf16, reference)) is not None:
        yield _overflow(onset, "bf16-overflow", "bfloat16", own == torch.bfloat16)


def _fp16(subject: Subject, reference: Trace, own: torch.dtype, uses: bool) -> Iterator[Finding]:
    if own == torch.float16:
        if (onset := _broken(subject.plain, reference)) is not None:
            yield _overflow(onset, "fp16-overflow", "float16 weights", uses)
        return
    onset = _broken(autocast(subject, torch.float16), reference)
    if onset is not None:
        yield _overflow(onset, "fp16-overflow", "float16 (autocast)", uses)
        yield from _keep(subject, reference, onset)
        return
    # Autocast may keep a residual stream in float32; a model that is all in float16 does not. What
    # is not that loud in float32 need not be tried, processors are slow at float16.
    if max((seen.absmax for seen in reference.seen), default=0.0) > _HEADROOM * FP16_MAX:
        onset = _broken(whole(subject, torch.float16), reference)
        if onset is not None:
            form = "float16 (the whole model, not autocast)"
            yield _overflow(onset, "fp16-overflow", form, uses=False)


def _broken(trace: Trace, reference: Trace | None = None) -> Onset | None:
    """Where the forward lost its numbers, if what comes out of it shows that.

    An infinity that a softmax takes as a mask, or a sigmoid saturates, is none.
    """
    if trace.error is not None or is_finite(trace):
        return None  # an operation that this dtype lacks says nothing about numbers
    if reference is not None and reference.error is None and not is_finite(reference):
        return None
    return first_nonfinite(trace, reference)


def _nonfinite(onset: Onset) -> Finding:
    return Finding(
        fault="nonfinite-activation",
        severity="critical",
        layer=onset.layer,
        what=f"The first NaN or infinity of the forward is made {onset.where}; {_operands(onset)}.",
        change="Look for what is wrong with this layer's weights and input: a division by zero, an"
        " exponential, a logarithm or root of a negative number.",
        why="In float32 too the result is not a number, so no precision helps.",
        evidence=_evidence(onset),
        symptom=True,
    )


def _overflow(onset: Onset, fault: str, form: str, uses: bool) -> Finding:
    return Finding(
        fault=fault,
        severity="critical" if uses else "warning",
        layer=onset.layer,
        what=f"In {form} the first number that does not fit is made {onset.where};"
        f" {_operands(onset)}. In float32 all is finite.",
        change="Compute this (a residual stream's sum, an attention's products) in float32, or"
        " train in bfloat16."
        if onset.parts
        else "Keep this layer in float32 (autocast off around it), or train in bfloat16.",
        why=f"float16 ends at {FP16_MAX:,.0f}; bfloat16 has float32's range. A lower learning rate"
        " does not make an activation fit.",
        evidence=_evidence(onset),
        # How far over, where it is known: the operands are finite.
        strength=max(1.0, onset.largest / FP16_MAX),
    )


def _operands(onset: Onset) -> str:
    if onset.before is None:
        return "it is the first tensor"
    return f"what goes into it is finite, at most {onset.largest:.4g}"


def _evidence(onset: Onset) -> dict[str, float | int | str]:
    return {
        "first_tensor": f"{onset.seen.layer} {onset.seen.place.side}",
        "nonfinite_elements": onset.seen.nonfinite,
        "largest_finite_before": onset.largest,
        "made_between_parts": str(onset.parts).lower(),
    }


def _headroom(reference: Trace, uses: bool) -> Iterator[Finding]:
    # What is beyond it was tried in float16 and did no harm: a mask, a stream kept in float32.
    near = [seen for seen in reference.seen if _HEADROOM * FP16_MAX < seen.absmax <= FP16_MAX]
    if not near:
        return
    first = next((seen for seen in near if seen.place.side == "output"), near[0])
    share = max(seen.absmax for seen in near) / FP16_MAX
    yield Finding(
        fault="low-headroom",
        severity="warning" if uses else "info",
        layer=first.layer,
        what=f"The {first.place.side} of {first.layer} reaches {first.absmax:,.0f},"
        f" {first.absmax / FP16_MAX:.2f} of what float16 holds.",
        change="Keep this layer in float32, or train in bfloat16, before it overflows.",
        why="Another batch, or a dropout that scales what it keeps, is enough.",
        evidence={
            "absmax": first.absmax,
            "share_of_float16": first.absmax / FP16_MAX,
            "largest_share": share,
            "other_layers": len({seen.layer for seen in near}) - 1,
        },
        strength=share / _HEADROOM,
    )


def _keep(subject: Subject, reference: Trace, onset: Onset | None) -> Iterator[Finding]:
    """Layer after layer in float32 where numbers were lost, until none are."""
    kept: list[str] = []
    while onset is not None and onset.layer is not None and onset.layer not in kept:
        kept.append(onset.layer)
        if len(kept) > _KEPT:
            return
        onset = _broken(autocast(subject, torch.float16, kept), reference)
    if onset is None:
        yield Finding(
            fault="keep-in-fp32",
            severity="info",
            layer=kept[0],
            what=f"With {_listed(kept)} in float32 the batch is finite in float16 autocast.",
            change="Run these under torch.autocast(device_type, enabled=False) with their inputs"
            " as float32.",
            why="Tried on this batch; other batches may need more.",
            evidence={"layers": ", ".join(kept)},
        )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _all_finite(batch: Batch) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in floats(batch))


def _weights_dtype(model: nn.Module) -> torch.dtype:
    """That of most weights; float32 where that is none of the three."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    half = {dtype: counts.get(dtype, 0) for dtype in (torch.float16, torch.bfloat16)}
    most = max(half, key=lambda dtype: half[dtype])
    return most if 2 * half[most] > sum(counts.values()) else torch.float32
