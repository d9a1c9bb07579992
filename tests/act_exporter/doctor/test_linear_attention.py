"""Growth of linear attention, and which models have none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.checks import linear_attention
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.growth import driven, lengths
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.doctor.attentions import (
    LinearAttention,
    Phi,
    SoftmaxAttention,
    decoder,
    tokens,
)
from tests.act_exporter.doctor.corpus import own
from tests.act_exporter.doctor.seed_blocks import StableBlock, UnstableBlock, stack


def findings(model: nn.Module, batch: object) -> list[Finding]:
    return list(linear_attention.check(Subject(model, batch)))


class TestUnboundedFeatureMap:
    @pytest.mark.parametrize("causal", [False, True])
    def test_exp_is_found_in_the_block_that_has_it(self, causal: bool) -> None:
        sick = LinearAttention(torch.exp, normalised=False, causal=causal)
        model = decoder(lambda: SoftmaxAttention(), at_1=sick)
        (found,) = findings(model, tokens())
        assert (found.fault, found.severity) == ("unbounded-feature-map", "critical")
        assert found.layer == "blocks.1.attn"
        assert found.evidence["other_layers"] == 0

    def test_in_all_blocks_it_is_one_finding(self) -> None:
        model = decoder(lambda: LinearAttention(torch.exp, normalised=False))
        (found,) = findings(model, tokens())
        assert found.layer == "blocks.0.attn"
        assert found.evidence["other_layers"] == 2

    def test_a_sum_in_the_same_place_of_another_block_is_mended_with_it(self) -> None:
        sum_ = LinearAttention(normalised=False)
        exp = LinearAttention(torch.exp, normalised=False)
        (found,) = findings(decoder(SoftmaxAttention, at_0=exp, at_2=sum_), tokens())
        assert (found.fault, found.layer) == ("unbounded-feature-map", "blocks.0.attn")

    def test_of_the_seeds_unstable_block(self) -> None:
        (found,) = findings(*stack(UnstableBlock))
        assert (found.fault, found.severity) == ("unbounded-feature-map", "critical")
        assert found.layer == "0"
        assert found.evidence["other_layers"] == 5
        assert found.evidence["feature_map_power"] > 20

    def test_a_normaliser_hides_it_from_measurement_but_not_from_its_name(self) -> None:
        attention = LinearAttention(torch.exp)
        attention.feature_map = torch.exp
        (found,) = findings(decoder(lambda: SoftmaxAttention(), at_2=attention), tokens())
        assert (found.fault, found.severity) == ("unbounded-feature-map", "warning")
        assert found.layer == "blocks.2.attn"

    def test_with_float16_weights_that_is_critical(self) -> None:
        attention = LinearAttention(torch.exp)
        attention.feature_map = torch.exp
        model = decoder(lambda: SoftmaxAttention(), at_2=attention).half()
        (found,) = findings(model, tokens())
        assert (found.fault, found.severity) == ("unbounded-feature-map", "critical")

    def test_exp_that_mixes_no_tokens_is_no_attention(self) -> None:
        class Exponential(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.down(self.up(x).exp())

        assert findings(decoder(Exponential), tokens()) == []

    def test_in_fp16_it_is_told_from_what_only_overflows_there(self) -> None:
        model = decoder(lambda: LinearAttention(torch.exp, normalised=False)).half()
        assert findings(model, tokens())[0].fault == "unbounded-feature-map"
        model = decoder(lambda: LinearAttention(normalised=False)).half()
        assert findings(model, tokens())[0].fault == "unnormalised-attention"


class TestUnnormalisedAttention:
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_sum_is_found_in_the_block_that_has_it(self, causal: bool) -> None:
        sick = LinearAttention(normalised=False, causal=causal)
        (found,) = findings(decoder(lambda: LinearAttention(), at_2=sick), tokens())
        assert (found.fault, found.severity) == ("unnormalised-attention", "critical")
        assert found.layer == "blocks.2.attn"

    @pytest.mark.parametrize("sequence", [5, 10, 64])
    def test_of_the_seeds_stable_block(self, sequence: int) -> None:
        (found,) = findings(*stack(StableBlock, sequence))
        assert (found.fault, found.layer) == ("unnormalised-attention", "0")

    def test_a_norm_on_the_context_mends_it(self) -> None:
        model = decoder(lambda: LinearAttention(normalised=False, norm=True))
        assert findings(model, tokens()) == []

    def test_a_batch_too_short_to_cut_says_nothing(self) -> None:
        model = decoder(lambda: LinearAttention(normalised=False))
        assert (
            lengths(Subject(model, tokens(15))) == []
        )  # and longer than its table it must not get
        assert findings(model, tokens(15)) == []


class Sets(nn.Module):
    """Of Zaheer et al. 2017: a sum over the set, alone or added to each element."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.rho = nn.Linear(32, 4)
        self.pooled = pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.phi(x)
        total = h.sum(1, keepdim=True)
        out: torch.Tensor = self.rho(total if self.pooled else h + total)
        return out


