"""What is watched: tensors of layers, and what they are to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["input", "output"]

LOGITS_LIMIT = 16_000_000
"""Largest output of the head, in elements, that is read: a vocabulary of 50,257 costs as much as
120 taps of the model's width."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a query or key tap is to its attention.

    Attributes:
        attention: name of the module whose logits are products of query and key.
        dim: elements in one head's row.
        scale: factor on the products: the attention's own, else 1 / sqrt(dim).
    """

    attention: str
    dim: int
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """One watched tensor of a model.

    Attributes:
        layer: the module's own name in the model, without wrappers' parts.
        tensor: whether it is the module's input or its output.
        kind: the same in all blocks for the same place in the block; compares a layer with its
            like.
        limit: tensors of more elements are not read; None for no limit.
        heads: of a query or key, else None.
    """

    layer: str
    tensor: Side
    kind: str
    limit: int | None = None
    heads: Heads | None = None

    @property
    def is_logits(self) -> bool:
        """Whether it is the head's output, the only one that has a limit."""
        return self.limit is not None
