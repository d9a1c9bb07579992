"""The matrices of a model whose elements are sampled, and how.

A fixed stride through each one's memory: what is read is a view, so many of them take one kernel.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

# Elements of a matrix, at most: the RMS of so many normal ones is known to 2 %, a share to 1.6 %.
_ELEMENTS = 1024

# Matrices that are looked at; of more, so many spread over the depth. It bounds what a look costs
# on the host, about 40 microseconds a matrix, and its memory, a mebibyte in float32.
_MATRICES = 128

# Tensor classes whose memory is what it seems; others (quantised, of adapters) have an inner life.
_PLAIN = (torch.Tensor, nn.Parameter)

# Distance of two sampled elements, modulo the row: by this part of a row no few of them fall on the
# same columns or next to each other (a power of two would see one column of a matrix only).
_GOLDEN = 0.618


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a model that are sampled, by place.

    Attributes:
        references: to them.
        places: identity to place.
        layers: names of the watched layers that have any.
        pairs: (2, n), a layer's number and the place of a matrix in it.
    """

    references: list[weakref.ref[nn.Parameter]]
    places: dict[int, int]
    layers: list[str]
    pairs: npt.NDArray[np.int64]

    def place(self, parameter: nn.Parameter) -> int | None:
        """None of one that is not sampled."""
        place = self.places.get(id(parameter))
        known = place is not None and self.references[place]() is parameter
        return place if known else None

    def trainable(self) -> set[int]:
        """Places of those that want a gradient."""
        return {
            place
            for place, reference in enumerate(self.references)
            if (parameter := reference()) is not None and parameter.requires_grad
        }

    @classmethod
    def find(cls, model: nn.Module | None, watched: Mapping[str, weakref.ref[nn.Module]]) -> Self:
        """Those of `model`, none of one that is gone; `watched` are the layers by name."""
        found = [] if model is None else [own for own in model.parameters() if own.ndim >= 2]
        if len(found) > _MATRICES:
            spread = np.linspace(0, len(found) - 1, _MATRICES).round().astype(int)
            found = [found[place] for place in spread.tolist()]
        places = {id(parameter): place for place, parameter in enumerate(found)}
        layers: list[str] = []
        pairs: list[tuple[int, int]] = []
        for layer, reference in watched.items():
            module = reference()
            own = [] if module is None else list(module.parameters())
            inside = {places[id(parameter)] for parameter in own if id(parameter) in places}
            if inside:
                pairs += [(len(layers), place) for place in sorted(inside)]
                layers.append(layer)
        return cls(
            [weakref.ref(parameter) for parameter in found],
            places,
            layers,
            np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        )


def local_elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """What is on this rank, where its memory can be read as a row of real numbers."""
    shard = getattr(tensor, "to_local", None)  # a DTensor, whose module takes 0.8 s to import
    local: torch.Tensor = tensor if shard is None else shard()
    readable = (
        type(local) in _PLAIN
        and local.layout is torch.strided
        and local.is_floating_point()
        and not local.is_meta
        and local.numel() > 0
        and local.is_contiguous()
    )
    return local if readable else None


def sample(local: torch.Tensor) -> torch.Tensor:
    """(elements,): a view of some of the elements, always the same ones."""
    stride = _stride(local.shape[-1], local.numel())
    count = (local.numel() + stride - 1) // stride
    return local.as_strided((count,), (stride,), local.storage_offset())


@functools.lru_cache(maxsize=1024)
def _stride(width: int, elements: int) -> int:
    """Distance of the sampled elements of a matrix of this width: they change columns each time."""
    least = math.ceil(elements / _ELEMENTS)
    if least == 1:
        return 1
    golden = max(round(_GOLDEN * width), 1)
    stride = least if least < golden else golden + math.ceil((least - golden) / width) * width
    while math.gcd(stride, width) != 1:
        stride += 1
    return stride