class TestSumsWithoutAttention:
    @pytest.mark.parametrize("pooled", [True, False])
    def test_are_healthy(self, pooled: bool) -> None:
        torch.manual_seed(0)
        assert findings(Sets(pooled), torch.randn(4, 32, 8)) == []

    @pytest.mark.parametrize("feature", [torch.sigmoid, torch.relu])
    def test_an_attention_is_one_by_its_names_or_by_how_it_grows(self, feature: Phi) -> None:
        sick = LinearAttention(feature, normalised=False)
        (found,) = findings(decoder(LinearAttention, at_2=sick), tokens())
        assert (found.severity, found.layer) == ("critical", "blocks.2.attn")

    def test_one_with_a_fused_projection_and_bounded_features_too(self) -> None:
        def make(normalised: bool = True) -> nn.Module:
            return own.LinearAttention(32, 2, torch.sigmoid, normalised, causal=False)

        (found,) = findings(decoder(make, at_2=make(normalised=False)), tokens())
        assert (found.fault, found.layer) == ("unnormalised-attention", "blocks.2.attn")


@pytest.mark.parametrize(
    "make",
    [
        LinearAttention,
        lambda: LinearAttention(causal=True),
        lambda: LinearAttention(torch.square),
        SoftmaxAttention,
        lambda: SoftmaxAttention("sdpa"),
    ],
)
def test_normalised_attentions_are_healthy(make: Callable[[], nn.Module]) -> None:
    assert findings(decoder(make), tokens()) == []


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"unstable", "stable"}))
def test_healthy_architectures_have_no_finding(name: str) -> None:
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    assert findings(architecture.build(), architecture.batch()) == []


@pytest.mark.parametrize("length", [8, 16, 32])
def test_a_mamba_is_healthy(length: int) -> None:
    # Its step is a softplus with an offset: exponential at first, and linear where it is large. Its
    # state is a sum that forgets, which grows with the sequence for some tokens.
    config = transformers.MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4)
    for seed in range(2):
        torch.manual_seed(seed)
        model = transformers.MambaForCausalLM(config)
        assert findings(model, {"input_ids": tokens(length)}) == []


def test_softmax_of_the_seeds_blocks_is_healthy_when_measured() -> None:
    model, x = stack(StableBlock, 16, use_linear=False)
    assert findings(model, x) == []


def test_the_model_is_left_as_it_was() -> None:
    model, x = stack(UnstableBlock)
    before, output = copy.deepcopy(model.state_dict()), model(x)
    random = torch.get_rng_state()
    findings(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    assert torch.equal(model(x), output)
    assert not any(module._forward_hooks for module in model.modules())


def test_projections_are_brought_to_the_level_whatever_they_were() -> None:
    model = decoder(SoftmaxAttention)
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.blocks[0].attn.v_proj.weight *= 1e4
        loud.blocks[0].attn.v_proj.bias *= 1e4
    places = [driven(Subject(own, tokens()), 1.0) for own in (model, loud)]
    assert list(places[0]) == list(places[1])
    for where, measured in places[0].items():
        assert measured.rms == pytest.approx(places[1][where].rms, rel=1e-3)
