"""Gradients are clipped as they are, and a step without a finite norm changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from act_exporter.doctor.remedies import clip_gradients

SCALE = 65_536.0


class Training:
    """One weight whose gradient has a norm of 5; SGD of rate 1 takes it off the weight."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = optimizer(self.model.parameters(), lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def backward(self, x: tuple[float, float] = (3.0, 4.0)) -> None:
        loss = self.model(torch.tensor([x])).sum()
        self.scaler.scale(loss).backward()

    def step(self) -> float:
        """How far the weight is after it."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.model.weight.detach().norm().item()


@pytest.mark.parametrize("unscaled", [False, True])
def test_the_gradient_that_is_clipped_is_unscaled(unscaled):
    """Whether the loop has unscaled it or not: of 5, 1 is left."""
    training = Training()
    training.backward()
    if unscaled:
        training.scaler.unscale_(training.optimizer)
    norm = clip_gradients(training.optimizer, 1.0, training.scaler)
    assert norm.item() == pytest.approx(5.0)
    assert training.step() == pytest.approx(1.0)


def test_clipping_before_unscaling_leaves_next_to_nothing():
    """The fault that it mends: the update is 65,536 times too small."""
    training = Training()
    training.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    assert training.step() == pytest.approx(1.0 / SCALE, rel=1e-3)


def test_small_gradients_stay_as_they_are():
    training = Training()
    training.backward((0.3, 0.4))
    assert clip_gradients(training.optimizer, 1.0, training.scaler).item() == pytest.approx(0.5)
    assert training.step() == pytest.approx(0.5)


def test_without_a_scaler_it_clips_what_is_there():
    training = Training()
    training.model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert clip_gradients(training.optimizer, 1.0).item() == pytest.approx(5.0)
    training.optimizer.step()
    assert training.model.weight.detach().norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_changes_no_weight(bad):
    """Adam's moments stay too: with gradients of 0 it would go on by its momentum."""
    training = Training(torch.optim.Adam)
    for x in ((3.0, 4.0), (bad, 4.0)):
        before = training.model.weight.detach().clone()
        training.model(torch.tensor([x])).sum().backward()
        norm = clip_gradients(training.optimizer, 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert not norm.isfinite()
    assert torch.equal(training.model.weight, before)
    assert training.model.weight.abs().max() > 0


def test_a_scaler_still_lowers_its_scale_after_an_overflow():
    training = Training()
    training.backward((float("inf"), 4.0))
    clip_gradients(training.optimizer, 1.0, training.scaler)
    assert training.step() == 0
    assert training.scaler.get_scale() == SCALE / 2


def test_clipping_after_the_step_is_refused():
    training = Training()
    training.backward()
    training.scaler.step(training.optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        clip_gradients(training.optimizer, 1.0, training.scaler)


def test_gradients_that_are_spread_over_ranks_have_one_norm():
    """FSDP2's; here of one rank, which holds all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training = Training()
        fully_shard(training.model, mesh=init_device_mesh("cpu", (1,)))
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
        for x, weight in (((3.0, 4.0), 1.0), ((float("nan"), 1.0), 1.0)):
            training.model(torch.tensor([x])).sum().backward()
            norm = clip_gradients(training.optimizer, 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
            assert type(norm) is torch.Tensor
            assert training.model.weight.full_tensor().norm().item() == pytest.approx(weight)
    finally:
        dist.destroy_process_group()
