"""Weights in bfloat16 that an optimizer's steps are too small for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject

# Adam's step is lost where it is under half the spacing of two neighbours, |w| / 256 at most and
# |w| / 512 at least; when that is so of most elements, the matrix as a whole hardly learns.
_LOST = 0.5


def lost_updates(subject: Subject) -> Iterator[Finding]:
    """Adam-like steps are about the learning rate, whatever the gradient."""
    if subject.optimizer is None:
        return
    names = {id(p): name for name, p in subject.model.named_parameters()}
    lost: dict[str, float] = {}
    rate = 0.0
    for group in subject.optimizer.param_groups:
        if "betas" not in group:
            continue  # of others the step goes with the gradient, which is not known here
        # With a warm-up under way, the rate that it goes to.
        own = float(max(group["lr"], group.get("initial_lr", 0.0)))
        for weight in group["params"]:
            if weight.dtype == torch.bfloat16 and weight.numel() and id(weight) in names:
                share = float((_spacing(weight.detach()) / 2 > own).float().mean())
                lost[names[id(weight)]] = share
                rate = max(rate, own)
    worst = max(lost, key=lambda name: lost[name], default=None)
    if worst is None or not rate:
        return
    mean = sum(lost.values()) / len(lost)
    if lost[worst] >= _LOST:
        yield Finding(
            fault="bf16-lost-updates",
            severity="warning",
            layer=worst.rpartition(".")[0],
            what=f"A step of {rate:.3g} is less than half the spacing of bfloat16 for"
            f" {lost[worst]:.0%} of {worst}, {mean:.0%} over all.",
            change="Keep the weights in float32 and compute in bfloat16 (autocast), or keep a"
            " float32 copy of them in the optimizer.",
            why="A weight to which too little is added stays exactly what it was.",
            evidence={"share_lost": lost[worst], "share_lost_mean": mean, "learning_rate": rate},
            strength=lost[worst] / _LOST,
        )


def _spacing(weight: torch.Tensor) -> torch.Tensor:
    """Distance of each element to its neighbour in bfloat16, of 8 significant bits."""
    size = weight.float().abs()
    _, exponent = torch.frexp(size)
    return torch.where(size > 0, torch.ldexp(torch.ones_like(size), exponent - 8), 0.0)
