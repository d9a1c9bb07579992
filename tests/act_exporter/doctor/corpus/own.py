"""Models written out here: a GPT whose parts can be exchanged, and nets that are no transformer.

All return their loss as "loss", beside "logits".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Part = Callable[[int], nn.Module]
"""Makes a part of a block of that width."""

Map = Callable[[torch.Tensor], torch.Tensor]


def with_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What the models return: cross entropy, with -100 for what does not count."""
    if labels is None:
        return {"logits": logits}
    return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


class RMSNorm(nn.Module):
    """In the dtype of its input, as many codebases have it: transformers' own goes to fp32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal softmax attention, by torch's own function or written out."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Attention without softmax: Katharopoulos et al. 2020 where it is normalised."""

    def __init__(self, width: int, heads: int, phi: Map, normalised: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.phi, self.normalised, self.causal = heads, phi, normalised, causal
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.phi(q) @ self.phi(k).transpose(-2, -1)
        if self.causal:
            weights = weights.tril()
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, act: Map) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class GatedFeedForward(nn.Module):
    """Shazeer 2020, with any function on the gate."""

    def __init__(self, width: int, inner: int, act: Map) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Experts of which the router takes two a token."""

    def __init__(self, width: int, experts: int, expert: Part) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(expert(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], len(self.experts))
        shares = shares / shares.sum(-1, keepdim=True)
        weights = weights.scatter(-1, chosen, shares.to(weights.dtype))  # float32 under autocast
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, width: int, attention: Part, forward: Part, norm: Part, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.norm1, self.attn = norm(width), attention(width)
        self.norm2, self.mlp = norm(width), forward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class GPT(nn.Module):
    """Learned positions; a final norm where the blocks' norms come before their parts.

    Args:
        blocks: one function a block, which makes it.
        embed_scale: what embeddings are multiplied with, as Gemma's are with sqrt(width).
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        blocks: list[Callable[[], Block]],
        norm: Part,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.embed_scale = embed_scale
        self.blocks = nn.ModuleList(make() for make in blocks)
        self.norm = norm(width) if self.blocks[0].pre else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        x = x * self.embed_scale
        for block in self.blocks:
            x = block(x)
        return with_loss(self.head(self.norm(x)), labels)


class Encoder(nn.Module):
    """torch's own encoder, which never calls its attention's out_proj."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, pre: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, batch_first=True, norm_first=pre
        )
        norm = nn.LayerNorm(width) if pre else None
        self.encoder = nn.TransformerEncoder(layer, blocks, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return with_loss(self.head(self.encoder(self.embed(input_ids))), labels)


class MLP(nn.Module):
    """Linear, norm where one is given, activation, over and over."""

    def __init__(
        self, inputs: int, width: int, depth: int, classes: int, act: type, norm: Part | None
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for index in range(depth):
            self.layers.append(nn.Linear(width if index else inputs, width))
            if norm is not None:
                self.layers.append(norm(width))
            self.layers.append(act())
        self.head = nn.Linear(width, classes)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return with_loss(self.head(self.layers(x)), labels)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, norm: Part) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class CNN(nn.Module):
    """A residual net on small pictures."""

    def __init__(self, channels: int, blocks: int, classes: int, norm: Part) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = norm(channels)
        self.blocks = nn.Sequential(*(ResidualBlock(channels, norm) for _ in range(blocks)))
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return with_loss(self.fc(x.mean((-2, -1))), labels)


class Recurrent(nn.Module):
    """A plain recurrent net, without gates: its gradient is a product of as many matrices as steps.

    Pascanu et al. 2013, arXiv:1211.5063.
    """

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.inward = nn.Linear(inputs, width)
        self.onward = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, classes)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        state = x.new_zeros(len(x), self.onward.in_features)
        for inward in self.inward(x).unbind(1):
            state = torch.tanh(inward + self.onward(state))
        return with_loss(self.head(state), labels)
