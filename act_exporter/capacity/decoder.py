"""The model that is counted: a decoder of so many blocks, as small as can be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

_WIDTH = 8  # names and numbers of tensors do not depend on it


class Attention(nn.Module):
    """With query, key, value and output in modules of their own, so that all is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_WIDTH, _WIDTH)
        self.k_proj = nn.Linear(_WIDTH, _WIDTH)
        self.v_proj = nn.Linear(_WIDTH, _WIDTH)
        self.o_proj = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out: torch.Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class FeedForward(nn.Module):
    """With a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_WIDTH, _WIDTH)
        self.up_proj = nn.Linear(_WIDTH, _WIDTH)
        self.down_proj = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(_WIDTH)
        self.mlp = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WIDTH, _WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
