"""Small attentions for the doctor's tests, each with a fault that can be set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 2

Phi = Callable[[torch.Tensor], torch.Tensor]


def elu1(x: torch.Tensor) -> torch.Tensor:
    return F.elu(x) + 1


class LinearAttention(nn.Module):
    """Of Katharopoulos et al. 2020: causal or not, divided by the keys' sum or not."""

    def __init__(
        self,
        feature: Phi = elu1,
        *,
        normalised: bool = True,
        causal: bool = False,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.normalised, self.causal = normalised, causal
        self._of = [feature]  # no attribute that says what it is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = (*x.shape[:-1], HEADS, -1)
        q = self._of[0](self.q_proj(x)).view(cut)
        k = self._of[0](self.k_proj(x)).view(cut)
        v = self.v_proj(x).view(cut)
        kv = torch.einsum("bthd,bthe->bthde", k, v)
        kv = kv.cumsum(1) if self.causal else kv.sum(1, keepdim=True).expand_as(kv)
        context = torch.einsum("bthd,bthde->bthe", q, kv)
        if self.normalised:
            total = k.cumsum(1) if self.causal else k.sum(1, keepdim=True)
            context = context / (q * total).sum(-1, keepdim=True)
        out: torch.Tensor = self.o_proj(self.norm(context.flatten(-2)))
        return out


class SoftmaxAttention(nn.Module):
    """With its three layers, and `how` one of "eager", "sdpa"; logits times `temperature`."""

    def __init__(self, how: str = "eager", temperature: float = 1.0) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.how, self.temperature = how, temperature
        self.logits = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = (*x.shape[:-1], HEADS, -1)
        q, k, v = (p(x).view(cut).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scale = self.temperature * q.shape[-1] ** -0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.logits = (q @ k.transpose(-2, -1) * scale).detach()
        if self.how == "sdpa":
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            logits = (q @ k.transpose(-2, -1) * scale).masked_fill(later, torch.finfo(q.dtype).min)
            context = torch.softmax(logits, -1) @ v
        out: torch.Tensor = self.o_proj(context.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Pre-norm, with a gated feed-forward part."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attn
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        out: torch.Tensor = x + self.down(self.up(h) * F.silu(self.gate(h)))
        return out


class Decoder(nn.Module):
    def __init__(self, attentions: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(map(Block, attentions))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def tokens(length: int = 32) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def decoder(make: Callable[[], nn.Module], layers: int = 3, **others: nn.Module) -> Decoder:
    """Of `layers` attentions; `others` by their index, as in `at_1=...`."""
    torch.manual_seed(0)
    attentions = [make() for _ in range(layers)]
    for name, other in others.items():
        attentions[int(name.removeprefix("at_"))] = other
    return Decoder(attentions)
