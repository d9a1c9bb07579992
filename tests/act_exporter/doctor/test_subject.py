"""What is inside `kept()` is undone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.learners import adamw, assert_same, learner, state_of, trained


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_inside_is_undone(steps: int) -> None:
    model, batch = learner("resnet")
    optimizer = adamw(model)
    trained(model, optimizer, batch, steps)
    model(**batch).backward()
    subject = Subject(model, batch, optimizer)
    before = state_of(subject)
    group = optimizer.param_groups[0]
    with subject.kept():
        trained(model, optimizer, batch, 3)
        group["lr"] = 7.0
        model.eval()
    assert_same(before, state_of(subject))
    assert optimizer.param_groups[0] is group
    assert model.training


def test_moments_stay_in_their_own_precision() -> None:
    """`load_state_dict` would round these to bfloat16."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = adamw(model)
    moment = torch.rand(4, 4)
    optimizer.state[model.weight] = {"exp_avg": moment}
    value = moment.clone()
    with Subject(model, torch.ones(1, 4), optimizer).kept():
        moment.mul_(2)
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, value)


def test_it_is_undone_where_a_step_raises() -> None:
    model, batch = learner("mlp")
    optimizer = adamw(model)
    subject = Subject(model, batch, optimizer)
    before = state_of(subject)

    def failing_step() -> None:
        with subject.kept(), subject.seeded():
            trained(model, optimizer, batch, 1)
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk"):
        failing_step()
    assert_same(before, state_of(subject))


def test_batches_are_read_once_and_not_for_ever() -> None:
    read: list[int] = []

    def endless() -> object:
        while True:
            read.append(1)
            yield torch.ones(1)

    subject = Subject(nn.Linear(1, 1), torch.ones(1), batches=endless())  # type: ignore[arg-type]
    assert len(subject.more_batches) == len(subject.more_batches) == 64 == len(read)


def test_no_hook_stays_on_a_parameter_that_is_a_modules_input() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(3, 4))
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.latents) @ x).square().mean()

    model = Latents()
    assert Subject(model, torch.randn(4, 2)).step.flow
    assert not model.latents._backward_hooks


def test_parameters_that_only_the_optimizer_has_are_put_back() -> None:
    model = nn.Linear(2, 2)
    weight = nn.Parameter(torch.ones(()))  # of the loss
    weight.grad = mine = torch.ones(())
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=1.0)

    def train_step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * model(batch).sum()).backward()
        optimizer.step()

    assert Subject(model, torch.ones(1, 2), optimizer, train_step=train_step).step.used
    assert weight.item() == 1
    assert weight.grad is mine
    assert mine.item() == 1


def test_a_buffer_that_is_assigned_anew_is_put_back() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x - self.mean

    model = Average()
    buffer = model.mean
    assert Subject(model, torch.ones(1, 2)).plain.error is None
    assert model.mean is buffer
    assert not buffer.any()


def test_weights_that_a_forward_changes_are_put_back() -> None:
    model = nn.Embedding(4, 4, max_norm=0.1)
    before = model.weight.detach().clone()
    assert Subject(model, torch.tensor([1, 2])).plain.error is None
    assert torch.equal(model.weight, before)


def test_what_a_step_freezes_is_put_back() -> None:
    model = nn.Linear(2, 2)
    with Subject(model, torch.ones(1, 2)).kept():
        model.weight.requires_grad_(False)
    assert model.weight.requires_grad


def test_random_numbers_go_on_as_if_nobody_had_looked() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(()) + random.random() + np.random.rand()

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    loader = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    subject = Subject(Noisy(), torch.ones(1), batches=loader)
    assert torch.equal(subject.trace().output, subject.trace().output)
    assert len(subject.more_batches) == 4
    assert drawn() == expected


def test_a_loader_that_streams_is_read() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(3, 1))

    loader = DataLoader(Stream(), batch_size=1)
    assert len(Subject(nn.Linear(1, 1), torch.ones(1), batches=loader).more_batches) == 3
