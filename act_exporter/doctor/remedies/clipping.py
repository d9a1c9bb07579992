"""Clipping of gradients as they are, whatever the loss was scaled by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def clip_gradients(
    optimizer: torch.optim.Optimizer, max_norm: float, scaler: Any = None
) -> torch.Tensor:
    """Clip the norm of all gradients of an optimizer; stands between backward and its step.

    In place of `torch.nn.utils.clip_grad_norm_`, which does not know the loss scale: before
    `unscale_` it clips gradients that are 65,536 times too large, and what is left after the
    optimizer has unscaled them is next to nothing. If the norm is not finite, all gradients are
    dropped (set to None), so that the step changes nothing; that is known only on the host, which
    waits for the device once. (Pascanu et al. 2013, On the Difficulty of Training Recurrent Neural
    Networks; PyTorch's "Automatic Mixed Precision examples", gradient clipping.)

    Call it once the gradients of all micro-batches and ranks are in (DDP's are after `backward`
    outside `no_sync`). Not for FSDP1, whose `clip_grad_norm_` knows of its shards.

    Args:
        optimizer: whose gradients.
        max_norm: the largest Euclidean norm of all of them together.
        scaler: the `torch.amp.GradScaler` that has scaled the loss, if one has. Gradients are
            unscaled first, unless they have been.

    Returns:
        The norm before clipping, of unscaled gradients.

    Raises:
        RuntimeError: the scaler's step came before.
    """
    if scaler is not None:
        _unscale(optimizer, scaler)
    parameters = [own for group in optimizer.param_groups for own in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    whole = getattr(norm, "full_tensor", None)  # a DTensor, whose module takes 0.8 s to import
    if whole is not None:
        norm = whole()
    if not norm.isfinite():
        for parameter in parameters:
            parameter.grad = None
    return norm


def _unscale(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    try:
        scaler.unscale_(optimizer)
    except RuntimeError as error:
        # The only public sign that the caller has done so.
        if "already been called" not in str(error):
            raise
