"""The hook that makes a module's output too large on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from act_exporter.hooks import Unwatched


class FaultHook:
    """A forward hook; a class, not a closure, so that a hooked model can be copied and pickled.

    Attributes:
        found: whether the last output had a tensor to multiply; None before the first in training.
            Never read in a forward, so that no graph depends on it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: bool | None = None
        home = next(module.parameters(), torch.empty(0)).device
        with torch.inference_mode(False):
            # Filled with other values later, and float32 whatever the model has: of one element
            # only the value counts, and the output keeps its own format.
            self._multiplier = torch.ones((), dtype=torch.float32, device=home)
        # Before the hook that watches the same output, which must see it.
        self._handle = module.register_forward_hook(self, prepend=True)
        # A graph that was compiled without the hook would go on without it.
        torch.compiler.reset()

    def set(self, factor: float) -> None:
        """Multiply by `factor` from now on."""
        self._multiplier.fill_(factor)

    def remove(self) -> None:
        """Multiply no more."""
        self.set(1.0)
        self._handle.remove()

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        # The module's own mode, which recomputation in backward has too; gradients are off there.
        if not module.training:
            return output
        parts, structure = tree_flatten(output)
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                # A copy: backward needs the value of this step, when the next may have begun.
                parts[index] = part * self._multiplier.to(part.device, copy=True)
                self.found = True
                return tree_unflatten(parts, structure)
        self.found = False
        return output
