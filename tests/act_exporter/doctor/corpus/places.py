"""Where in a model a fault can be put."""

from __future__ import annotations

import re

import torch
from torch import nn

# Parts whose scale is the attention logits' or a router's: other kinds of fault break those.
_SCORES = re.compile(
    r"(q_proj|k_proj|query|key|c_attn|qkv_proj|in_proj|router|gate)$|Attention\.(q|k)$"
)


def norms(model: nn.Module) -> list[str]:
    """Norms with a gain, but those of queries and keys."""
    return [
        name
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__
        and getattr(module, "weight", None) is not None
        and not name.endswith(("q_norm", "k_norm"))
    ]


def matrices(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    """The largest weight of each module that multiplies with one, by the module's name.

    Not those that make queries, keys and routes, not embeddings, nor what shares their weight.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.ndim >= 2 and id(p) not in shared]
        if own and not _SCORES.search(name) and not isinstance(module, nn.MultiheadAttention):
            found[name] = max(own, key=torch.Tensor.numel)
    return found


def holders(model: nn.Module, parameter: torch.Tensor) -> frozenset[str | None]:
    """Modules that have it, tied ones all."""
    return frozenset(
        name
        for name, module in model.named_modules()
        if any(own is parameter for own in module._parameters.values())
    )


def family(*names: str) -> frozenset[str | None]:
    """These modules and, of each, what encloses it up to its block: `a.1.b` and `a.1` of `a.1.b.c`.

    Any of them is a right place where the fault is in the working together of several.
    """
    found: set[str | None] = set()
    for name in names:
        while name and not name.rpartition(".")[0].endswith(
            ("blocks", "layers", "layer", "block", ".h")
        ):
            found.add(name)
            name = name.rpartition(".")[0]
        found.add(name)
    return frozenset(found - {""})
