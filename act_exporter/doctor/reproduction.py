"""The seed's "simplified reproduction": a few layers of the same configuration, as a script.

It has the configuration and no weights, which tells two kinds of fault apart: what the doctor finds
in it too comes from the configuration (an initialisation, an epsilon, a format), and what it does
not find there has been learnt or was damaged.
"""

from __future__ import annotations

import copy
import pprint
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from act_exporter.doctor.finding import NeedsMoreError
from act_exporter.doctor.subject import Batch

LAYERS = 4
"""Two show growth from one to the next, four whether it goes on; more only cost time."""

# What configurations call the number of their layers; others are mapped to these by themselves.
_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layers",
    "n_layer",
)

# Of the place where a model came from, not of what it is.
_LEFT_OUT = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")

_SCRIPT = '''"""{model} with {layers} of its layers, with its configuration and not its weights."""

import torch
from transformers import {config}, {model}

from act_exporter.doctor import examine

torch.manual_seed(0)
config = {config}(
    **{settings}
)
model = {model}(config){cast}.{mode}()
batch = {batch}
print(examine(model, batch))
'''


def reproduce(model: nn.Module, batch: Batch) -> str:
    """A script that makes 2 to 4 layers of a transformers model, and examines them.

    Args:
        model: one of transformers' own classes, or something around one.
        batch: for shapes and ranges; its values are replaced by random ones.

    Raises:
        NeedsMoreError: there is no such model.
    """
    own = _transformers_model(model)
    config = own.config
    small = copy.deepcopy(config)
    layers = _shorten(small)
    settings = {k: v for k, v in small.to_diff_dict().items() if k not in _LEFT_OUT}
    dtype = next((p.dtype for p in own.parameters()), torch.float32)
    return _SCRIPT.format(
        model=type(own).__name__,
        config=type(config).__name__,
        layers=layers,
        settings=_indented(settings),
        cast="" if dtype is torch.float32 else f".to({dtype})",
        mode="train" if own.training else "eval",
        batch=_indented(_Literal(_literal(batch))),
    )


def _transformers_model(model: nn.Module) -> Any:
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("transformers.") and hasattr(module, "config"):
            return module
    raise NeedsMoreError("a reproduction needs a model of a class of transformers")


def _shorten(config: Any) -> int:
    """Leave few layers in a configuration and those inside it; how many the largest had left."""
    left = 0
    for name in _COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and not isinstance(count, bool):
            kept = min(count, LAYERS)
            setattr(config, name, kept)
            _cut_lists(config, count, kept)
            left = max(left, kept)
    for inner in _inner(config):
        left = max(left, _shorten(inner))
    return left


def _cut_lists(config: Any, count: int, kept: int) -> None:
    # The kinds of attention, layer by layer, say.
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, value[:kept])


def _inner(config: Any) -> Iterator[Any]:
    return (value for value in vars(config).values() if hasattr(value, "to_diff_dict"))


class _Literal(str):
    """Code that is printed as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _literal(value: Any) -> Any:
    """A batch of the same shapes, as code."""
    if isinstance(value, Mapping):
        return {name: _literal(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_literal(inner) for inner in value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(value.shape)
    if value.is_floating_point():
        dtype = "" if value.dtype is torch.float32 else f", dtype={value.dtype}"
        return _Literal(f"torch.randn({shape}{dtype})")
    if value.dtype is torch.bool:
        return _Literal(f"torch.ones({shape}, dtype=torch.bool)")
    # Negative labels are those that the loss leaves out.
    low, high = (max(int(value.min()), 0), int(value.max())) if value.numel() else (0, 0)
    return _Literal(f"torch.randint({low}, {high + 1}, {shape}, dtype={value.dtype})")


def _indented(value: Any) -> str:
    return pprint.pformat(value, width=90, sort_dicts=False).replace("\n", "\n    ")
