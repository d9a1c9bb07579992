"""Units that put out nothing but zeros."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from act_exporter.doctor.trace import Place
from act_exporter.layers import is_projection

# A working ReLU unit is zero at all of so many positions once in 256; half of a layer's never are.
_POSITIONS = 8


@dataclass
class Zeros:
    """Sees them where the next matrix reads them, whatever function is in between.

    Attributes:
        found: the share of a layer's units, the layer, and how many units.
    """

    found: list[tuple[float, str, int]] = field(default_factory=list)
    _last: str = ""

    def look(self, place: Place, tensor: torch.Tensor) -> None:
        if not is_projection(place.module) or isinstance(place.module, nn.MultiheadAttention):
            return
        if place.side == "output":
            self._last = place.layer
        elif self._last and tensor.requires_grad and tensor.ndim > 1 and not place.call:
            units = 1 if isinstance(place.module, nn.modules.conv._ConvNd) else tensor.ndim - 1
            rest = [dim for dim in range(tensor.ndim) if dim != units]
            if tensor.numel() // tensor.shape[units] >= _POSITIONS:
                dead = (tensor.detach() == 0).all(rest[0]) if len(rest) == 1 else None
                if dead is None:
                    dead = tensor.detach().abs().amax(rest) == 0
                self.found.append((float(dead.float().mean()), self._last, int(dead.sum())))
