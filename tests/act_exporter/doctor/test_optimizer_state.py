"""What the optimizer remembers, is told, and has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.checks import optimizer_state
from act_exporter.doctor.finding import Finding, NeedsMoreError
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.doctor.learners import (
    Deep,
    adamw,
    assert_same,
    faults,
    learner,
    state_of,
    trained,
)

HEALTHY = [name for name in ARCHITECTURES if name != "unstable"]
LAYER = "inner.model.layers.1.mlp.up_proj"


class Trainer:
    """A model some steps into its training."""

    def __init__(self, name: str = "llama", steps: int = 20, **options: Any) -> None:
        self.model, self.batch = learner(name)
        self.optimizer = adamw(self.model, **options)
        self.scheduler: Any = None
        for _ in range(steps):
            self.train_step(self.batch)

    def train_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        self.model(**batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def moments(self, layer: str = LAYER) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.optimizer.state[
            self.model.get_parameter(f"{layer}.weight")
        ]
        return state

    def subject(self, *, whole: bool = True) -> Subject:
        step = self.train_step if whole else None
        return Subject(self.model, self.batch, self.optimizer, self.scheduler, train_step=step)

    def findings(self, *, whole: bool = True) -> list[Finding]:
        return list(optimizer_state.check(self.subject(whole=whole)))


@pytest.mark.parametrize("whole", [True, False], ids=["with its step", "without"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_optimizer_has_no_finding(name: str, whole: bool) -> None:
    assert Trainer(name).findings(whole=whole) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.SGD(own, lr=0.01, momentum=0.9),
        lambda own: torch.optim.RMSprop(own, lr=1e-3),
        lambda own: torch.optim.Adagrad(own, lr=1e-2),
        lambda own: torch.optim.Adam(own, lr=1e-3, amsgrad=True),
        lambda own: torch.optim.Adafactor(own, lr=1e-3),
    ],
)
def test_other_optimizers_are_read_too(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    trainer = Trainer(steps=0)
    trainer.optimizer = make(trainer.model.parameters())  # type: ignore[assignment]
    for _ in range(10):
        trainer.train_step(trainer.batch)
    assert trainer.findings() == []
    key = next(key for key, value in trainer.moments().items() if value.ndim)
    trainer.moments()[key].view(-1)[3] = torch.nan
    [finding] = trainer.findings()
    assert (finding.fault, finding.layer) == ("nonfinite-moments", LAYER)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_impossible_values_are_found(value: float) -> None:
    trainer = Trainer()
    trainer.moments()["exp_avg_sq"][0, 0] = value
    [finding] = trainer.findings()
    assert (finding.fault, finding.severity, finding.layer) == (
        "nonfinite-moments",
        "critical",
        LAYER,
    )


@pytest.mark.parametrize("whole", [True, False], ids=["with its step", "without"])
@pytest.mark.parametrize(
    ("key", "factor", "severity"), [("exp_avg", 1e5, "critical"), ("exp_avg_sq", 1e10, "warning")]
)
def test_moments_far_above_the_gradients_are_found(
    key: str, factor: float, severity: str, whole: bool
) -> None:
    trainer = Trainer()
    trainer.moments()[key].mul_(factor)
    [finding] = trainer.findings(whole=whole)
    assert (finding.fault, finding.severity, finding.layer) == ("large-moments", severity, LAYER)


class KeyBias(nn.Module):
    """A pre-norm block whose softmax does not see the bias of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.norm(x)
        seen = (self.query(own) @ self.key(own).mT / 32**0.5).softmax(-1) @ self.value(own)
        return F.cross_entropy(self.head(x + seen).flatten(0, 1).float(), torch.arange(32) % 8)


def test_a_gradient_that_is_nothing_but_rounding_is_no_measure() -> None:
    torch.manual_seed(0)
    model, batch = KeyBias(), {"x": torch.randn(4, 8, 32)}
    optimizer = adamw(model)
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
    assert faults(optimizer_state, Subject(model, batch, optimizer)) == []


def test_a_batch_that_is_learnt_by_heart_is_no_fault() -> None:
    torch.manual_seed(0)
    model, batch = Deep(2, nn.ReLU), {"x": torch.randn(4, 16)}
    optimizer = adamw(model, 1e-2)
    trained(model, optimizer, batch, 100)
    assert model(**batch).item() < 1e-3
    assert faults(optimizer_state, Subject(model, batch, optimizer)) == []


