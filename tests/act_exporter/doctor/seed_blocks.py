"""Two blocks of "Activation anomalies in large-model training", restored.

The article's code has lost its signs and line breaks; these are its statements in its order, with
the names that it gives. It calls one block unstable and one stable.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import init

from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Seen

DIM, LAYERS = 64, 6


class UnstableBlock(nn.Module):
    """Post-norm, weights of 0.1, and exp as the feature map of its linear attention."""

    def __init__(self, dim: int, use_linear: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.use_linear = use_linear
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        nn.init.normal_(self.qkv_proj.weight, mean=0.0, std=0.1)
        self.out_proj = nn.Linear(dim, dim)
        self.ln1 = nn.LayerNorm(dim)
        self.ln2 = nn.LayerNorm(dim)
        self.phi = lambda x: torch.exp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        if self.use_linear:
            q_phi, k_phi = self.phi(q), self.phi(k)
            attn_out = torch.matmul(q_phi, torch.matmul(k_phi.transpose(-2, -1), v))
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / (self.dim**0.5)
            attn_weights = F.softmax(scores, dim=-1)
            attn_out = torch.matmul(attn_weights, v)
        attn_out = self.out_proj(attn_out)
        x = residual + attn_out
        x = self.ln1(x)
        residual = x
        ff_out = self.out_proj(F.relu(self.out_proj(x)))
        x = residual + ff_out
        out: torch.Tensor = self.ln2(x)
        return out


class StableBlock(nn.Module):
    """Pre-norm with gains of 0.1, weights of 0.02, and elu(x) + 1, scaled, as the feature map."""

    def __init__(self, dim: int, use_linear: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.use_linear = use_linear
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        nn.init.normal_(self.qkv_proj.weight, mean=0.0, std=0.02)
        self.out_proj = nn.Linear(dim, dim)
        self.ln1 = nn.LayerNorm(dim)
        init.constant_(self.ln1.weight, 0.1)
        self.ln2 = nn.LayerNorm(dim)
        init.constant_(self.ln2.weight, 0.1)
        self.phi = lambda x: F.elu(x) + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed_x = self.ln1(x)
        q, k, v = self.qkv_proj(normed_x).chunk(3, dim=-1)
        if self.use_linear:
            q_phi, k_phi = self.phi(q), self.phi(k)
            scale = self.dim**-0.25
            q_phi, k_phi = q_phi * scale, k_phi * scale
            attn_out = torch.matmul(q_phi, torch.matmul(k_phi.transpose(-2, -1), v))
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / (self.dim**0.5)
            attn_weights = F.softmax(scores, dim=-1)
            attn_out = torch.matmul(attn_weights, v)
        attn_out = self.out_proj(attn_out)
        x = x + attn_out
        normed_x = self.ln2(x)
        ff_out = self.out_proj(F.gelu(self.out_proj(normed_x)))
        return x + ff_out


def stack(
    block: type[UnstableBlock | StableBlock], sequence: int = 10, use_linear: bool = True
) -> tuple[nn.Sequential, torch.Tensor]:
    """The article's test: six blocks of width 64 in eval mode, and its small random input."""
    torch.manual_seed(42)
    model = nn.Sequential(*[block(DIM, use_linear) for _ in range(LAYERS)])
    model.eval()
    return model, torch.randn(1, sequence, DIM) * 0.1


def block_inputs(model: nn.Module, x: torch.Tensor) -> list[Seen]:
    """What goes into each block, by depth: all that the article draws."""
    return [seen for seen in Subject(model, x).plain.seen if is_input(seen, r"\d")]


def contexts(model: nn.Module, x: torch.Tensor) -> list[Seen]:
    """What each block's attention makes, by depth, before a norm that was added to it.

    It is the first of three things that the block gives to its out_proj.
    """
    seen = Subject(model, x).plain.seen
    raw = [one for one in seen if is_input(one, r"\d\.out_proj\.added_input_norm")]
    return raw or [one for one in seen if is_input(one, r"\d\.out_proj")]


def is_input(seen: Seen, layer: str) -> bool:
    """Whether it is what a layer of that name is first called with."""
    first_input = seen.place.side == "input" and seen.place.call == 0
    return first_input and re.fullmatch(layer, seen.layer) is not None
