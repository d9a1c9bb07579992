"""From a finding to its remedy: after it the doctor does not find that fault any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from act_exporter import doctor
from act_exporter.doctor import examine, remedies
from act_exporter.doctor.subject import Batch
from deploy.demo.train import GPT
from tests.act_exporter.doctor.remedies.remedied import Normalised, NormalisedStable, bound_features
from tests.act_exporter.doctor.seed_blocks import StableBlock, UnstableBlock, stack

WIDTH, HEADS, SEQUENCE = 32, 4, 64
Case = tuple[nn.Module, Batch]


class Loss(nn.Module):
    """A GPT that returns the loss of its own input, one place on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(layers=4, width=WIDTH, heads=HEADS, context=32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))


def loud_gains() -> Case:
    model = Loss()
    nn.init.constant_(model.gpt.blocks[2].norm1.weight, 50.0)
    return model, tokens()


def loud_weight() -> Case:
    model = Loss()
    with torch.no_grad():
        model.gpt.blocks[1].mlp.down.weight.mul_(100)
    return model, tokens()


def loud_logits() -> Case:
    model = Loss()
    with torch.no_grad():
        for block in model.gpt.blocks:
            block.attn.qkv.weight[: 2 * WIDTH].mul_(60)
    return model, tokens()


def no_norms() -> Case:
    model = Loss()
    for block in model.gpt.blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    return model, tokens()


def linear(block: type[nn.Module]) -> Callable[[], Case]:
    return lambda: stack(block, SEQUENCE)  # type: ignore[arg-type]


def mended(block: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def mend(_model: nn.Module) -> nn.Module:
        model, _ = stack(block, SEQUENCE)  # type: ignore[arg-type]
        bound_features(model)
        return model

    return mend


CASES: dict[str, tuple[Callable[[], Case], Callable[[nn.Module], object]]] = {
    "unbounded-feature-map": (linear(UnstableBlock), mended(Normalised)),
    "unnormalised-attention": (linear(StableBlock), mended(NormalisedStable)),
    "large-gain": (loud_gains, lambda model: remedies.set_gains(model, 1.0)),
    "odd-weight": (
        loud_weight,
        lambda model: remedies.initialise(model, "gpt.blocks.1.mlp.down.weight", std=0.02),
    ),
    "large-logits": (
        loud_logits,
        lambda model: remedies.add_norm(model, "*.qkv", width=WIDTH // HEADS, first=2 * WIDTH),
    ),
    "missing-norm": (
        no_norms,
        lambda model: remedies.add_norm(model, "*.attn.qkv", "*.mlp.up", side="input"),
    ),
}


@pytest.mark.parametrize("fault", CASES)
def test_after_its_remedy_the_fault_is_found_no_more(fault):
    sick, remedy = CASES[fault]
    model, batch = sick()
    assert fault in [finding.fault for finding in examine(model, batch).findings]
    other = remedy(model)
    report = examine(other if isinstance(other, nn.Module) else model, batch)
    assert fault not in [finding.fault for finding in report.findings]
    assert [finding for finding in report.findings if finding.severity == "critical"] == []


def test_clipping_that_knows_the_scaler_is_no_finding():
    model = Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")

    def step(clip: Callable[[], object]) -> Callable[[Batch], None]:
        def train(batch: Batch) -> None:
            scaler.scale(model(batch)).backward()
            clip()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return train

    naive = step(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    remedy = step(lambda: remedies.clip_gradients(optimizer, 1.0, scaler))
    faults = {
        name: {
            finding.fault
            for finding in examine(
                model, tokens(), optimizer, scaler=scaler, train_step=train
            ).findings
        }
        for name, train in {"naive": naive, "remedy": remedy}.items()
    }
    assert "clip-before-unscale" in faults["naive"]
    assert not {fault for fault in faults["remedy"] if fault.startswith("clip-")}


def test_remedies_that_findings_name_are_there():
    folder = Path(doctor.__file__).parent
    sources = [file.read_text() for file in (*folder.glob("*.py"), *folder.glob("checks/*.py"))]
    named = {name for text in sources for name in re.findall(r"doctor\.remedies\.(\w+)", text)}
    assert {"add_norm", "set_gains"} <= named <= set(remedies.__all__)
