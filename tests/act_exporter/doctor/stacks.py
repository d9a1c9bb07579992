"""Models with a fault put in, and the healthy ones that no fault may be found in."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Batch
from tests.act_exporter.architectures import ARCHITECTURES

HEALTHY = sorted(set(ARCHITECTURES) - {"unstable"})


def healthy(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    kind = ARCHITECTURES[name]
    return kind.build(), kind.batch()


class Block(nn.Module):
    """A feed-forward block with its norm where `order` says: "pre", "post" or "none"."""

    def __init__(self, width: int, order: str = "pre") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if order != "none" else nn.Identity()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "post":
            return self.norm(x + self.down(F.gelu(self.up(x))))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32, order: str = "pre") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, order) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def vectors(width: int = 32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, width)


def gpt2(layers: int = 4) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokens = torch.randint(3, 64, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def only(findings: Iterable[Finding], fault: str) -> Finding:
    """The one finding of this fault; fails if there is none or more."""
    (found,) = [finding for finding in findings if finding.fault == fault]
    return found


def unchanged(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that a model holds, to compare later."""
    return copy.deepcopy(model.state_dict())
