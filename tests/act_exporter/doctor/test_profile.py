"""Activations over depth."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.checks import profile
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.doctor.attentions import SoftmaxAttention, decoder, tokens
from tests.act_exporter.doctor.seed_blocks import StableBlock, UnstableBlock, stack


def findings(model: nn.Module, batch: object) -> list[Finding]:
    found = list(profile.check(Subject(model, batch)))
    assert all(own.symptom for own in found)
    return found


def louder(module: nn.Module, times: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= times


class Residual(nn.Module):
    """A branch without a norm."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        louder(self, gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class TestGrowth:
    @pytest.mark.parametrize(("gain", "severity"), [(3, "warning"), (6, "critical")])
    def test_by_a_factor_from_block_to_block(self, gain: float, severity: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Residual(gain) for _ in range(6)))
        (found,) = findings(model, torch.randn(2, 8, 16))
        assert (found.fault, found.severity, found.layer) == ("growth-with-depth", severity, "5")
        assert found.evidence["factor"] > 2

    def test_of_a_plain_chain_of_layers(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        assert findings(model, torch.randn(4, 16)) == []
        louder(model, 6)
        (found,) = findings(model, torch.randn(4, 16))
        assert found.fault == "growth-with-depth"

    def test_a_residual_stream_of_random_parts_is_healthy(self) -> None:
        assert findings(decoder(SoftmaxAttention, layers=12), tokens()) == []

    def test_growth_of_a_small_embedding_to_the_scale_of_normed_branches_is_healthy(self) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        config = transformers.Olmo2Config(
            vocab_size=64, num_attention_heads=4, pad_token_id=0, eos_token_id=1, **sizes
        )
        torch.manual_seed(0)
        assert findings(transformers.Olmo2ForCausalLM(config), {"input_ids": tokens()}) == []


class TestJumps:
    def test_a_spike_inside_a_block_that_its_norm_hides(self) -> None:
        model, x = stack(UnstableBlock, use_linear=False)
        louder(model[3].qkv_proj, 100)
        found = findings(model, x)[0]
        assert (found.fault, found.layer) == ("spike", "3.qkv_proj")

    def test_a_spike_before_an_attention_and_the_plateau_after_it(self) -> None:
        model, x = stack(StableBlock)
        louder(model[3].qkv_proj, 100)
        found = findings(model, x)[0]
        assert (found.fault, found.layer) == ("plateau", "3.qkv_proj")
        assert found.evidence["plateau_from"] == "input of 3.ln2"

    def test_a_plateau_names_what_begins_it(self) -> None:
        model = decoder(SoftmaxAttention, layers=8)
        louder(model.blocks[3].down, 300)
        found = findings(model, tokens())[0]
        assert (found.fault, found.layer) == ("plateau", "blocks.3.down")
        assert found.evidence["plateau_from"] == "output of blocks.3"


class TestMassiveActivations:
    def test_channel_and_token_are_named(self) -> None:
        model = decoder(SoftmaxAttention, layers=4)
        batch = tokens()
        batch[0, 5], batch[batch == 7] = 7, 8
        batch[0, 5] = 7  # stands once
        with torch.no_grad():
            model.embed.weight *= 0.3
            model.embed.weight[7, 11] = 2_000
        found = next(own for own in findings(model, batch) if own.fault == "massive-activation")
        assert found.severity == "info"
        assert (found.evidence["token"], found.evidence["channel"]) == (5, 11)
        assert found.evidence["beyond_1000_medians"] == 1

    def test_near_the_end_of_fp16_it_is_a_warning(self) -> None:
        model = decoder(SoftmaxAttention, layers=4)
        with torch.no_grad():
            model.embed.weight[int(tokens()[0, 5]), 11] = 20_000
        found = next(own for own in findings(model, tokens()) if own.fault == "massive-activation")
        assert found.severity == "warning"


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"unstable"}))
def test_healthy_architectures_have_no_finding(name: str) -> None:
    torch.manual_seed(0)
    assert findings(ARCHITECTURES[name].build(), ARCHITECTURES[name].batch()) == []


def test_block_inputs_of_the_seeds_unstable_blocks_say_nothing() -> None:
    assert all(own.severity != "critical" for own in findings(*stack(UnstableBlock)))
