"""The run's step from the optimizers' own counts."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from act_exporter.steps import Steps
from tests.act_exporter.models import gpt, train


def watch(model: nn.Module) -> tuple[Steps, list[int]]:
    seen: list[int] = []

    def fail(stage: str, error: Exception) -> None:
        raise AssertionError(stage) from error

    return Steps(model, seen.append, fail), seen


def test_one_optimizer() -> None:
    model = gpt()
    steps, seen = watch(model)
    train(model, 3)
    steps.close()
    train(model, 1)
    assert seen == [1, 2, 3]


def test_two_optimizers_are_one_step_each_time() -> None:
    model = gpt()
    steps, seen = watch(model)
    halves = [
        torch.optim.SGD(model.blocks.parameters(), lr=0.1),
        torch.optim.SGD(model.embed.parameters(), lr=0.2),
    ]
    for _ in range(3):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        for optimizer in halves:
            optimizer.step()
    steps.close()
    assert seen == [1, 2, 3]


def test_an_optimizer_a_parameter_is_one_step_each_time() -> None:
    model = gpt()
    steps, seen = watch(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    for _ in range(2):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    steps.close()
    assert seen == [1, 2]


def test_other_models_do_not_count() -> None:
    steps, seen = watch(gpt())
    other = gpt()
    train(other, 2)
    steps.close()
    assert seen == []


def test_a_parameter_that_joins_late_counts() -> None:
    model = gpt()
    steps, seen = watch(model)
    extra = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(extra.parameters(), lr=0.1)
    optimizer.step()
    model.add_module("extra", extra)
    optimizer.step()
    steps.close()
    assert seen == [1]


def test_an_explicit_step_ends_the_counting() -> None:
    model = gpt()
    steps, seen = watch(model)
    steps.set(40)
    train(model, 2)
    steps.close()
    assert seen == []


def test_a_restored_step_is_counted_on_from() -> None:
    model = gpt()
    steps, seen = watch(model)
    train(model, 2)
    steps.restart(100)
    train(model, 2)
    steps.close()
    assert seen == [1, 2, 101, 102]


def test_sees_the_largest_learning_rate() -> None:
    model = gpt()
    steps, _ = watch(model)
    groups = [
        {"params": model.embed.parameters(), "lr": torch.tensor(0.5)},
        {"params": model.head.parameters()},
    ]
    train(model, 1, torch.optim.SGD(groups, lr=0.25))
    steps.close()
    assert steps.learning_rate == 0.5


def test_a_new_optimizer_goes_on_where_the_old_one_was() -> None:
    model = gpt()
    steps, seen = watch(model)
    train(model, 3)
    train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1))
    steps.close()
    assert seen == [1, 2, 3, 4, 5]  # the first step of the new one may belong to step 3


class Odd(torch.optim.SGD):
    """With what others' optimizers have: no rate on the host, equality without a hash."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0]["lr"] = None

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def step(self) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_without_a_rate_or_a_hash_counts() -> None:
    model = gpt()
    steps, seen = watch(model)
    train(model, 3, Odd(model))
    steps.close()
    assert seen == [1, 2, 3]
    assert steps.learning_rate is None


def test_an_error_does_not_reach_the_optimizer() -> None:
    model = gpt()
    errors: list[str] = []

    def fail(step: int) -> None:
        raise RuntimeError(f"step {step}")

    steps = Steps(model, fail, lambda stage, error: errors.append(f"{stage}: {error}"))
    train(model, 2)
    steps.close()
    assert errors == ["step: step 1", "step: step 2"]


def plain(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.zeros(1, 8, dtype=torch.long)).square().mean().backward()


class Averaging(torch.optim.SGD):
    """Schedule-free's habit: the optimizer has modes and steps by way of its base."""

    def train(self) -> None:
        self.mode = "train"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert self.mode == "train"
        return super().step(closure)


class Wrapper:
    """What accelerate and others do: not an Optimizer, hands the call on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def averaging(model: nn.Module) -> Averaging:
    optimizer = Averaging(model.parameters(), lr=0.1)
    optimizer.train()
    return optimizer


class Both:
    """Two optimizers behind one, each with a part of the model."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "wrapped": lambda model: Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
    "averaging": averaging,
    "muon and adam": lambda model: Both(
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2]),
    ),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_each_call_of_an_optimizer_is_a_step(name: str, before: bool) -> None:
    """Whether it was made before us or after."""
    model = gpt()
    optimizer = MAKERS[name](model) if before else None
    steps, seen = watch(model)
    optimizer = optimizer or MAKERS[name](model)
    for _ in range(3):
        plain(model)()
        optimizer.step()
    steps.close()
    assert seen == [1, 2, 3]


def test_a_closure_that_is_called_often_is_one_step() -> None:
    """LBFGS evaluates the model as often as it likes."""
    model = nn.Linear(2, 1)
    steps, seen = watch(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 2)) - 5).square().mean()
        loss.backward()
        evaluations.append(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    steps.close()
    assert len(evaluations) > 2
    assert seen == [1, 2]


def test_a_step_that_the_scaler_skips_is_none() -> None:
    model = nn.Linear(2, 1)
    steps, seen = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    steps.close()
    assert seen == [1, 2]


def test_a_scheduler_that_patches_step_changes_nothing() -> None:
    model = gpt()
    steps, seen = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        plain(model)()
        optimizer.step()
        scheduler.step()
    steps.close()
    assert seen == [1, 2, 3]
    assert steps.learning_rate == 0.25


def test_an_optimizer_that_is_gone_is_not_another_at_its_address() -> None:
    """Counts go by identity, and identities are given anew."""
    model = gpt()
    steps, seen = watch(model)
    for _ in range(4):
        train(model, 1, torch.optim.SGD(model.parameters(), lr=0.1))
        del model.optimizer
        gc.collect()
    steps.close()
    assert seen == sorted(set(seen))


def test_an_error_that_cannot_be_told_does_not_reach_the_optimizer() -> None:
    model = gpt()

    def fail(*_: object) -> None:
        raise RuntimeError

    steps = Steps(model, fail, fail)
    train(model, 2)
    steps.close()


def test_a_model_that_is_gone_counts_nothing() -> None:
    """We do not keep it alive for that."""
    model = gpt()
    steps, seen = watch(model)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    optimizer.step()
    steps.close()
    assert seen == []
