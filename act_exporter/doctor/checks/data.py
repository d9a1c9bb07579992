"""The batch itself: ids beyond their tables, values that are no numbers, and what says nothing.

Source: the article's section 5.1 ("outliers in the training data, such as extremely long sequences
and abnormal token ids") and public cases: a loader that repeats its data after a resume makes the
loss fall below what it is (NVIDIA-NeMo/Megatron-Bridge#4565), and one that starts anew makes the
loss step up later (Lightning-AI/pytorch-lightning#18780).

An id beyond its embedding ends a CUDA context, and with it everything else that this process has
there, so it is looked for before the lookup; what is examined after it would be of no use.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator

import torch

from act_exporter.doctor.finding import (
    CERTAIN,
    Finding,
    NeedsMoreError,
    Severity,
    UnusableBatchError,
)
from act_exporter.doctor.lookups import Lookups, beyond, empty, leaves, look_up, positions_of
from act_exporter.doctor.subject import Batch, Subject

FAULTS = {
    "token-out-of-range": "An id or a label is outside the table that it is looked up in.",
    "nonfinite-input": "The batch holds NaN or infinite values.",
    "empty-batch": "The batch has nothing to learn from: no elements, no label, or padding alone.",
    "constant-batch": "All that is in the batch is the same.",
    "repeated-batches": "The data comes more than once within a few batches.",
    "odd-length": "Sequences are too short, or far longer than others or than they may be.",
}

# Shorter rows may be alike by chance: eight tokens in a vocabulary of two, once in 256.
_TOKENS = 8

# Of k rows drawn with replacement from n about k/2n come again: a third means that two thirds of
# the data fit into these few batches. One whole batch that comes again is no chance at all.
_REPEATED = 1 / 3

# What softmax makes nothing of; -1e4 was chosen for float16, others take -1e9 and -inf.
_HIDDEN = -1e4

# Padding to a sequence that is 8 times the usual costs 7/8 of the memory and of the time, and a
# model meets positions there that it hardly ever trains.
_LONG = 8.0


def check(subject: Subject) -> Iterator[Finding]:
    """Look at the batch, at what becomes of its ids, and at the further batches.

    Raises:
        UnusableBatchError: no forward can be run with the batch.
    """
    own = list(leaves(subject.batch))
    yield from _nonfinite(subject)
    lookups = look_up(subject)
    if lookups.beyond is not None:
        yield lookups.beyond
        short = lookups.beyond.fault == "odd-length"
        raise UnusableBatchError("shorter sequences" if short else "ids within their tables")
    contents = [path for path, tensor in own if lookups.is_content(path, tensor)]
    # A mask has no name in a tuple. Zeros alone are no mask: it is of something.
    masks = {path for path, tensor in own if path in contents and _is_mask(tensor)}
    contents = [path for path in contents if path not in masks] or contents
    read = [tensor for path, tensor in own if path in contents or path in lookups.rows]
    # A single tensor may be empty: the boxes of an image that shows nothing. A forward tells.
    if own and not any(tensor.numel() for tensor in read or [tensor for _, tensor in own]):
        yield empty("no elements", {})
        raise UnusableBatchError("a batch that has elements")
    lengths = list(_lengths(subject, contents))
    yield from lengths
    if not any(finding.severity == "critical" for finding in lengths):
        yield from lookups.findings
        yield from _padding(own)
    yield from _beyond_in_others(subject, lookups)
    yield from _constant(own, contents)
    yield from _repeated(subject.more_batches, contents)


def _nonfinite(subject: Subject) -> Iterator[Finding]:
    for which, batch in enumerate([subject.batch, *subject.more_batches]):
        for path, tensor in leaves(batch):
            if not tensor.is_floating_point():
                continue
            bad = ~tensor.isfinite()
            count = int(bad.sum())
            if not count or _is_mask(tensor):
                continue
            where = f'"{path}"' + (f" of batch {which} of `batches`" if which else "")
            yield Finding(
                fault="nonfinite-input",
                severity="critical",
                layer=None,
                what=f"{count} of {tensor.numel()} values in {where} are NaN or infinite.",
                change="Find the sample that they come from, and drop it where data is read.",
                why="One NaN in the input makes the loss and every gradient NaN.",
                evidence={"input": path, "nonfinite": count, "values": tensor.numel()},
                strength=CERTAIN,
            )
            return


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether it may be one that is added to logits: 0 where something is seen, far below not."""
    return tensor.is_floating_point() and bool(((tensor == 0) | (tensor <= _HIDDEN)).all())


def _padding(own: list[tuple[str, torch.Tensor]]) -> Iterator[Finding]:
    for path, mask in own:
        if "attention_mask" not in path or mask.ndim != 2 or mask.is_floating_point():
            continue
        if not bool((mask != 0).any()):
            yield empty("padding alone", {"rows": len(mask)})


