"""Odd weights are found among their like, and healthy models of all kinds have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from act_exporter.doctor.checks.initialisation import check
from act_exporter.doctor.finding import SEVERITIES, Finding
from act_exporter.doctor.matrices import matrices
from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.stacks import HEALTHY, Stack, gpt2, healthy, only, vectors


def findings(model: nn.Module, batch: object) -> list[Finding]:
    return list(check(Subject(model, batch)))


def scale(weight: torch.Tensor, factor: float) -> None:
    with torch.no_grad():
        weight.mul_(factor)


@pytest.mark.parametrize("name", [*HEALTHY, "unstable"])
def test_healthy_models_have_information_only(name: str) -> None:
    assert [f for f in findings(*healthy(name)) if f.severity != "info"] == []


@pytest.mark.parametrize("place", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_a_matrix_a_hundred_times_its_like_is_named_and_critical(place: str) -> None:
    model, batch = gpt2()
    scale(model.get_parameter(f"transformer.h.2.{place}.weight"), 100)
    found = only(findings(model, batch), "odd-weight")
    assert (found.severity, found.layer) == ("critical", f"transformer.h.2.{place}")
    assert found.evidence["times_its_like"] == pytest.approx(100, rel=0.1)
    assert found.evidence["other_matrices"] == 0
    depth = 8**-0.5 if place.endswith("c_proj") else 1
    asked = float(found.change.split("std ")[1].split(",")[0])
    assert asked == pytest.approx(0.02 * depth, rel=0.1)


def test_of_two_blocks_the_loud_one_is_named() -> None:
    model, batch = gpt2(layers=2)
    scale(model.get_parameter("transformer.h.0.mlp.c_fc.weight"), 50)
    assert only(findings(model, batch), "odd-weight").layer == "transformer.h.0.mlp.c_fc"


def test_all_matrices_of_one_kind_are_odd_beside_the_other_kinds() -> None:
    model, batch = gpt2()
    for block in range(4):
        scale(model.get_parameter(f"transformer.h.{block}.attn.c_attn.weight"), 300)
    found = only(findings(model, batch), "odd-weight")
    assert found.severity == "critical"
    assert str(found.layer).endswith("attn.c_attn")
    assert found.evidence["other_matrices"] == 3


def test_a_matrix_a_hundredth_of_its_like_is_a_warning() -> None:
    model, batch = gpt2()
    scale(model.get_parameter("transformer.h.1.mlp.c_fc.weight"), 0.01)
    found = only(findings(model, batch), "odd-weight")
    assert (found.severity, found.layer) == ("warning", "transformer.h.1.mlp.c_fc")
    assert "small" in found.what


def test_ten_times_is_worth_a_look_and_no_alarm() -> None:
    model, batch = gpt2()
    scale(model.get_parameter("transformer.h.1.mlp.c_fc.weight"), 10)
    assert only(findings(model, batch), "odd-weight").severity == "info"


def test_a_matrix_of_zeros_is_healthy() -> None:
    model = Stack()
    scale(model.blocks[1].down.weight, 0)
    assert [f for f in findings(model, vectors()) if f.fault == "odd-weight"] == []


def test_a_loud_matrix_in_a_plain_mlp_and_in_torchs_own_attention() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    scale(model[2].weight, 60)
    assert only(findings(model, vectors(16)), "odd-weight").layer == "2"

    model, batch = healthy("encoder")
    scale(model.get_parameter("encoder.layers.1.self_attn.in_proj_weight"), 100)
    assert only(findings(model, batch), "odd-weight").layer == "encoder.layers.1.self_attn"


def test_a_model_that_starts_too_loud_as_a_whole() -> None:
    model = Stack()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=2)
    found = only(findings(model, vectors()), "odd-weight")
    assert found.severity == "critical"
    assert float(found.evidence["median_gain"]) > 10


def test_without_norms_less_is_too_loud() -> None:
    layers = [module for _ in range(8) for module in (nn.Linear(64, 64), nn.ReLU())]
    for module in layers:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
    found = only(findings(nn.Sequential(*layers), vectors(64)), "odd-weight")
    assert found.severity == "critical"


def test_a_weight_that_is_no_number_comes_before_all_else() -> None:
    model, batch = gpt2()
    with torch.no_grad():
        model.get_parameter("transformer.h.3.ln_2.weight")[5] = torch.nan
    scale(model.get_parameter("transformer.h.2.mlp.c_fc.weight"), 1e4)
    found = min(findings(model, batch), key=lambda finding: finding.rank)
    assert (found.fault, found.layer) == ("nonfinite-weight", "transformer.h.3.ln_2")
    assert found.evidence["nonfinite_elements"] == 1


class Positions(nn.Module):
    """A weight and a buffer that are of no layer, as a ViT's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x - self.mean + self.positions)
        return out


@pytest.mark.parametrize("name", ["positions", "mean"])
def test_a_weight_of_the_models_own_that_is_no_number_is_found(name: str) -> None:
    model = Positions()
    with torch.no_grad():
        getattr(model, name)[3] = torch.nan
    found = only(findings(model, torch.ones(2, 8)), "nonfinite-weight")
    assert (found.severity, found.layer) == ("critical", None)
    assert f"weights of the model are NaN or infinite ({name})" in found.what


def test_a_mask_of_infinities_among_the_buffers_is_healthy() -> None:
    model = Stack()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    assert {f.severity for f in findings(model, vectors())} <= {"info"}


def test_depth_scaling_is_told_apart() -> None:
    model, batch = gpt2(layers=4)
    found = only(findings(model, batch), "depth-scaling")
    assert float(found.evidence["times_their_like"]) == pytest.approx(8**-0.5, rel=0.1)
    assert "scaled for depth" in found.what
    assert "not scaled" not in found.what

    found = only(findings(*healthy("encoder")), "depth-scaling")
    assert found.layer == "encoder.layers.0.self_attn.out_proj"

    found = only(findings(*healthy("llama")), "depth-scaling")
    assert "not scaled" in found.what
    assert found.severity == SEVERITIES[-1]


def test_gains_are_those_of_the_rules_whatever_the_layout() -> None:
    linear, filters = nn.Linear(400, 100), nn.Conv2d(40, 100, 3)
    back = nn.ConvTranspose1d(40, 100, 4, stride=2)
    for module in (linear, filters):
        nn.init.kaiming_normal_(module.weight)
    nn.init.normal_(back.weight, std=(1 / 80) ** 0.5)  # 40 channels, two of four taps meet
    gains = [next(matrices(module)).gain for module in (linear, filters, back)]
    assert gains == pytest.approx([2**0.5, 2**0.5, 1], rel=0.05)
