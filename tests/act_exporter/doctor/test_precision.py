"""Where a number stops fitting, in which format; healthy models fit into all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.checks.precision import check
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.stacks import (
    HEALTHY,
    Stack,
    gpt2,
    healthy,
    only,
    unchanged,
    vectors,
)


def findings(model: nn.Module, batch: object, **given: object) -> list[Finding]:
    return list(check(Subject(model, batch, **given)))


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_fit(name: str) -> None:
    model, batch = healthy(name)
    assert findings(model, batch, scaler=scaler()) == []


def loud() -> Stack:
    """The second block's feed-forward puts out more than float16 holds."""
    model = Stack()
    with torch.no_grad():
        model.blocks[1].down.weight.mul_(1e6)
    return model


def test_the_first_layer_that_overflows_is_named() -> None:
    found = only(findings(loud(), vectors(), scaler=scaler()), "fp16-overflow")
    assert (found.severity, found.layer) == ("critical", "blocks.1.down")
    assert "made in blocks.1.down;" in found.what
    assert float(found.evidence["largest_finite_before"]) < 10


def test_without_fp16_in_use_it_is_a_warning() -> None:
    assert only(findings(loud(), vectors()), "fp16-overflow").severity == "warning"
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert only(findings(loud(), vectors(), scaler=off), "fp16-overflow").severity == "warning"


def test_layers_to_keep_in_float32_are_tried() -> None:
    model = loud()
    with torch.no_grad():
        model.blocks[3].down.weight.mul_(1e6)
    found = only(findings(model, vectors()), "keep-in-fp32")
    assert found.evidence["layers"] == "blocks.1.down, blocks.3.down"


class Sums(nn.Module):
    """Two finite operands whose sum is not (huggingface/transformers PR 19229)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Linear(width, width)
        nn.init.zeros_(self.mlp.weight)
        nn.init.constant_(self.mlp.bias, 4e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Sums()])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_the_sum_of_two_finite_operands_is_the_blocks() -> None:
    found = only(findings(Residual().half(), 3e4 + vectors(8).half()), "fp16-overflow")
    assert (found.severity, found.layer) == ("critical", "blocks.0")
    assert "in blocks.0's own code after blocks.0.mlp" in found.what
    assert found.evidence["largest_finite_before"] == pytest.approx(4e4, rel=1e-3)
    assert "residual stream" in found.change


def test_autocast_alone_does_not_show_a_residual_overflow() -> None:
    """It sums in float32; only a model that is all in float16 does not."""
    found = only(findings(Residual(), 3e4 + vectors(8), scaler=scaler()), "fp16-overflow")
    assert (found.severity, found.layer) == ("warning", "blocks.0")
    assert "not autocast" in found.what


def test_headroom_warns_before_it_overflows() -> None:
    model = Stack()
    with torch.no_grad():
        model.blocks[1].down.bias.fill_(6e4)
    found = only(findings(model, vectors(), scaler=scaler()), "low-headroom")
    assert (found.severity, found.layer) == ("warning", "blocks.1.down")
    assert float(found.evidence["share_of_float16"]) == pytest.approx(0.916, abs=0.01)
    assert only(findings(model, vectors()), "low-headroom").severity == "info"


class Masked(nn.Module):
    """Attention with a mask of infinities, through a softmax of its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((8, 8), -1e9, dtype=x.dtype if x.dtype != torch.float16 else torch.float)
        scores = x @ x.transpose(-2, -1) + mask.triu(1).to(x.dtype)
        return self.out(self.softmax(scores) @ x)


def test_a_mask_that_becomes_infinite_is_healthy() -> None:
    assert findings(Masked(), vectors(16), scaler=scaler()) == []


def test_a_mask_is_not_where_nan_began() -> None:
    class Broken(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
            return self.out((self.softmax(scores) @ x - 1e6).log())

    found = only(findings(Broken(), vectors(16)), "nonfinite-activation")
    assert found.evidence["first_tensor"] == "out input"


class Exploding(nn.Module):
    """exp of what comes in: infinite in every format."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return F.softmax(self.blocks[2](self.blocks[1](torch.exp(100 * x.abs() + 50))), -1)


def test_what_breaks_in_float32_is_no_formats_fault() -> None:
    model = nn.Sequential(Exploding(), nn.Linear(8, 2))
    found = findings(model, vectors(8), scaler=scaler())
    assert [f.fault for f in found] == ["nonfinite-activation"]
    assert (found[0].layer, found[0].symptom) == ("0", True)
    assert "after 0.blocks.0" in found[0].what


def test_bad_data_is_not_blamed_on_a_format() -> None:
    batch = vectors()
    batch[0, 0, 0] = torch.nan
    assert findings(Stack(), batch, scaler=scaler()) == []


def test_bf16_weights_that_are_too_coarse_for_the_step() -> None:
    model, batch = gpt2()
    model = model.to(torch.bfloat16)
    fine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert findings(model, batch, optimizer=fine) == []
    coarse = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = only(findings(model, batch, optimizer=coarse), "bf16-lost-updates")
    before = unchanged(model)
    model(**batch).loss.backward()
    coarse.step()
    name = f"{found.layer}.weight"
    kept = (model.get_parameter(name) == before[name]).float().mean()
    assert float(found.evidence["share_lost"]) == pytest.approx(float(kept), abs=0.05)


def test_the_model_is_left_as_it_was() -> None:
    model = loud()
    before, forwards = unchanged(model), [module.forward for module in model.modules()]
    findings(model, vectors(), scaler=scaler())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert forwards == [module.forward for module in model.modules()]
    assert not any("forward" in vars(module) for module in model.modules())
