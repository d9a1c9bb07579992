"""Where gradients explode, vanish or stop to be numbers; units that died."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.checks import gradients
from act_exporter.doctor.finding import NeedsMoreError
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


class Backward(torch.autograd.Function):
    """Nothing forward; a factor backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def disturb(module: nn.Module, factor: float) -> None:
    """What comes back through the module is that many times too large."""
    plain = module.forward
    module.forward = lambda *args, **kwargs: _through(plain(*args, **kwargs), factor)


def _through(output: Any, factor: float) -> Any:
    if isinstance(output, tuple):
        return Backward.apply(output[0], factor), *output[1:]
    return Backward.apply(output, factor)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_at_their_start_and_later_have_no_finding(name: str) -> None:
    model, batch = learner(name)
    assert faults(gradients, Subject(model, batch)) == []
    trained(model, adamw(model), batch, 20)
    assert faults(gradients, Subject(model, batch)) == []


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("llama", "inner.model.layers.1.self_attn"),
        ("gpt2", "inner.transformer.h.0.mlp"),
        ("resnet", "inner.layer2.1.bn1"),
    ],
)
def test_the_module_that_multiplies_gradients_is_named(name: str, layer: str) -> None:
    model, batch = learner(name)
    disturb(model.get_submodule(layer), 1e6)
    [finding] = gradients.check(Subject(model, batch))
    assert finding.fault == "exploding-gradients"
    assert finding.severity == "critical"
    assert finding.layer is not None
    assert finding.layer.startswith(layer)
    assert finding.evidence["jump"] > 1e3


def test_the_weight_whose_gradient_alone_explodes_is_named() -> None:
    model, batch = learner("llama")
    weight = model.get_parameter("inner.model.layers.1.self_attn.k_proj.weight")
    weight.register_hook(lambda gradient: gradient * 1e6)
    [finding] = gradients.check(Subject(model, batch))
    assert (finding.fault, finding.layer) == (
        "exploding-gradients",
        "inner.model.layers.1.self_attn.k_proj",
    )


def test_batch_norms_over_few_elements_are_no_alarm() -> None:
    """They multiply gradients by 10,000 at the start of this one, which trains."""
    torch.manual_seed(0)
    config = transformers.MobileNetV2Config(depth_multiplier=0.25)
    model = transformers.MobileNetV2ForImageClassification(config).train()
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    found = list(gradients.check(Subject(model, batch)))
    assert [finding.severity for finding in found] in ([], ["warning"])


def test_layers_that_multiply_activations_and_gradients_alike_explode() -> None:
    torch.manual_seed(0)
    model = Deep(14, nn.ReLU, gain=4.0)
    [finding] = gradients.check(Subject(model, torch.randn(16, 16)))
    assert (finding.fault, finding.severity) == ("exploding-gradients", "critical")


def test_a_chaotic_chain_explodes() -> None:
    torch.manual_seed(0)
    model = Deep(30, nn.Tanh, gain=6.0)
    [finding] = gradients.check(Subject(model, torch.randn(16, 16)))
    assert finding.fault == "exploding-gradients"
    assert not finding.symptom


def test_saturated_units_let_gradients_vanish() -> None:
    torch.manual_seed(0)
    model = Deep(20, nn.Sigmoid)
    [finding] = gradients.check(Subject(model, torch.randn(16, 16)))
    assert (finding.fault, finding.severity) == ("vanishing-gradients", "critical")
    assert finding.evidence["left"] < 1e-7


def test_a_layer_that_cuts_the_gradient_off_is_seen() -> None:
    torch.manual_seed(0)
    model = Deep(6, nn.ReLU, gain=1.4)
    model.layers[5].register_forward_hook(lambda module, args, output: output.detach())
    model.layers.append(nn.Linear(16, 16))
    found = faults(gradients, Subject(model, torch.randn(64, 16)))
    assert found == ["vanishing-gradients"]


@pytest.mark.parametrize("layer", ["inner.model.layers.0.mlp", "inner.model.layers.1.self_attn"])
def test_the_module_whose_backward_alone_makes_nan_is_named(layer: str) -> None:
    model, batch = learner("llama")
    disturb(model.get_submodule(layer), float("nan"))
    [finding] = gradients.check(Subject(model, batch))
    assert finding.fault == "nonfinite-gradients"
    assert finding.layer is not None
    assert finding.layer.startswith(layer)
    assert not finding.symptom


def test_nan_that_the_forward_made_is_a_symptom() -> None:
    model, batch = learner("llama")
    with torch.no_grad():
        model.get_parameter("inner.model.layers.1.mlp.up_proj.weight")[0, 0] = torch.nan
    [finding] = gradients.check(Subject(model, batch))
    assert finding.symptom
    assert finding.layer == "inner.model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(("share", "severity"), [(1.0, "critical"), (0.8, "warning")])
def test_dead_units_are_told_by_the_layer_before_them(share: float, severity: str) -> None:
    model, batch = learner("mlp")
    batch = {"x": torch.randn(32, 8)}
    layer = model.get_submodule("inner.layers.3")
    with torch.no_grad():
        layer.bias[: int(16 * share)] = -100.0
    found = list(gradients.check(Subject(Learner4(model), batch)))
    assert (found[0].fault, found[0].severity) == ("dead-units", severity)
    assert found[0].layer == "model.inner.layers.3"


class Learner4(nn.Module):
    """With a loss that takes any number of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.get_submodule("inner")(x).square().mean()


def test_without_a_loss_it_says_what_it_needs() -> None:
    with pytest.raises(NeedsMoreError, match="its loss"):
        list(gradients.check(Subject(nn.Linear(2, 2), torch.ones(3, 2))))


def test_everything_is_as_it_was() -> None:
    model, batch = learner("gpt2")
    optimizer = adamw(model)
    trained(model, optimizer, batch, 2)
    model(**batch).backward()

    def train_step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).backward()
        optimizer.step()

    subject = Subject(model, batch, optimizer, train_step=train_step)
    before = state_of(subject)
    list(gradients.check(subject))
    assert_same(before, state_of(subject))
