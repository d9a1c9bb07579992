"""Norms: order, the missing one, loud gains, small epsilons; and none of it in healthy models."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.checks.normalisation import check
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


def findings(model: nn.Module, batch: object) -> list[Finding]:
    return list(check(Subject(model, batch)))


@pytest.mark.parametrize("name", sorted({*HEALTHY} - {"stable"}))
def test_healthy_models_have_information_only(name: str) -> None:
    assert [f for f in findings(*healthy(name)) if f.severity != "info"] == []


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("gpt2", "pre"),
        ("llama", "pre"),
        ("mixtral", "pre"),
        ("qwen3", "pre"),
        ("t5", "pre"),
        ("stable", "pre"),
        ("bert", "post"),
        ("encoder", "post"),
        ("unstable", "post"),
    ],
)
def test_the_order_is_read_from_what_ran(name: str, order: str) -> None:
    model, batch = healthy(name)
    found = only(findings(model.eval(), batch), "norm-order")
    assert list(found.evidence) == [order]
    assert found.severity == "info"


def test_norms_of_branches_alone_are_neither() -> None:
    torch.manual_seed(0)
    config = transformers.Olmo2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        pad_token_id=0,
    )
    tokens = torch.randint(3, 64, (2, 8))
    found = findings(transformers.Olmo2ForCausalLM(config), {"input_ids": tokens})
    assert [f.fault for f in found] == ["norm-order"]
    assert list(found[0].evidence) == ["branch"]


@pytest.mark.parametrize("norm", ["ln_1", "ln_2"])
def test_the_block_without_a_norm_is_named(norm: str) -> None:
    model, batch = gpt2()
    setattr(model.get_submodule("transformer.h.2"), norm, nn.Identity())
    found = only(findings(model, batch), "missing-norm")
    assert found.layer == f"transformer.h.2.{norm}"
    assert found.severity == "warning"


def test_a_missing_norm_that_lets_a_loud_stream_through_is_critical() -> None:
    model = Stack()
    model.blocks[2].norm = nn.Identity()
    found = only(findings(model, 30 * vectors()), "missing-norm")
    assert (found.severity, found.layer) == ("critical", "blocks.2.norm")
    assert float(found.evidence["times_as_loud"]) == pytest.approx(30, rel=0.1)


def test_a_first_block_whose_input_is_normed_needs_none() -> None:
    class Embedded(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.embed_norm = nn.LayerNorm(32)
            self.blocks[0].norm = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.embed_norm(x))

    assert [f.fault for f in findings(Embedded(), vectors())] == ["norm-order"]


def test_a_shortcut_that_only_wider_blocks_have_is_no_missing_norm() -> None:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config)
    found = findings(model, {"pixel_values": torch.randn(2, 3, 16, 16)})
    assert [f.fault for f in found] == ["norm-order"]


def test_another_kind_of_attention_has_another_norm() -> None:
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
        pad_token_id=0,
    )
    tokens = torch.randint(3, 64, (2, 16))
    found = findings(transformers.MiniMaxForCausalLM(config), {"input_ids": tokens})
    assert [f.fault for f in found] == ["norm-order"]


def test_a_transformer_without_norms_needs_no_depth_to_be_told() -> None:
    model, batch = gpt2(layers=2)
    for block in range(2):
        for norm in ("ln_1", "ln_2"):
            setattr(model.get_submodule(f"transformer.h.{block}"), norm, nn.Identity())
    found = only(findings(model, batch), "missing-norm")
    assert (found.severity, found.layer) == ("warning", "transformer.h.0")
    assert "None of 2" in found.what


def test_a_residual_stack_without_norms_is_critical_where_it_runs_away() -> None:
    calm = only(findings(Stack(6, order="none"), vectors()), "missing-norm")
    assert (calm.severity, calm.layer) == ("warning", "blocks.0")

    model = Stack(6, order="none")
    for block in model.blocks:
        nn.init.normal_(block.up.weight, std=0.4)
        nn.init.normal_(block.down.weight, std=0.4)
    loud = only(findings(model, vectors()), "missing-norm")
    assert loud.severity == "critical"
    assert float(loud.evidence["growth"]) > 100


def test_a_plain_stack_without_norms_is_none_of_this() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6)]
    assert [f for f in findings(nn.Sequential(*layers), vectors()) if f.severity != "info"] == []


def test_a_pre_norm_stream_that_nothing_norms_at_the_end() -> None:
    model = Stack()
    model.norm = nn.Identity()
    found = only(findings(model, vectors()), "missing-norm")
    assert (found.severity, found.layer) == ("warning", "blocks.3")

    decoder, batch = healthy("t5")
    decoder.get_submodule("encoder").final_layer_norm = nn.Identity()
    assert only(findings(decoder.eval(), batch), "missing-norm").layer == "encoder.block.1"


def test_an_encoders_end_is_not_normed_by_the_decoder() -> None:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=10,
        max_target_positions=16,
        num_mel_bins=4,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    batch = {"input_features": torch.randn(2, 4, 20), "labels": torch.randint(3, 64, (2, 6))}
    assert [f.fault for f in findings(model, batch)] == ["norm-order"]
    model.get_submodule("model.encoder").layer_norm = nn.Identity()
    assert only(findings(model, batch), "missing-norm").layer == "model.encoder.layers.1"


def test_a_loud_gain_is_named() -> None:
    model, batch = gpt2()
    nn.init.constant_(model.get_parameter("transformer.h.1.ln_2.weight"), 60)
    found = only(findings(model, batch), "large-gain")
    assert (found.severity, found.layer) == ("critical", "transformer.h.1.ln_2")
    assert found.evidence["gain"] == 60

    llama, batch = healthy("llama")
    nn.init.constant_(llama.get_parameter("model.layers.1.input_layernorm.weight"), 12)
    found = only(findings(llama, batch), "large-gain")
    assert (found.severity, found.layer) == ("warning", "model.layers.1.input_layernorm")


def test_gains_that_are_all_loud_and_gains_that_are_all_small() -> None:
    loud, quiet = Stack(), Stack()
    for model, gain in ((loud, 40.0), (quiet, 0.05)):
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.weight, gain)
    quiet.norm.reset_parameters()  # 1, twenty times its like, and healthy
    found = only(findings(loud, vectors()), "large-gain")
    assert (found.severity, found.evidence["other_norms"]) == ("critical", 4)
    assert [f.fault for f in findings(quiet, vectors())] == ["norm-order"]


class HalfNorm(nn.Module):
    """Reckons in the dtype that comes in, as norms written by hand do."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def test_an_epsilon_that_is_nothing_in_fp16() -> None:
    model = Stack()
    model.blocks[1].norm = HalfNorm(32, 1e-12)
    assert [f for f in findings(model, vectors()) if f.fault == "small-epsilon"] == []

    found = only(findings(model.half(), vectors().half()), "small-epsilon")
    assert (found.severity, found.layer) == ("critical", "blocks.1.norm")
    assert "row of zeros" in found.what

    model.blocks[1].norm.eps = 1e-5
    assert [f for f in findings(model, vectors().half()) if f.fault == "small-epsilon"] == []


def test_a_row_without_variance_that_breaks_the_forward() -> None:
    model = Stack()
    model.blocks[0].norm = HalfNorm(32, 0.0)
    batch = vectors()
    batch[0, 3] = 0.5
    found = only(findings(model, batch), "small-epsilon")
    assert (found.severity, found.layer) == ("critical", "blocks.0.norm")
    assert found.evidence["smallest_variance"] == 0


def test_torchs_norm_survives_fp16_and_its_gradient_does_not() -> None:
    model = Stack()
    model.blocks[1].norm.eps = 1e-12
    found = only(findings(model.half(), vectors().half()), "small-epsilon")
    assert (found.severity, found.layer) == ("warning", "blocks.1.norm")
    assert float(found.evidence["factor"]) == pytest.approx(1e6)


def test_a_forward_of_nothing_but_nan_breaks_no_check() -> None:
    model, batch = healthy("llama")
    nn.init.constant_(model.get_parameter("model.layers.1.self_attn.v_proj.weight"), torch.inf)
    assert only(findings(model, batch), "norm-order").severity == "info"


def test_the_model_is_left_as_it_was() -> None:
    model, batch = healthy("resnet")
    before = unchanged(model)
    findings(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
