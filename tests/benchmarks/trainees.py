"""The small models that the benchmark trains, and how: one function a kind, from seeds alone.

All are the demo's GPT (4 blocks, width 32, context 32) on the text of the standard library, or that
with one part exchanged where a fault needs another: query and key of their own, linear attention,
a mixture of experts, a soft cap on the logits.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from deploy.demo.text import BYTES, read_text
from deploy.demo.train import GPT, MLP, Attention, Block

BLOCKS, WIDTH, HEADS, CONTEXT, BATCH = 4, 32, 4, 32, 8
RATE = 1e-3
SOFT_CAP = 30.0

Schedule = Callable[[int], float]


class SplitAttention(nn.Module):
    """Causal self-attention whose query and key have modules of their own, softmax written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = logits.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class LinearAttention(Attention):
    """Causal linear attention: elu + 1 with a normaliser, or exp without one (the seed's fault)."""

    unbounded = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        feature = torch.exp if self.unbounded else (lambda t: F.elu(t) + 1)
        weights = (feature(q) @ feature(k).transpose(-2, -1)).tril()
        if not self.unbounded:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Four experts, all of them run, weighted by a router's softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(MLP(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class DropoutBlock(Block):
    """The demo's block with dropout after both parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.norm1(x)), 0.1, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class CappedGPT(GPT):
    """The demo's GPT with a soft cap on the logits, inside the head, where a tap sees it."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__(layers, width, heads, context)
        self.head = CappedHead(width, BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)


class CappedHead(nn.Linear):
    cap: float | None = SOFT_CAP

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def plain() -> GPT:
    return GPT(BLOCKS, WIDTH, HEADS, CONTEXT)


def capped() -> GPT:
    return CappedGPT(BLOCKS, WIDTH, HEADS, CONTEXT)


def split() -> GPT:
    return _with_parts("attn", lambda: SplitAttention(WIDTH, HEADS))


def linear() -> GPT:
    return _with_parts("attn", lambda: LinearAttention(WIDTH, HEADS))


def unbounded() -> GPT:
    """Linear attention with exp from the first step on, as the seed's unstable block has it."""
    model = linear()
    for block in model.blocks:
        block.attn.unbounded = True
    return model


def mixture() -> GPT:
    return _with_parts("mlp", lambda: Mixture(WIDTH))


def dropout() -> GPT:
    model = plain()
    for block in model.blocks:
        block.__class__ = DropoutBlock
    return model


def zeroed() -> GPT:
    """Zero-initialised output projections and head, as muP and several codebases begin."""
    model = plain()
    for block in model.blocks:
        for part in (block.attn.proj, block.mlp.down):
            nn.init.zeros_(part.weight)
    nn.init.zeros_(model.head.weight)
    return model


def massive() -> GPT:
    """One channel of the first position at 400 from the start.

    Such "massive activations", a few elements above 100 and above a thousand times the median,
    at fixed places, belong to healthy models: Sun et al. 2024, arXiv:2402.17762.
    """
    model = plain()
    with torch.no_grad():
        model.position[0, 5] = 400
    return model


def _with_parts(name: str, build: Callable[[], nn.Module]) -> GPT:
    model = plain()
    for block in model.blocks:
        part = build()
        setattr(block, name, part)
        for module in part.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
    return model


def constant(warmup: int = 50) -> Schedule:
    return lambda done: min((done + 1) / warmup, 1.0)


def cosine(total: int, warmup: int = 50) -> Schedule:
    """Down to a tenth."""

    def factor(done: int) -> float:
        return min((done + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(done / total, 1)))

    return factor


def batches(seed: int) -> Iterator[torch.Tensor]:
    """(batch, context + 1) tokens of random places in the text, without end."""
    text = read_text(Path(sysconfig.get_path("stdlib")), limit=1_000_000)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])


class Training:
    """A model in training; faults reach in through its attributes.

    Attributes:
        model: the model.
        optimizer: AdamW.
        clip: largest gradient norm, or None for no clipping.
        rate_factor: on the schedule's learning rate.
        loss_factor: on the loss, for backward only.
        on_batch: changes a batch; called with it and the step since the fault began, from 1 on.
        after_step: called after each step with the same number.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, seed: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
        self.clip: float | None = 1.0
        self.rate_factor = 1.0
        self.loss_factor = 1.0
        self.on_batch: Callable[[torch.Tensor, int], torch.Tensor] = lambda tokens, _: tokens
        self.after_step: Callable[[int], None] = lambda _: None
        self.done = 0
        self.fault_after: int | None = None
        self._schedule = schedule
        self._batches = batches(seed)

    @property
    def faulty_steps(self) -> int:
        """The step under way, counted from the fault's beginning; 0 before it."""
        return 0 if self.fault_after is None else self.done + 1 - self.fault_after

    def step(self, before_update: Callable[[torch.Tensor], None]) -> float:
        """One step; returns its loss.

        Args:
            before_update: called with the loss after backward, before clipping and update.
        """
        tokens = self.on_batch(next(self._batches), self.faulty_steps)
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss * self.loss_factor).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        before_update(loss.detach())
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * self._schedule(self.done) * self.rate_factor
        number = self.faulty_steps
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step(number)
        self.done += 1
        return float(loss.detach())
