"""Modules and weights of a model, by globs over their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from act_exporter.exceptions import SettingError
from act_exporter.layers import named_modules

_Part = TypeVar("_Part")


def select_modules(model: nn.Module, globs: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these names.

    Raises:
        SettingError: nothing has a name that one of them stands for.
    """
    return _selected(dict(named_modules(model)), globs, "module")


def select_weights(model: nn.Module, globs: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters with these names, each once, however many modules share it.

    Raises:
        SettingError: nothing has a name that one of them stands for.
    """
    weights = {
        f"{layer}.{name}": weight
        for layer, module in named_modules(model)
        for name, weight in module.named_parameters(recurse=False)
    }
    chosen = _selected(weights, globs, "weight")
    once = {id(weight): name for name, weight in reversed(chosen.items())}
    return {name: weight for name, weight in chosen.items() if once[id(weight)] == name}


def _selected(parts: dict[str, _Part], globs: Sequence[str], kind: str) -> dict[str, _Part]:
    chosen: set[str] = set()
    for glob in globs:
        found = fnmatch.filter(parts, glob)
        if not found:
            raise SettingError(
                f"no {kind} is called {glob!r};"
                f" the model's are: {', '.join(list(parts)[:20]) or 'none'}"
            )
        chosen.update(found)
    return {name: part for name, part in parts.items() if name in chosen}
