"""What int8 would cost: channels that are so loud that the rest drown in the rounding.

Each matrix' input is rounded to int8 with one scale a tensor, and its output compared with the
exact one; again with one scale a token, and with the loud channels left out. Sources: the seed's
section 5.2; Dettmers et al. 2022 (LLM.int8(), arXiv:2208.07339), which multiplies the outlier
channels apart; Xiao et al. 2023 (SmoothQuant, arXiv:2211.10438), which divides them by a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place

FAULTS = {"outlier-channels": "Rounding a matrix' input to int8 costs much of its output."}

# A Gaussian input costs 1 %, a gated product 2 to 3 %, and a stack adds them up by their squares:
# at 5 % a layer 16 of them cost a fifth of the signal, at 10 % four do.
_COSTLY = 0.05
_RUINOUS = 0.1

# In a Gaussian input the loudest channels reach twice the median channel's maximum. Outlier
# channels were reported at 20 times and more (LLM.int8(): 6 beside 0.3; SmoothQuant: 100 times).
_OUTLIER = 10.0

# Rows of which the error is measured; scale and channels are taken from all.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Cost:
    """What rounding one matrix' input costs: RMS of the output's error over that of the output.

    Attributes:
        layer: the matrix' module.
        tensor: with one scale a tensor.
        token: with one scale a token.
        apart: with one scale for the channels that are no outliers, the others exact.
        outliers: the loud channels, the loudest first.
        channels: how many there are.
        times: how many times as loud the loudest channel is as the median one.
    """

    layer: str
    tensor: float
    token: float
    apart: float
    outliers: tuple[int, ...]
    channels: int
    times: float


def check(subject: Subject) -> Iterator[Finding]:
    costs: dict[str, _Cost] = {}

    def look(place: Place, tensor: torch.Tensor) -> None:
        if place.side != "input" or not _is_matrix(place.module):
            return
        cost = _cost(place, tensor.detach())
        if cost is not None and (
            place.layer not in costs or cost.tensor > costs[place.layer].tensor
        ):
            costs[place.layer] = cost

    with torch.no_grad():
        subject.trace(look=look)
    costly = [cost for cost in costs.values() if cost.tensor >= _COSTLY]
    if costly:
        yield _finding(max(costly, key=lambda cost: cost.tensor), len(costly) - 1)


def _is_matrix(module: nn.Module) -> bool:
    # GPT-2's own matrix is a class of transformers.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _cost(place: Place, tensor: torch.Tensor) -> _Cost | None:
    rows = tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[None]
    if not bool(rows.isfinite().all()):
        return None
    loudness = rows.abs().amax(0).float()
    median = float(loudness.median())
    largest = float(loudness.max())
    few = rows[:: -(-len(rows) // _ROWS)]
    exact = place.module.forward(few).float()
    size = float(exact.square().mean().sqrt())
    if not largest or not size:
        return None
    order = loudness.argsort(descending=True)
    outliers = order[: int((loudness > _OUTLIER * median).sum())] if median else order[:0]

    def error(scale: torch.Tensor | float, loud: torch.Tensor | None = None) -> float:
        rounded = _rounded(few, scale)
        if loud is not None:
            rounded[:, loud] = few[:, loud]
        off = place.module.forward(rounded).float() - exact
        return float(off.square().mean().sqrt()) / size

    quiet = loudness.clone()
    quiet[outliers] = 0
    return _Cost(
        layer=place.layer,
        tensor=error(largest),
        token=error(few.abs().amax(-1, keepdim=True)),
        apart=error(float(quiet.max()), outliers),
        outliers=tuple(outliers.tolist()),
        channels=len(loudness),
        times=largest / median if median else 0.0,
    )


def _rounded(rows: torch.Tensor, largest: torch.Tensor | float) -> torch.Tensor:
    """Symmetric int8, -127 to 127, and back."""
    step = torch.as_tensor(largest, dtype=torch.float32, device=rows.device) / 127
    step = step.clamp(min=torch.finfo(torch.float32).tiny)
    return ((rows.float() / step).round().clamp(-127, 127) * step).to(rows.dtype)


def _finding(worst: _Cost, others: int) -> Finding:
    if worst.outliers:
        change = (
            "Move the channels' scale into the weights (SmoothQuant), or multiply them apart in"
            " 16 bits (LLM.int8())."
        )
        why = f"Without them the rest has finer steps: {worst.apart:.1%} in place of it."
        loud = f"; {len(worst.outliers)} of {worst.channels} channels are outliers, {{}}"
        channels = loud.format(
            f"channel {worst.outliers[0]} {worst.times:.3g} times the median channel"
        )
    else:
        change = "Quantise with one scale a token, or clip what few elements reach."
        why = (
            f"No channel stands out, a few elements do: one scale a token costs {worst.token:.1%}."
        )
        channels = "; no channel stands out"
    return Finding(
        fault="outlier-channels",
        severity="warning" if worst.tensor >= _RUINOUS else "info",
        layer=worst.layer,
        what=f"Rounding the input of {worst.layer} to int8 costs {worst.tensor:.1%} of its output"
        f"{channels}.",
        change=change,
        why=why,
        evidence={
            "error_per_tensor": worst.tensor,
            "error_per_token": worst.token,
            "error_outliers_apart": worst.apart,
            "outlier_channels": len(worst.outliers),
            "channels": worst.channels,
            "loudest_channel": worst.outliers[0] if worst.outliers else -1,
            "other_layers": others,
        },
        strength=worst.tensor / (_RUINOUS if worst.tensor >= _RUINOUS else _COSTLY),
    )