@pytest.mark.parametrize("whole", [True, False], ids=["with its step", "without"])
def test_a_second_moment_that_knows_nothing_of_the_gradients_is_found(whole: bool) -> None:
    trainer = Trainer()
    trainer.moments()["exp_avg_sq"].mul_(1e-6)
    [finding] = trainer.findings(whole=whole)
    assert (finding.fault, finding.severity, finding.layer) == ("stale-moments", "warning", LAYER)


def test_gradients_that_have_grown_everywhere_are_found_with_the_training_step() -> None:
    trainer = Trainer()
    for state in trainer.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-4)
        state["exp_avg"].mul_(1e-2)
    assert [finding.fault for finding in trainer.findings()] == ["stale-moments"]
    # Clipping, which is not seen without the step, would look alike.
    assert trainer.findings(whole=False) == []


def test_a_step_counter_that_was_not_saved_is_found() -> None:
    trainer = Trainer(betas=(0.9, 0.95))
    for state in trainer.optimizer.state.values():
        state["step"].zero_()
    assert [finding.fault for finding in trainer.findings()] == ["lost-step"]


@pytest.mark.parametrize(("epsilon", "severity"), [(3e-3, "warning"), (10.0, "critical")])
@pytest.mark.parametrize("steps", [0, 20])
def test_an_epsilon_above_the_gradients_is_found(epsilon: float, severity: str, steps: int) -> None:
    trainer = Trainer(steps=steps, eps=epsilon)
    findings: list[Finding] = []
    try:
        findings += optimizer_state.check(trainer.subject())
    except NeedsMoreError:
        assert steps == 0
    assert [(finding.fault, finding.severity) for finding in findings] == [("epsilon", severity)]


def test_an_epsilon_that_float16_does_not_know_is_found() -> None:
    model, batch = learner("llama")
    optimizer = adamw(model.half())
    findings: list[Finding] = []
    with pytest.raises(NeedsMoreError, match="has stepped"):
        findings += optimizer_state.check(Subject(model, batch, optimizer))
    assert [(own.fault, own.severity) for own in findings] == [("epsilon", "critical")]


@pytest.mark.parametrize(("kept", "severity"), [(0.9, "warning"), (0.1, "critical"), (0.0, None)])
def test_parameters_that_no_group_has_are_found(kept: float, severity: str | None) -> None:
    trainer = Trainer(steps=0)
    own = list(trainer.model.parameters())
    held = own[: int(len(own) * kept)] or list(learner("llama")[0].parameters())
    trainer.optimizer = torch.optim.AdamW(held)
    with pytest.raises(NeedsMoreError):
        list(optimizer_state.check(trainer.subject()))
    first = next(optimizer_state.check(trainer.subject()))
    assert first.fault == "parameters-left-out"
    assert first.severity == (severity or "critical")


def test_copies_in_another_precision_stand_for_the_parameters() -> None:
    model, batch = learner("mlp")
    copies = [own.detach().double().requires_grad_() for own in model.parameters()]
    optimizer = torch.optim.AdamW(copies)
    with pytest.raises(NeedsMoreError, match="has stepped"):
        next(optimizer_state.check(Subject(model, batch, optimizer)))


def test_frozen_parameters_are_not_missed() -> None:
    trainer = Trainer()
    trainer.model.get_parameter(f"{LAYER}.weight").requires_grad_(False)
    held = [own for own in trainer.model.parameters() if own.requires_grad]
    trainer.optimizer = torch.optim.AdamW(held)
    trainer.train_step(trainer.batch)
    assert trainer.findings() == []


def test_a_rate_of_zero_is_found_unless_the_schedule_begins_with_it() -> None:
    trainer = Trainer(rate=0.0)
    [finding] = trainer.findings()
    assert (finding.fault, finding.severity) == ("learning-rate-zero", "critical")

    trainer = Trainer()
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: min(1.0, step / 100)
    )
    assert trainer.findings() == []


def test_without_an_optimizer_it_says_so() -> None:
    model, batch = learner("mlp")
    with pytest.raises(NeedsMoreError, match="an optimizer"):
        faults(optimizer_state, Subject(model, batch))


def test_everything_is_as_it_was() -> None:
    trainer = Trainer()
    before = state_of(trainer.subject())
    trainer.findings()
    assert_same(before, state_of(trainer.subject()))
