"""What int8 costs, and whether channels or single elements make it cost so much."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from act_exporter.doctor.checks.quantisation import check
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.stacks import HEALTHY, Stack, gpt2, healthy, only, vectors


def findings(model: nn.Module, batch: object) -> list[Finding]:
    return list(check(Subject(model, batch)))


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_cost_little(name: str) -> None:
    assert findings(*healthy(name)) == []


def test_loud_channels_are_named_and_cost_what_they_cost() -> None:
    model, batch = gpt2()
    with torch.no_grad():
        model.get_parameter("transformer.h.2.ln_2.weight")[[3, 17]] = torch.tensor([300.0, 400])
        # The matrix has learnt to take them down, as a SmoothQuant would.
        model.get_parameter("transformer.h.2.mlp.c_fc.weight")[[3, 17]] /= 300
    found = only(findings(model, batch), "outlier-channels")
    assert (found.severity, found.layer) == ("warning", "transformer.h.2.mlp.c_fc")
    assert (found.evidence["outlier_channels"], found.evidence["loudest_channel"]) == (2, 17)
    assert float(found.evidence["error_per_tensor"]) > 0.2
    # Of channels that are loud in every token, one scale a token is no remedy; leaving them out is.
    assert float(found.evidence["error_per_token"]) > 0.1
    assert float(found.evidence["error_outliers_apart"]) < 0.02


def test_a_loud_token_is_told_from_loud_channels() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    batch = vectors()
    batch[0, 0] *= 500
    with torch.no_grad():
        model[0].bias.zero_()
    found = findings(model, batch)
    assert found == [] or "scale a token" in found[0].change


def test_an_odd_batch_breaks_nothing() -> None:
    batch = vectors()
    batch[0, 0, 0] = torch.inf
    assert findings(Stack(), batch) == []
    assert findings(Stack(), torch.zeros(2, 4, 32)) == []
    assert findings(nn.Linear(4, 2), torch.randn(4)) == []
