"""When gradients are clipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from act_exporter.doctor.checks import clipping
from act_exporter.doctor.finding import Finding, NeedsMoreError
from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.learners import adamw, assert_same, learner, state_of


class Trainer:
    """A model with all that trains it; a step is made of the parts that are named."""

    def __init__(self, *parts: str, optimizer: Any = None, limit: float = 0.1) -> None:
        self.model, self.batch = learner("gpt2")
        self.optimizer = optimizer(self.model) if optimizer is not None else adamw(self.model)
        scaled = any(part.startswith("scale") for part in parts)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.parts = parts
        self.limit = limit
        self.loss = torch.zeros(())

    def train_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        for part in self.parts:
            getattr(self, part)(batch)

    def backward(self, batch: dict[str, torch.Tensor]) -> None:
        self.model(**batch).backward()

    def scaled_backward(self, batch: dict[str, torch.Tensor]) -> None:
        self.scaler.scale(self.model(**batch)).backward()  # type: ignore[union-attr]

    def scale_by_hand(self, batch: dict[str, torch.Tensor]) -> None:
        (self.model(**batch) * 1024.0).backward()

    def unscale(self, batch: Any) -> None:
        self.scaler.unscale_(self.optimizer)  # type: ignore[union-attr]

    def unscale_by_hand(self, batch: Any) -> None:
        for parameter in self.model.parameters():
            parameter.grad /= 1024.0  # type: ignore[operator]

    def clip(self, batch: Any) -> None:
        clip_grad_norm_(self.model.parameters(), self.limit)

    def clip_each(self, batch: Any) -> None:
        clip_grad_norm_(self.model.parameters(), self.limit, foreach=False)

    def clip_values(self, batch: Any) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)

    def clip_values_imported(self, batch: Any) -> None:
        clip_grad_value_(self.model.parameters(), 1e-3)

    def clip_by_hand(self, batch: Any) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([own.norm() for own in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, self.limit / float(norm)))

    def clip_by_half(self, batch: Any) -> None:
        clip_grad_norm_(self.model.parameters(), self.limit / 2)

    def cancel(self, batch: Any) -> None:
        """All but the last norm's, as DINO does with its last layer's."""
        for name, parameter in self.model.named_parameters():
            if "ln_f" not in name:
                parameter.grad = None

    def average(self, batch: Any) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def count_tokens(self, batch: Any) -> None:
        dist.all_reduce(torch.ones(1))

    def step(self, batch: Any) -> None:
        self.optimizer.step()

    def scaled_step(self, batch: Any) -> None:
        self.scaler.step(self.optimizer)  # type: ignore[union-attr]
        self.scaler.update()  # type: ignore[union-attr]

    def subject(self) -> Subject:
        return Subject(
            self.model,
            self.batch,
            self.optimizer,
            scaler=self.scaler,
            train_step=self.train_step,
        )

    def findings(self) -> list[Finding]:
        return list(clipping.check(self.subject()))

    def faults(self) -> list[str]:
        return [finding.fault for finding in self.findings()]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "parts",
    [
        ("backward", "clip", "step"),
        ("backward", "clip_each", "step"),
        ("backward", "clip_values", "step"),
        ("backward", "clip_by_hand", "step"),
        ("backward", "backward", "clip", "step"),
        ("scaled_backward", "unscale", "clip", "scaled_step"),
        ("scaled_backward", "unscale", "clip_by_hand", "scaled_step"),
        ("scale_by_hand", "unscale_by_hand", "clip", "step"),
        ("backward", "clip", "cancel", "step"),
        ("backward", "clip", "clip_by_half", "step"),
        ("scaled_backward", "unscale", "clip", "cancel", "scaled_step"),
    ],
    ids="-".join,
)
def test_the_right_order_has_no_finding(parts: tuple[str, ...]) -> None:
    assert Trainer(*parts).faults() == []


@pytest.mark.parametrize(
    "parts",
    [
        ("scaled_backward", "clip", "scaled_step"),
        ("scaled_backward", "clip_each", "scaled_step"),
        ("scaled_backward", "clip", "unscale", "scaled_step"),
        ("scaled_backward", "clip_values", "scaled_step"),
        ("scaled_backward", "clip_values_imported", "scaled_step"),
        ("scaled_backward", "clip_by_hand", "scaled_step"),
        ("scale_by_hand", "clip", "unscale_by_hand", "step"),
        ("scale_by_hand", "clip", "clip_by_half", "unscale_by_hand", "step"),
    ],
    ids="-".join,
)
def test_clipping_with_the_scale_in_the_gradients_is_found(parts: tuple[str, ...]) -> None:
    [finding] = Trainer(*parts).findings()
    assert (finding.fault, finding.severity) == ("clip-before-unscale", "critical")
    assert finding.evidence["scale"] == pytest.approx(1024, rel=0.01)


def test_the_limit_and_the_norm_are_told() -> None:
    [finding] = Trainer("scaled_backward", "clip", "scaled_step").findings()
    assert finding.evidence["max_norm"] == 0.1
    assert finding.evidence["norm"] > 1024


def test_a_fused_optimizer_that_unscales_by_itself_is_known() -> None:
    def fused(model: nn.Module) -> torch.optim.AdamW:
        return adamw(model, fused=True)

    wrong = Trainer("scaled_backward", "clip", "scaled_step", optimizer=fused)
    assert wrong.faults() == ["clip-before-unscale"]
    right = Trainer("scaled_backward", "scaled_step", optimizer=fused)
    assert right.faults() == ["clip-missing"]


def test_a_step_past_the_scaler_is_found() -> None:
    assert "step-before-unscale" in Trainer("scaled_backward", "step").faults()


def test_clipping_after_the_step_is_found() -> None:
    assert Trainer("backward", "step", "clip").faults() == ["clip-after-step"]


@pytest.mark.parametrize("parts", [("backward", "step"), ("scaled_backward", "scaled_step")])
def test_no_clipping_is_only_information(parts: tuple[str, ...]) -> None:
    [finding] = Trainer(*parts).findings()
    assert (finding.fault, finding.severity) == ("clip-missing", "info")
    assert finding.evidence["norm"] == pytest.approx(3.2, abs=0.5)


def test_a_limit_that_only_measures_is_no_clipping() -> None:
    assert Trainer("backward", "clip", "step", limit=1e10).faults() == ["clip-missing"]


@pytest.mark.usefixtures("group")
def test_averaging_over_ranks_after_the_clip_is_found() -> None:
    assert Trainer("backward", "clip", "average", "step").faults() == ["clip-before-sync"]
    assert Trainer("backward", "average", "clip", "step").faults() == []
    assert Trainer("backward", "clip", "count_tokens", "step").faults() == []


@pytest.mark.usefixtures("group")
def test_clipping_what_no_sync_has_left_unaveraged_is_found() -> None:
    trainer = Trainer()
    wrapped = nn.parallel.DistributedDataParallel(trainer.model)

    def train_step(batch: dict[str, torch.Tensor], *, early: bool = True) -> None:
        trainer.optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(**batch).backward()
        if early:
            trainer.clip(batch)
        wrapped(**batch).backward()
        if not early:
            trainer.clip(batch)
        trainer.optimizer.step()

    subject = Subject(wrapped, trainer.batch, trainer.optimizer, train_step=train_step)
    assert [finding.fault for finding in clipping.check(subject)] == ["clip-before-sync"]
    right = Subject(
        wrapped,
        trainer.batch,
        trainer.optimizer,
        train_step=lambda batch: train_step(batch, early=False),
    )
    assert list(clipping.check(right)) == []


@pytest.mark.parametrize("missing", ["train_step", "optimizer"])
def test_what_is_missing_is_said(missing: str) -> None:
    trainer = Trainer("backward", "step")
    subject = Subject(
        trainer.model,
        trainer.batch,
        None if missing == "optimizer" else trainer.optimizer,
        train_step=None if missing == "train_step" else trainer.train_step,
    )
    with pytest.raises(NeedsMoreError, match=missing):
        list(clipping.check(subject))


def test_everything_is_as_it_was() -> None:
    trainer = Trainer("scaled_backward", "unscale", "clip", "scaled_step")
    for _ in range(2):
        trainer.train_step(trainer.batch)
    functions = torch.autograd.backward, nn.utils.clip_grad_value_, torch.amp.GradScaler.unscale_
    before = state_of(trainer.subject())
    assert trainer.findings() == []
    assert_same(before, state_of(trainer.subject()))
    assert functions == (
        torch.autograd.backward,
        nn.utils.clip_grad_value_,
        torch.amp.GradScaler.unscale_,
    )
    trainer.train_step(trainer.batch)  # and goes on


def test_a_step_that_raises_half_way_leaves_the_scaler_as_it_was() -> None:
    trainer = Trainer("scaled_backward", "unscale", "unscale", "scaled_step")
    with pytest.raises(RuntimeError, match="unscale_"):
        trainer.findings()
    trainer.parts = ("scaled_backward", "unscale", "clip", "scaled_step")
    assert trainer.faults() == []
    trainer.train_step(trainer.batch)
