"""The matrices of a model, how loud each is, and which are each other's like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.layers import named_modules

_TABLES = (nn.Embedding, nn.EmbeddingBag)

# Elements of a matrix that are read, at most: the RMS of so many normal ones is known to 0.3 %.
_ELEMENTS = 65_536


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of two and more dimensions that an input is multiplied with.

    Attributes:
        layer: the module's name.
        parameter: its name in the module.
        kind: the same for the same place in other blocks.
        rms: of its elements.
        fan_in: elements of an input that one element of the output is made of.
    """

    layer: str
    parameter: str
    kind: tuple[str, ...]
    rms: float
    fan_in: int

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.parameter}"

    @property
    def gain(self) -> float:
        """How many times louder its output is than its input, both taken as random.

        1 of LeCun's and Glorot's, 1.4 of He's, 0.6 of torch's own, 0.02 sqrt(fan-in) of GPT-2's.
        """
        return self.rms * math.sqrt(self.fan_in)


def kind(layer: str) -> str:
    """A layer's name without the numbers of blocks and experts: the same for all its like."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """All of a model, each once, in registration order; embeddings and what is tied to them not."""
    modules = dict(named_modules(model))
    seen = {id(table.weight) for table in modules.values() if isinstance(table, _TABLES)}
    for layer, module in modules.items():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in seen and _is_matrix(weight):
                yield Matrix(
                    layer=layer,
                    parameter=name,
                    kind=(kind(layer), type(module).__name__, name),
                    rms=rms(weight),
                    fan_in=_fan_in(module, weight),
                )
            seen.add(id(weight))


def rms(weight: torch.Tensor) -> float:
    """Of the finite elements, of up to 65,536; 0 if there are none."""
    values = weight.detach().flatten()
    values = values[:: -(-values.numel() // _ELEMENTS)].double()
    values = values[values.isfinite()]
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _is_matrix(weight: torch.Tensor) -> bool:
    if isinstance(weight, nn.UninitializedParameter) or not weight.is_floating_point():
        return False
    # Tables of positions and tokens are (1, n, d); filters of one channel (d, 1, n) and rows (1, d)
    # are matrices all the same.
    return weight.ndim >= 2 and weight.numel() > 0 and not (weight.ndim == 3 and len(weight) == 1)


def _fan_in(module: nn.Module, weight: torch.Tensor) -> int:
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        # Each output element is met by one in `stride` of the kernel's.
        return max(1, weight[:, 0].numel() // math.prod(module.stride))
    if isinstance(module, nn.modules.conv._ConvNd):
        return weight[0].numel()
    # GPT-2's (in, out) matrix; of others, experts in one tensor too, the last dimension goes away.
    return weight.shape[0 if type(module).__name__ == "Conv1D" else -1]
