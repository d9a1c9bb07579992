"""The article's blocks with each remedy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor import remedies
from tests.act_exporter.doctor.seed_blocks import StableBlock, UnstableBlock, stack

Block = type[UnstableBlock | StableBlock]
Remedy = Callable[[nn.Sequential], object]


class Normalised(UnstableBlock):
    """The unstable block with the attention that divides by the sum of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = remedies.linear_attention(
            *self.qkv_proj(x).chunk(3, dim=-1), feature_map=self.phi
        )
        x = self.ln1(x + self.out_proj(context))
        out: torch.Tensor = self.ln2(x + self.out_proj(F.relu(self.out_proj(x))))
        return out


class NormalisedStable(StableBlock):
    """The stable block likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(self.ln1(x)).chunk(3, dim=-1)
        x = x + self.out_proj(remedies.linear_attention(q, k, v, feature_map=self.phi))
        out: torch.Tensor = x + self.out_proj(F.gelu(self.out_proj(self.ln2(x))))
        return out


def remedied(block: Block, sequence: int, remedy: Remedy) -> tuple[nn.Sequential, torch.Tensor]:
    """The article's stack after a remedy; what the remedy draws is the same at each call."""
    model, x = stack(block, sequence)
    torch.manual_seed(0)
    remedy(model)
    return model, x


def bound_features(model: nn.Sequential) -> None:
    for block in model:
        block.phi = remedies.softmax_features
