"""Norms where there are none, and gains that start small."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.remedies.selection import select_modules
from act_exporter.exceptions import SettingError

# Llama's: of float32, in which the mean square is summed whatever the dtype of the activations.
_EPSILON = 1e-6


class AddedNorm(nn.RMSNorm):
    """A root mean square norm of each `width` features (Zhang and Sennrich 2019).

    Attributes:
        first: how many features are normalised; the others pass. None for all.
    """

    def __init__(self, width: int, first: int | None, like: torch.Tensor) -> None:
        super().__init__(width, eps=_EPSILON, device=like.device, dtype=like.dtype)
        self.width = width
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., features): the same, normalised."""
        first = x.shape[-1] if self.first is None else self.first
        dtype = torch.promote_types(x.dtype, torch.float32)  # squares of 256 overflow in float16
        part = x[..., :first].reshape(*x.shape[:-1], -1, self.width).to(dtype)
        normed = F.rms_norm(part, (self.width,), self.weight.to(dtype), self.eps)
        normed = normed.flatten(-2).to(x.dtype)
        return normed if first == x.shape[-1] else torch.cat([normed, x[..., first:]], dim=-1)


def add_norm(
    model: nn.Module,
    *layers: str,
    side: Literal["input", "output"] = "output",
    width: int | None = None,
    first: int | None = None,
    gain: float = 1.0,
) -> list[str]:
    """Put a root mean square norm on what comes out of layers, or goes in.

    After an attention, or between it and its output projection, it keeps whatever the attention
    does from the residual stream; the latter is NormAttention, in place of the normaliser of linear
    attention (Qin et al. 2022, The Devil in Linear Transformer). The tensor before it stays as loud
    as it was: where that overflows, the norm comes too late. On queries and keys, a head at a time,
    it bounds attention's logits (Henry et al. 2020, Query-Key Normalization for Transformers;
    Dehghani et al. 2023, Scaling Vision Transformers to 22 Billion Parameters).

    The layers stay in their places, and their weights keep their names; each gets a module with a
    learnt gain, `added_output_norm` or `added_input_norm`. A checkpoint from before has no such
    gain: load it with `strict=False`. A restored optimizer state has none either.

    Args:
        model: the model.
        layers: names of modules, or globs: "*.attn". The first tensor of what they take or return
            is normalised.
        side: which end.
        width: features that are normalised together: a head's, for queries and keys. All of a
            layer's, where its weight tells how many these are, unless given.
        first: normalise as many features from the first, and not the rest: queries and keys of a
            projection that makes queries, keys and values in this order.
        gain: where the norm's gain starts.

    Returns:
        Names of the layers that were changed.

    Raises:
        SettingError: a name is no module's, or names one that cannot be normalised so.
    """
    chosen = select_modules(model, layers)
    added = f"added_{side}_norm"
    norms = {}
    for name, module in chosen.items():
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise SettingError(f"{name} is never called, its attention is: name that")
        if hasattr(module, added):
            raise SettingError(f"{name} has {added} already")
        features = first or _features(module, side)
        own = width or features
        if own is None or (features is not None and features % own):
            raise SettingError(
                f"{name}: width={width} for {features or 'an unknown number of'} features"
            )
        weights = itertools.chain(module.parameters(), model.parameters())
        like = (weight for weight in weights if weight.is_floating_point())
        norms[name] = AddedNorm(own, first, next(like, torch.empty(0)))
        nn.init.constant_(norms[name].weight, gain)
    for name, module in chosen.items():
        module.add_module(added, norms[name])
        # Functions of this module, which find the norm in theirs: copies and pickles of the model
        # have their own.
        if side == "input":
            module.register_forward_pre_hook(_normalise_input)
        else:
            module.register_forward_hook(_normalise_output)
    return list(chosen)


def set_gains(model: nn.Module, gain: float, *norms: str) -> list[str]:
    """Set the gains of norms.

    Small ones (0.1) keep what each layer adds to the stream small while training begins; too large
    ones multiply all activations after them. Of a norm that multiplies by 1 + weight, as Gemma's
    and Qwen3-Next's, the weight becomes gain - 1.

    Args:
        model: the model.
        gain: the factor.
        norms: names of norms, or globs; all norms of the model where none is given.

    Returns:
        Names of the norms that were changed.

    Raises:
        SettingError: a name is no module's, or names one that is no norm with a gain.
    """
    found = select_modules(model, norms or ("*",))
    chosen = {name: module for name, module in found.items() if norms or _is_norm(module)}
    weights = {name: gain - _offset(name, module) for name, module in chosen.items()}
    for name, weight in weights.items():
        nn.init.constant_(chosen[name].get_parameter("weight"), weight)
    return list(chosen)


def _normalise_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        raise TypeError(f"{type(module).__name__} takes no input by position: normalise another")
    return (module.get_submodule("added_input_norm")(args[0]), *args[1:])


def _normalise_output(module: nn.Module, _args: Any, output: Any) -> Any:
    norm = module.get_submodule("added_output_norm")
    return (norm(output[0]), *output[1:]) if isinstance(output, tuple) else norm(output)


def _features(module: nn.Module, side: str) -> int | None:
    """How many features a layer takes or makes, where its kind tells; None where not."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    # Linear's names, and those of GPT-2's Conv1D.
    names = ("in_features", "nx") if side == "input" else ("out_features", "nf")
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "norm" in type(module).__name__.lower()
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
    )


def _offset(name: str, norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies by it: 0, or 1.

    Raises:
        SettingError: it is no norm with a gain, or one that cannot be tried.
    """
    if not _is_norm(norm):
        raise SettingError(f"{name} is no norm with a gain but {type(norm).__name__}")
    if type(norm).__module__.startswith("torch.nn."):
        return 0.0
    trial = copy.deepcopy(norm)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.zero_()
        try:
            out = trial(torch.ones_like(trial.get_parameter("weight")).unsqueeze(0))
        except Exception as error:
            raise SettingError(f"{name}: what its weight does cannot be told: {error}") from error
    return float(bool(out.any()))
