"""Attention's logits, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.checks import attention
from act_exporter.doctor.finding import Finding
from act_exporter.doctor.operations import softmaxes
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.doctor.attentions import SoftmaxAttention, decoder, tokens
from tests.act_exporter.doctor.seed_blocks import StableBlock, UnstableBlock, stack


def findings(model: nn.Module, batch: object, **given: object) -> list[Finding]:
    return list(attention.check(Subject(model, batch, **given)))


def louder(module: nn.Module, times: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= times


class TestWhatIsSeen:
    @pytest.mark.parametrize("how", ["eager", "sdpa"])
    def test_logits_are_the_models_own(self, how: str) -> None:
        model = decoder(lambda: SoftmaxAttention(how, temperature=5))
        _, found = softmaxes(Subject(model, tokens()))
        assert [own.layer for own in found] == [f"blocks.{i}.attn" for i in range(3)]
        for own, block in zip(found, model.blocks, strict=True):
            logits = block.attn.logits
            visible = logits.tril()
            assert own.largest == pytest.approx(float(visible[..., 1:, :].abs().max()), rel=1e-4)
            later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            chances = logits.masked_fill(later, -math.inf).softmax(-1)[..., 1:, :]
            rows = torch.special.entr(chances).sum(-1)
            shares = rows / torch.arange(2, logits.shape[-1] + 1).log()
            assert own.entropy == pytest.approx(float(shares.mean()), rel=1e-4)
            assert own.keys == 32

    def test_the_product_is_seen_before_it_is_scaled(self) -> None:
        model = decoder(lambda: SoftmaxAttention(temperature=1e-3))
        _, found = softmaxes(Subject(model, tokens()))
        largest = float(model.blocks[0].attn.logits.abs().max()) / 1e-3 * 4  # sqrt(16)
        assert found[0].product == pytest.approx(largest, rel=1e-4)

    @pytest.mark.parametrize("how", ["eager", "sdpa"])
    @pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "t5", "mixtral"])
    def test_every_attention_of_transformers_and_no_router(self, name: str, how: str) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES[name].build()
        model.set_attn_implementation(how)
        _, found = softmaxes(Subject(model, ARCHITECTURES[name].batch()))
        assert len(found) == (6 if name == "t5" else 2)  # two layers; encoder, decoder and across

    @pytest.mark.parametrize("training", [True, False])
    def test_torchs_own_encoder(self, training: bool) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES["encoder"].build().train(training)
        _, found = softmaxes(Subject(model, ARCHITECTURES["encoder"].batch()))
        assert [own.layer for own in found] == [f"encoder.layers.{i}.self_attn" for i in (0, 1)]

    def test_padding_is_no_logit(self) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES["bert"].build()
        batch = ARCHITECTURES["bert"].batch()
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, 5:] = 0
        for how in ("eager", "sdpa"):
            model.set_attn_implementation(how)
            _, found = softmaxes(Subject(model, batch))
            assert {own.keys for own in found} == {5}
            assert max(own.largest for own in found) < 10


class TestFindings:
    @pytest.mark.parametrize("how", ["eager", "sdpa"])
    @pytest.mark.parametrize("part", ["q_proj", "k_proj"])
    def test_large_logits_name_the_louder_projection(self, part: str, how: str) -> None:
        model = decoder(lambda: SoftmaxAttention(how))
        louder(getattr(model.blocks[1].attn, part), 2_000)
        (found,) = findings(model, tokens())
        assert (found.fault, found.severity) == ("large-logits", "critical")
        assert found.layer == f"blocks.1.attn.{part}"
        assert found.evidence["other_layers"] == 0

    def test_of_the_seeds_block_it_is_what_makes_query_and_key(self) -> None:
        model, x = stack(UnstableBlock, 16, use_linear=False)
        louder(model[3].qkv_proj, 100)
        (found,) = findings(model, x)
        assert (found.fault, found.layer) == ("large-logits", "3.qkv_proj")

    def test_of_gpt2_it_is_the_fused_matrix(self) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES["gpt2"].build()
        louder(model.transformer.h[1].attn.c_attn, 200)
        (found,) = findings(model, ARCHITECTURES["gpt2"].batch())
        assert (found.fault, found.layer) == ("large-logits", "transformer.h.1.attn.c_attn")

    def test_of_torchs_own_it_is_the_attention(self) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES["encoder"].build()
        louder(model.encoder.layers[1].self_attn, 100)
        (found,) = findings(model, ARCHITECTURES["encoder"].batch())
        assert (found.fault, found.layer) == ("large-logits", "encoder.layers.1.self_attn")

    def test_a_gain_of_the_querys_norm_is_what_is_named(self) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES["qwen3"].build()
        louder(model.model.layers[0].self_attn.q_norm, 500)
        (found,) = findings(model, ARCHITECTURES["qwen3"].batch())
        assert found.fault == "large-logits"
        assert found.layer == "model.layers.0.self_attn.q_norm"

    def test_logits_beyond_fp16_are_an_overflow_in_any_model(self) -> None:
        model = decoder(SoftmaxAttention)
        louder(model.blocks[2].attn.k_proj, 1e6)
        (found,) = findings(model, tokens())
        assert (found.fault, found.severity) == ("softmax-overflow", "critical")
        assert found.layer == "blocks.2.attn.k_proj"

    def test_an_unscaled_product_beyond_fp16_is_critical_where_fp16_is_used(self) -> None:
        model = decoder(lambda: SoftmaxAttention(temperature=1e-5))
        louder(model.blocks[0].attn.q_proj, 1e6)
        for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
            (found,) = findings(model, tokens(), scaler=scaler)
            assert (found.fault, found.severity) == ("softmax-overflow", "warning")
        scaler = torch.amp.GradScaler("cpu")
        (found,) = findings(model, tokens(), scaler=scaler)
        assert (found.fault, found.severity) == ("softmax-overflow", "critical")

    def test_a_model_in_fp16_that_overflows_there(self) -> None:
        model = decoder(SoftmaxAttention)
        louder(model.blocks[1].attn.q_proj, 1_000)
        louder(model.blocks[1].attn.k_proj, 1_000)
        (found,) = findings(model.half(), tokens())
        assert (found.fault, found.severity) == ("softmax-overflow", "critical")

    @pytest.mark.parametrize(("part", "symptom"), [("norm1", True), ("attn.k_proj", False)])
    def test_of_a_loud_input_they_are_a_symptom(self, part: str, symptom: bool) -> None:
        model = decoder(SoftmaxAttention)
        louder(model.blocks[1].get_submodule(part), 2_000)
        (found,) = findings(model, tokens())
        assert found.symptom == symptom

    def test_low_entropy_at_moderate_logits_is_a_warning(self) -> None:
        # A14 of the cases: normed query and key, and a scale of 1 in place of 1 / 16.
        config = transformers.Qwen3Config(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=256,
            initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.scaling = 1.5
        (found,) = findings(model, {"input_ids": tokens(64)})
        assert (found.fault, found.severity) == ("collapsed-entropy", "warning")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_healthy_architectures_have_no_finding(name: str) -> None:
    torch.manual_seed(0)
    assert findings(ARCHITECTURES[name].build(), ARCHITECTURES[name].batch()) == []


def test_the_seeds_softmax_is_healthy() -> None:
    assert findings(*stack(StableBlock, 16, use_linear=False)) == []
    assert findings(*stack(UnstableBlock, 16, use_linear=False)) == []


def test_without_a_softmax_there_is_nothing_to_say() -> None:
    assert findings(nn.Linear(4, 4), torch.randn(2, 4)) == []
