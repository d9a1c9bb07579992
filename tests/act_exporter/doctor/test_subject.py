"""What is inside `kept()` is undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
