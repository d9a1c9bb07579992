"""Norms of gradients: taken on their devices without waiting, added up on the host.

A gradient may be sharded over ranks, sparse, complex or missing; a norm is of what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from act_exporter.sample import Norms
from act_exporter.transfer import to_host


@dataclass(slots=True)
class Pending:
    """Norms on their devices, and once sent on their way to the host.

    Attributes:
        groups: positions in the list of parameters, and the norm of each.
        layers: layer to the positions of its parameters.
        scale: the loss scale.
    """

    groups: list[tuple[list[int], torch.Tensor]]
    layers: dict[str, list[int]]
    scale: torch.Tensor | None
    step: int = 0
    events: list[torch.Event] = field(default_factory=list)

    def send(self, step: int) -> None:
        self.step = step
        self.groups = [(positions, to_host(norms, self.events)) for positions, norms in self.groups]
        self.scale = None if self.scale is None else to_host(self.scale, self.events)

    def norms(self) -> Norms:
        squares: dict[int, float] = {}
        with np.errstate(over="ignore", invalid="ignore"):
            for positions, norms in self.groups:
                values = np.square(norms.numpy().astype(np.float64))
                squares.update(zip(positions, values.tolist(), strict=True))
        layers = {
            layer: math.sqrt(sum(squares[position] for position in own if position in squares))
            for layer, own in self.layers.items()
            if not squares.keys().isdisjoint(own)
        }
        scale = None if self.scale is None else float(self.scale)
        return Norms(self.step, math.sqrt(sum(squares.values())), layers, scale)


def elements(gradient: torch.Tensor) -> torch.Tensor:
    """The elements that are on this rank, as a dense tensor of real numbers.

    Raises:
        TypeError: it cannot be had without waiting for the device.
    """
    shard = getattr(gradient, "to_local", None)  # a DTensor, whose module takes 0.8 s to import
    if shard is not None:
        gradient = shard()
    if gradient.layout is torch.sparse_coo:
        if not (gradient.is_cpu or gradient.is_coalesced()):
            raise TypeError("a sparse gradient cannot be summed up without waiting for its device")
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def norms_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(tensors,): the norm of each; all are of one device and one dtype."""
    # In the gradients' own dtype the norm of 16-bit ones would be off by 4e-3, or overflow.
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=dtype))


@dataclass(frozen=True, slots=True)
class Shards:
    """The parameters that are spread over one mesh of ranks.

    Attributes:
        mesh: a `DeviceMesh`.
        places: the parameters' positions in the list of all.
        holders: (parameters,): how many ranks hold the same elements of it.
    """

    mesh: Any
    places: list[int]
    holders: torch.Tensor

    def norms(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(parameters,): the norm of each gradient over all ranks; 0 where there is none.

        A collective: each rank of the mesh must call it, and whatever goes wrong in one rank the
        others get a NaN and do not wait.
        """
        squares = torch.full_like(self.holders, torch.nan)
        try:
            none = squares.new_zeros(1)
            # All in one dtype: each rank comes with as many numbers, whatever it has.
            tensors = [none if grad is None else elements(grad).float() for grad in gradients]
            # What several ranks hold alike would be counted as often.
            squares = norms_of(tensors).square() / self.holders
        finally:
            for dimension in range(self.mesh.ndim):
                torch.distributed.all_reduce(squares, group=self.mesh.get_group(dimension))
        return squares.sqrt()


def find_shards(parameters: Sequence[nn.Parameter]) -> list[Shards]:
    """The sharded ones (DTensor), by their mesh."""
    meshes: dict[Any, list[int]] = {}
    for place, parameter in enumerate(parameters):
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            meshes.setdefault(mesh, []).append(place)
    shards = []
    for mesh, places in meshes.items():
        own: list[Any] = [parameters[place] for place in places]
        holders = [_holders(mesh, parameter.placements) for parameter in own]
        device = own[0].to_local().device
        shards.append(Shards(mesh, places, torch.tensor(holders, dtype=torch.float32).to(device)))
    return shards


def _holders(mesh: Any, placements: Sequence[Any]) -> int:
    sizes = [mesh.size(dimension) for dimension in range(mesh.ndim)]
    return math.prod(
        size for size, place in zip(sizes, placements, strict=True) if place.is_replicate()
    )
