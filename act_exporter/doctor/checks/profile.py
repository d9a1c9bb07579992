"""The activations' profile over depth: growth, spikes and plateaus, inside the blocks too.

Sources: the second seed, 2.1 and item 1 of its checklist: spikes before an attention, and a plateau
after it. That the residual stream of a healthy pre-norm model grows with depth, by sqrt(2) a
sublayer at first and ever slower, is the sum of random parts; "massive activations" are a few
elements that healthy large models have (Sun et al. 2024, arXiv:2402.17762).

What it finds are symptoms. It looks at mean |x|, which a few massive elements hardly move.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place, Seen
from act_exporter.layers import find_blocks, is_projection

FAULTS = {
    "growth-with-depth": "Activations grow by a factor from block to block.",
    "spike": "Activations of one block are far louder than the same place in other blocks.",
    "plateau": "Activations jump at one block and stay high in all that follow.",
    "massive-activation": "A few elements are a thousand times louder than the rest.",
}

# From block to block, in the median. A sum of random parts grows by 1.41 and less, one of equal
# parts by 2 at first and 1.5 after; from end to end, less than that in three blocks is no trend.
_FACTOR, _OVERALL = 2.0, 8.0

# From end to end: the stream of a hundred healthy blocks grows tenfold, and from here on one more
# such model on top of it is beyond fp16.
_RUNAWAY = 10_000.0

# Mean |x| at the end: the sum of a hundred normed branches. Streams that begin at an embedding of
# 0.02 and grow to 1 are healthy, however fast (OLMo 2's).
_LOUD = 10.0

# Times the median of its like; that of healthy blocks is within 3.
_SPIKE = 10.0

# Mean |x| of what is normed; nothing below it is loud.
_NORMED = 1.0

# Fewer like places say nothing of what is usual.
_LIKE = 4
_ROW = 3

# Sun et al.: larger than 100 and than 1,000 times the median of |x|.
_MASSIVE, _TIMES = 100.0, 1_000.0

# Share of the elements beyond 100 times the median: more are no exceptions.
_FEW = 0.001

# A tenth of fp16's largest number.
_NEAR_FP16 = 6_550.0


@dataclass(frozen=True, slots=True)
class _Jump:
    """A tensor that is so many times louder than its like."""

    seen: Seen
    times: float
    place: str


@dataclass(frozen=True, slots=True)
class _Row:
    """The same place in all blocks of a stack, in the order of the forward."""

    place: str
    seen: list[Seen]

    @property
    def loudness(self) -> list[float]:
        return [own.mean_abs for own in self.seen]

    @property
    def factor(self) -> float:
        """From one to the next, in the median; 0 where one is silent."""
        loud = self.loudness
        if len(loud) < _ROW or not all(loud):
            return 0.0
        return statistics.median(b / a for a, b in itertools.pairwise(loud))

    @property
    def overall(self) -> float:
        return self.loudness[-1] / self.loudness[0]

    @property
    def grows(self) -> bool:
        """Geometrically, to what is loud."""
        return self.factor >= _FACTOR and self.overall >= _OVERALL and max(self.loudness) >= _LOUD


def check(subject: Subject) -> Iterator[Finding]:
    rows = list(_rows(subject))
    if growing := [row for row in rows if row.grows]:
        whole = [row for row in growing if row.place.endswith("of the block")]
        yield _growth(max(whole or growing, key=lambda row: row.overall))
    elif jumps := [*_spikes(rows), *(plateaus := list(_plateaus(rows)))]:
        order = {id(own): index for index, own in enumerate(subject.plain.seen)}
        first = min(jumps, key=lambda jump: order[id(jump.seen)])
        start = min(plateaus, key=lambda jump: order[id(jump.seen)], default=None)
        yield _jump(first, start)
    yield from _massive(subject, rows)


def _rows(subject: Subject) -> Iterator[_Row]:
    blocks = find_blocks(subject.model)
    rows: dict[tuple[str, ...], list[Seen]] = {}
    for own in subject.plain.seen:
        side, call = own.place.side, str(own.place.call)
        block = next((b for b in blocks if own.layer == b or own.layer.startswith(f"{b}.")), None)
        if block is not None:
            part = own.layer.removeprefix(block).removeprefix(".") or "the block"
            key: tuple[str, ...] = (block.rpartition(".")[0], part, side, call)
        elif blocks or side == "input" or not is_projection(own.place.module):
            continue
        else:
            key = ("", "layers", side, "0")  # a plain chain of layers
        rows.setdefault(key, []).append(own)
    for (_, part, where, _), seen in rows.items():
        yield _Row(f"{where} of {part}" if blocks else "layers' outputs", seen)


def _growth(row: _Row) -> Finding:
    first, last = row.seen[0], row.seen[-1]
    return Finding(
        fault="growth-with-depth",
        severity="critical" if row.overall >= _RUNAWAY else "warning",
        layer=last.layer,
        what=f"Mean |x| grows from {first.mean_abs:.3g} at {first.layer} to {last.mean_abs:.3g} at"
        f" {last.layer}, {row.factor:.2g} times a block ({row.place}).",
        change="Norm the input of each branch (act_exporter.doctor.remedies.add_norm), and scale"
        " the branches' last projections by 1 / sqrt(2 x blocks) (scale_for_depth there).",
        why="The sum of normed branches grows as the square root of their number, and no faster.",
        evidence={
            "place": row.place,
            "mean_abs_first": first.mean_abs,
            "mean_abs_last": last.mean_abs,
            "factor": row.factor,
            "absmax": max(own.absmax for own in row.seen),
        },
        strength=row.overall / _OVERALL,
        symptom=True,
    )


def _plateaus(rows: list[_Row]) -> Iterator[_Jump]:
    """Where what follows stays above all that was before."""
    for row in rows:
        loud = row.loudness
        for index in range(2, len(loud) - 1):  # two before say what was usual, two are high
            before, after = max(loud[:index]), min(loud[index:])
            if before > 0 and after >= max(_SPIKE * before, _NORMED):
                yield _Jump(row.seen[index], after / before, row.place)


def _spikes(rows: list[_Row]) -> Iterator[_Jump]:
    """What is above all its like in the median, and above the one before: no end of a ramp."""
    for row in rows:
        loud = row.loudness if len(row.seen) >= _LIKE else []
        for index, own in enumerate(row.seen[: len(loud)]):
            usual = statistics.median(loud[:index] + loud[index + 1 :])
            below = max(usual, loud[index - 1] if index else 0.0)
            if usual > 0 and own.mean_abs >= max(_SPIKE * below, _NORMED):
                yield _Jump(own, own.mean_abs / usual, row.place)


def _jump(first: _Jump, plateau: _Jump | None) -> Finding:
    own = first.seen
    evidence: dict[str, float | int | str] = {
        "place": first.place,
        "mean_abs": own.mean_abs,
        "absmax": own.absmax,
        "times": first.times,
    }
    if plateau is not None:
        evidence["plateau_from"] = f"{plateau.seen.place.side} of {plateau.seen.layer}"
    return Finding(
        fault="spike" if plateau is None else "plateau",
        severity="warning",
        layer=own.layer,
        what=f"Mean |x| of the {own.place.side} of {own.layer} is {own.mean_abs:.3g},"
        f" {first.times:.3g} times the same place in other blocks"
        + (
            "."
            if plateau is None
            else f", and activations stay high from the {evidence['plateau_from']} on."
        ),
        change="Look at the weights, the norm and the attention's feature map right before it;"
        " an RMSNorm after the loud part brings it back (act_exporter.doctor.remedies.add_norm).",
        why="One loud branch outweighs all others in the residual stream.",
        evidence=evidence,
        strength=first.times / _SPIKE,
        symptom=True,
    )


def _massive(subject: Subject, rows: list[_Row]) -> Iterator[Finding]:
    candidates = [
        own
        for row in rows
        for own in row.seen
        if own.absmax > _MASSIVE and own.absmax > _TIMES * own.median_abs > 0
    ]
    if not candidates:
        return
    worst = max(candidates, key=lambda own: own.absmax / own.median_abs)
    found: list[torch.Tensor] = []

    def look(place: Place, tensor: torch.Tensor) -> None:
        if place == worst.place:
            found.append(tensor.detach().float().abs())

    with torch.no_grad():
        subject.trace(look=look)
    size = found[0]
    beyond = int((size > _MASSIVE * worst.median_abs).sum())
    if beyond > max(1, _FEW * size.numel()):
        return
    *_, token, channel = (0, *(int(i) for i in torch.unravel_index(size.argmax(), size.shape)))
    yield Finding(
        fault="massive-activation",
        severity="warning" if worst.absmax > _NEAR_FP16 else "info",
        layer=worst.layer,
        what=f"Channel {channel} of token {token} is {worst.absmax:.3g} in the {worst.place.side}"
        f" of {worst.layer}, {worst.absmax / worst.median_abs:,.0f} times the median.",
        change="None where training goes well; keep this layer in bf16 or float32, and leave the"
        " channel out of int8.",
        why="Large models keep a bias for attention there; fp16 and int8 have no room for it.",
        evidence={
            "absmax": worst.absmax,
            "median_abs": worst.median_abs,
            "channel": channel,
            "token": token,
            "beyond_100_medians": beyond,
            "beyond_1000_medians": int((size > _TIMES * worst.median_abs).sum()),
            "other_layers": len({own.layer for own in candidates} - {worst.layer}),
        },
        strength=worst.absmax / (_TIMES * worst.median_abs),
        symptom=True,
    )