def _beyond_in_others(subject: Subject, lookups: Lookups) -> Iterator[Finding]:
    for which, batch in enumerate(subject.more_batches):
        for path, ids in leaves(batch):
            rows = lookups.rows.get(path)
            if rows is None or ids.is_floating_point():
                continue
            bad = (ids < 0) | (ids >= rows)
            if bool(bad.any()):
                name = f'{path}" of batch {which} of "batches'
                yield beyond(ids, bad, rows, lookups.layers[path] or None, name)
                return


def _constant(own: list[tuple[str, torch.Tensor]], contents: list[str]) -> Iterator[Finding]:
    for path, tensor in own:
        if path not in contents or tensor.numel() < _TOKENS:
            continue
        rows = tensor.flatten(1)
        if bool((tensor == tensor.flatten()[0]).all()):
            what = f'All {tensor.numel()} values of "{path}" are {float(tensor.flatten()[0]):g}.'
        elif len(rows) > 1 and rows.shape[1] >= _TOKENS and bool((rows == rows[0]).all()):
            what = f'All {len(rows)} rows of "{path}" are the same.'
        else:
            continue
        yield Finding(
            fault="constant-batch",
            severity="warning",
            layer=None,
            what=what,
            change="Look at the loader: a sampler that returns one index, or padding alone.",
            why="Gradients of a batch that says one thing are far larger in one direction than"
            " those of real data.",
            evidence={"input": path, "values": tensor.numel(), "rows": len(rows)},
            strength=CERTAIN,
        )
        return


def _repeated(batches: list[Batch], contents: list[str]) -> Iterator[Finding]:
    whole: list[bytes] = []
    rows: list[bytes] = []
    for batch in batches:
        for path, tensor in leaves(batch):
            if path in contents[:1] and tensor.numel() >= _TOKENS:
                own = tensor.detach().cpu().contiguous().flatten(1)
                whole.append(_digest(own))
                if own.shape[1] >= _TOKENS:
                    rows += map(_digest, own)
    again, again_rows = len(whole) - len(set(whole)), len(rows) - len(set(rows))
    if not again and again_rows < _REPEATED * max(len(rows), 1):
        return
    share = max(again / len(whole), again_rows / max(len(rows), 1))
    yield Finding(
        fault="repeated-batches",
        severity="warning",
        layer=None,
        what=f"Of {len(whole)} batches {again} came before, and {again_rows} of {len(rows)} rows.",
        change="Look at the sampler: its seed for each epoch, where it goes on after a resume, and"
        " whether ranks and workers read the same part.",
        why="What is seen again is learnt by heart: the loss falls for no good, and steps up as"
        " soon as new data comes.",
        evidence={"batches": len(whole), "repeated": again, "repeated_rows": again_rows},
        strength=max(share / _REPEATED, 1.0),
    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Of its bytes: the batches themselves would fill the memory."""
    own = tensor.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(own, digest_size=16).digest()


def _lengths(subject: Subject, contents: list[str]) -> Iterator[Finding]:
    def lengths(batch: Batch) -> list[int]:
        found = dict(leaves(batch))
        mask = found.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not mask.is_floating_point():
            return [int(count) for count in (mask != 0).sum(dim=-1)]
        tokens = (found[path] for path in contents if path in found)
        return [int(t.shape[1]) for t in tokens if not t.is_floating_point() and t.ndim == 2]

    own = lengths(subject.batch)
    if not any(own):
        return  # no tokens, or padding alone
    limit = positions_of(subject.model)
    others = [length for batch in subject.more_batches for length in lengths(batch)]
    longest, usual = max(own + others), statistics.median(others or own)
    evidence: dict[str, float | int | str] = {"longest": longest, "median": usual}
    severity: Severity = "warning"
    if max(own) <= 1 and _follows_nothing(subject):
        severity = "critical"
        what, strength = "Each sequence of the batch has one token: nothing follows it.", CERTAIN
    elif limit is not None and longest > limit:
        evidence["max_position_embeddings"] = limit
        what = f"A sequence has {longest} tokens; the model was made for {limit}."
        strength = longest / limit
    elif longest >= _LONG * usual:
        what = f"A sequence has {longest} tokens where the usual one has {usual:g}."
        strength = longest / max(usual, 1) / _LONG
    else:
        return
    yield Finding(
        fault="odd-length",
        severity=severity,
        layer=None,
        what=what,
        change="Cut, pack or sort sequences by length where data is read.",
        why="Positions that are hardly ever trained, and sums over far more tokens than usual, make"
        " single steps unlike all others.",
        evidence=evidence,
        strength=max(strength, 1.0),
    )


def _follows_nothing(subject: Subject) -> bool:
    """Whether labels are for the tokens themselves, and the mean over none of them is NaN.

    A column of ids is as short, and has something else to learn.
    """
    shapes = {path: tensor.shape for path, tensor in leaves(subject.batch)}
    labels = [shape for path, shape in shapes.items() if "label" in path.lower()]
    others = [shape for path, shape in shapes.items() if "label" not in path.lower()]
    if not any(shape in others for shape in labels):
        return False
    try:
        return bool(subject.loss(subject.plain.output).isnan())
    except NeedsMoreError:
        return False
