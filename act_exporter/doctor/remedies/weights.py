"""Weights that start small enough for the depth and width of their model."""

from __future__ import annotations

import math

import torch
from torch import nn

from act_exporter.doctor.remedies.selection import select_weights


def initialise(model: nn.Module, *weights: str, std: float) -> list[str]:
    """Draw weights anew, from a normal distribution around 0; what was learnt in them is lost.

    Args:
        model: the model.
        weights: names of weights, or globs: "*.q_proj.weight".
        std: the standard deviation. `fan_in ** -0.5` keeps the variance of what goes in (LeCun et
            al. 1998, Efficient BackProp), as muP's of hidden matrices do at any width (Yang et al.
            2022, Tensor Programs V); `(2 / (5 * width)) ** 0.5` is SmallInit of query, key and
            value (Nguyen and Salazar 2019, Transformers without Tears); GPT-2 has 0.02 everywhere.

    Returns:
        Names of the weights that were changed.

    Raises:
        SettingError: a name is no weight's.
    """
    chosen = select_weights(model, weights)
    for weight in chosen.values():
        nn.init.normal_(weight, std=std)
    return list(chosen)


def scale_for_depth(
    model: nn.Module, *weights: str, additions: int | None = None, factor: float | None = None
) -> list[str]:
    """Make what each layer adds to the residual stream smaller, the more layers add to it.

    The variance of a sum of n independent terms is n times that of one; with terms of 1 / sqrt(n)
    the stream of a deep model is as loud as that of a shallow one. GPT-2 divides these weights so
    (Radford et al. 2019, Language Models are Unsupervised Multitask Learners).

    Args:
        model: the model.
        weights: names, or globs, of the weights that add to the stream: the attentions' output
            projections and the last ones of feed-forward layers, "*.attn.proj.weight".
        additions: how often something is added in one forward; as many as there are weights,
            unless given. (All experts of one layer add once; a shared layer adds more often.)
        factor: in place of 1 / sqrt(additions). DeepNorm's is (8 * layers) ** -0.25, of value
            projections too, together with a residual of (2 * layers) ** 0.25 times itself (Wang et
            al. 2022); T-Fixup's encoder, without norms and warm-up, has 0.67 * layers ** -0.25
            (Huang et al. 2020).

    Returns:
        Names of the weights that were changed.

    Raises:
        SettingError: a name is no weight's.
    """
    chosen = select_weights(model, weights)
    if factor is None:
        factor = 1 / math.sqrt(additions if additions is not None else len(chosen))
    with torch.no_grad():
        for weight in chosen.values():
            weight.mul_(factor)
    return list(chosen)
