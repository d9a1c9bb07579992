"""What a linear attention's feature map does with extreme inputs.

The second seed's checklist, item 4: it must be bounded or grow slowly; exp is neither. elu(x) + 1
(Katharopoulos et al. 2020, arXiv:2006.16236) grows as x does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

# Where it is evaluated: queries and keys of a training that goes well stay below 10, exp leaves
# fp16 at 11, and float32 holds exp(88).
_REACH = 32.0
_POINTS = 1025

# Maps of several features at once (softmax over a head, say) get rows of this width.
_WIDTH = 8

# As powers of the input, from half of the reach to all of it: tanh 0, elu + 1 0.96, x^2 2, exp 23.
_BOUNDED, _LINEAR, _POWER = 0.1, 1.2, 6.0


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """A feature map on inputs from -32 to 32.

    Attributes:
        growth: how it grows with its input.
        exponent: the power of the input that it grows by from 16 to 32.
        largest: its largest |value|; infinite where it overflows.
        least: its smallest value.
    """

    growth: Literal["bounded", "linear", "power", "exponential"]
    exponent: float
    largest: float
    least: float

    @property
    def bounded(self) -> bool:
        return self.growth == "bounded"

    @property
    def positive(self) -> bool:
        """Whether no weight that an attention makes of it is negative."""
        return self.least >= 0


def feature_map(phi: Callable[[torch.Tensor], Any]) -> FeatureMap:
    """Evaluate a feature map on extreme inputs.

    Args:
        phi: takes a tensor (rows, 8) in float32 and returns one.

    Raises:
        TypeError: it returns no tensor of numbers. Whatever else `phi` raises goes through.
    """
    x = torch.linspace(-_REACH, _REACH, _POINTS)[:, None].expand(-1, _WIDTH).contiguous()
    with torch.no_grad():
        y = phi(x.clone())
    if not isinstance(y, torch.Tensor) or not y.is_floating_point() or len(y) != _POINTS:
        raise TypeError("a feature map returns a tensor of as many rows as it was given")
    rows = y.double().flatten(1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    size = rows.abs().amax(-1)
    inner = float(size[x[:, 0].abs() <= _REACH / 2].max())
    largest = float(size.max())
    exponent = math.log2(largest / inner) if 0 < inner < math.inf else math.inf
    if largest == 0:
        exponent = 0.0
    growth: Literal["bounded", "linear", "power", "exponential"] = "exponential"
    if exponent <= _BOUNDED:
        growth = "bounded"
    elif exponent <= _LINEAR:
        growth = "linear"
    elif exponent <= _POWER:
        growth = "power"
    return FeatureMap(growth, exponent, largest, float(rows.min()))
