"""Small models that return their loss, and what trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.subject import Batch, Subject
from tests.act_exporter.architectures import ARCHITECTURES, VOCABULARY


class Learner(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, inner: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.loss = loss

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(**batch))


def learner(name: str = "gpt2") -> tuple[Learner, dict[str, torch.Tensor]]:
    """One of the architectures, healthy, with its batch."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    classifies = name in ("encoder", "mlp", "resnet")  # all as one class, which biases learn alone
    model = Learner(architecture.build(), _classes if classifies else architecture.loss)
    return model, architecture.batch()


def _classes(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1])


def text(rows: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def adamw(model: nn.Module, rate: float = 1e-3, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rate, **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> None:
    """So many plain steps."""
    for _ in range(steps):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class Deep(nn.Module):
    """A chain of layers of one width, and the loss of a small classification."""

    def __init__(self, depth: int, activation: Callable[[], nn.Module], gain: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layer = nn.Linear(16, 16)
            nn.init.normal_(layer.weight, std=gain / 4)
            layers += [layer, activation()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), torch.arange(len(x)) % 4)


def faults(check: Any, subject: Subject) -> list[str]:
    """What a check names, in its order."""
    return [finding.fault for finding in check.check(subject)]


def state_of(subject: Subject) -> list[torch.Tensor | float]:
    """All numbers that an examination must leave as they are."""
    found: list[torch.Tensor | float] = [
        own.detach().clone() for own in subject.model.state_dict().values()
    ]
    found += [p.grad.clone() for p in subject.model.parameters() if p.grad is not None]
    for own in (subject.optimizer, subject.scheduler, subject.scaler):
        if own is not None:
            found += _numbers(own.state_dict())
    return [*found, torch.get_rng_state()]


def _numbers(value: Any) -> list[torch.Tensor | float]:
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for inside in value for number in _numbers(inside)]
    return [value] if isinstance(value, int | float) else []


def assert_same(before: list[torch.Tensor | float], after: list[torch.Tensor | float]) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))
