"""The run's step from the optimizers' own counts."""

from __future__ import annotations

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
