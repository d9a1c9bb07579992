"""Whether the rate is too high, and how the schedule gets there."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from act_exporter.doctor.checks import learning_rate
from act_exporter.doctor.finding import Finding, NeedsMoreError
from act_exporter.doctor.schedule import ahead
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.doctor.learners import (
    adamw,
    assert_same,
    faults,
    learner,
    state_of,
    trained,
)

HEALTHY = [name for name in ARCHITECTURES if name != "unstable"]


def warmup(optimizer: torch.optim.Optimizer, steps: int = 1000) -> Any:
    return transformers.get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)


def by(rate: Any) -> Any:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, rate)


def found(name: str, rate: float, schedule: Any = warmup, **options: Any) -> list[Finding]:
    model, batch = learner(name)
    optimizer = adamw(model, rate, **options)
    return list(learning_rate.check(Subject(model, batch, optimizer, schedule(optimizer))))


@pytest.mark.parametrize("name", HEALTHY)
def test_usual_rates_have_no_finding(name: str) -> None:
    assert found(name, 1e-3) == []


def test_a_convolutional_net_with_momentum_has_no_finding() -> None:
    model, batch = learner("resnet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr_scheduler.StepLR(optimizer, 30)
    assert faults(learning_rate, Subject(model, batch, optimizer, schedule)) == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "encoder", "resnet", "mlp"])
def test_a_rate_that_raises_the_loss_is_found_and_what_mends_it(name: str) -> None:
    findings = found(name, 3.0)
    assert (findings[0].fault, findings[0].severity) == ("learning-rate-too-high", "critical")
    assert findings[0].evidence["mended_at"] < 1.0  # type: ignore[operator]
    assert findings[0].evidence["update_share"] > 1.0  # type: ignore[operator]


def test_the_training_step_is_used_where_there_is_one() -> None:
    """Its clipping is what keeps this rate from being too high."""
    model, batch = learner("stable")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    schedule = by(lambda step: 1.0)(optimizer)

    def train_step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert faults(learning_rate, Subject(model, batch, optimizer, schedule)) != []
    clipped = Subject(model, batch, optimizer, schedule, train_step=train_step)
    assert faults(learning_rate, clipped) == []


def test_a_loss_that_no_training_step_scales_is_taken_as_it_is() -> None:
    model, batch = learner("gpt2")
    optimizer = adamw(model, 3.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65_536.0)
    subject = Subject(model, batch, optimizer, warmup(optimizer), scaler)
    [finding] = list(learning_rate.check(subject))
    assert finding.evidence["loss_before"] == pytest.approx(model(**batch).item(), rel=0.1)


def test_a_loss_that_no_rate_lowers_is_not_the_rates_fault() -> None:
    model, batch = learner("gpt2")
    original = model.loss
    calls = iter(range(10_000))
    model.loss = lambda output: original(output) * 0 + 2.0 ** next(calls)
    optimizer = adamw(model, 3.0)
    subject = Subject(model, batch, optimizer, warmup(optimizer))
    assert "learning-rate-too-high" not in faults(learning_rate, subject)


def test_a_rate_far_above_what_the_size_is_trained_with_is_a_warning() -> None:
    findings = found("gpt2", 0.03)
    assert (findings[0].fault, findings[0].severity) == ("learning-rate-too-high", "warning")
    assert findings[0].evidence["usual_for_size"] == pytest.approx(2e-3, rel=0.2)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1000),
        by(lambda step: 1.0),
        lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 0, 1000),
        lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 1, 10_000),
    ],
    ids=["cosine", "constant", "none", "one step"],
)
def test_a_peak_from_the_first_step_on_is_a_warning(schedule: Any) -> None:
    [finding] = found("gpt2", 1e-3, schedule)
    assert (finding.fault, finding.severity) == ("no-warmup", "warning")


@pytest.mark.parametrize(
    "schedule",
    [
        warmup,
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=500),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100),
                lr_scheduler.CosineAnnealingLR(optimizer, 900),
            ],
            [100],
        ),
        lambda optimizer: transformers.get_wsd_schedule(
            optimizer, 100, 200, num_training_steps=900
        ),
        by(lambda step: min(1.0, (step + 1) / 300)),
    ],
    ids=["cosine", "one cycle", "sequence", "stable and decay", "own"],
)
def test_a_warmup_and_what_follows_have_no_finding(schedule: Any) -> None:
    assert found("gpt2", 1e-3, schedule) == []


def test_an_optimizer_that_has_stepped_is_past_its_warmup() -> None:
    model, batch = learner("gpt2")
    optimizer = adamw(model)
    trained(model, optimizer, batch, 3)
    schedule = by(lambda step: 1.0)(optimizer)
    assert faults(learning_rate, Subject(model, batch, optimizer, schedule)) == []


@pytest.mark.parametrize(
    ("schedule", "severity", "step"),
    [
        (by(lambda step: min(1.0, (step + 1) / 100) * (20 if step >= 400 else 1)), "critical", 400),
        (by(lambda step: 0.0 if step < 100 else 1.0), "critical", 100),
        (by(lambda step: min(1.0, (step + 1) / 100) * (3 if step >= 400 else 1)), "warning", 400),
        (
            lambda optimizer: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(
                optimizer, 100, 1000, num_cycles=3
            ),
            "warning",
            400,
        ),
    ],
    ids=["twenty times", "frozen at first", "three times", "restarts"],
)
def test_a_rate_that_jumps_up_is_found(schedule: Any, severity: str, step: int) -> None:
    finding = found("gpt2", 1e-4, schedule)[-1]
    assert (finding.fault, finding.severity) == ("learning-rate-jump", severity)
    assert finding.evidence["step"] == pytest.approx(step, abs=1)


def test_falling_in_steps_is_no_jump() -> None:
    findings = found("resnet", 1e-3, lambda own: lr_scheduler.MultiStepLR(own, [30, 60], 0.1))
    assert "learning-rate-jump" not in [finding.fault for finding in findings]


def test_rates_are_those_that_the_scheduler_sets() -> None:
    model, _ = learner("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    seen = ahead(schedule)
    expected = [0.5 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert [rate * seen.peaks[0] for rate in seen.rates] == pytest.approx(expected)
    assert seen.total == 10


def test_without_a_scheduler_the_rate_is_tried_and_the_rest_is_said() -> None:
    model, batch = learner("gpt2")
    findings: list[Finding] = []
    with pytest.raises(NeedsMoreError, match="a scheduler"):
        findings += learning_rate.check(Subject(model, batch, adamw(model, 3.0)))
    assert [finding.fault for finding in findings] == ["learning-rate-too-high"]


@pytest.mark.parametrize("rate", [1e-3, 3.0])
def test_everything_is_as_it_was(rate: float) -> None:
    model, batch = learner("resnet")
    optimizer = adamw(model, rate)
    trained(model, optimizer, batch, 2)
    schedule = warmup(optimizer)
    subject = Subject(model, batch, optimizer, schedule)
    before, own = state_of(subject), copy.deepcopy(schedule.state_dict())
    list(learning_rate.check(subject))
    assert_same(before, state_of(subject))
    assert schedule.state_dict() == own
    assert schedule.optimizer is optimizer
