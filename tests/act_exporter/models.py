"""Small models that the tests watch."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deploy.demo.train import GPT


def gpt() -> GPT:
    """Two blocks, width 16."""
    torch.manual_seed(0)
    return GPT(layers=2, width=16, heads=2, context=8)


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Next-byte training on random bytes, by one optimizer a model unless one is given."""
    optimizer = optimizer or getattr(model, "optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.optimizer = optimizer  # type: ignore[assignment]
    for _ in range(steps):
        tokens = torch.randint(0, 256, (2, 9))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = cast("torch.Tensor", checkpoint(block, x, use_reentrant=self.reentrant))
        return x


class HybridBlock(nn.Module):
    """Linear attention written out in the block itself; out_proj is called three times."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.ln1 = nn.LayerNorm(dim)
        self.ln2 = nn.LayerNorm(dim)
        nn.init.normal_(self.qkv_proj.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        context = torch.exp(q) @ (torch.exp(k).transpose(-2, -1) @ v)
        x = self.ln1(x + self.out_proj(context))
        out: torch.Tensor = self.ln2(x + self.out_proj(F.relu(self.out_proj(x))))
        return out
