"""Added norms and small gains lower what the model made loud, and leave the model a model."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from act_exporter.doctor.remedies import add_norm, set_gains
from act_exporter.exceptions import SettingError
from act_exporter.layers import find_taps
from deploy.demo.train import GPT
from tests.act_exporter.doctor.remedies.remedied import remedied
from tests.act_exporter.doctor.seed_blocks import (
    StableBlock,
    UnstableBlock,
    block_inputs,
    contexts,
)

WIDTH, HEADS = 32, 4
SMALL_GPT2 = GPT2Config(n_layer=2, n_embd=WIDTH, n_head=HEADS, n_positions=16, vocab_size=64)
SMALL_LLAMA = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_attention_heads=HEADS,
    vocab_size=64,
)
TOKENS = torch.arange(16).unsqueeze(0)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=WIDTH, heads=HEADS, context=16)


def largest_logit(model: GPT) -> float:
    """Of all heads, in the model's second attention."""
    found: list[torch.Tensor] = []
    handle = model.blocks[1].attn.qkv.register_forward_hook(lambda _m, _a, out: found.append(out))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    q, k, _ = found[0].unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return float((q @ k.mT).abs().max()) / math.sqrt(WIDTH // HEADS)


class TestAddNorm:
    def test_after_the_attention_it_ends_the_growth_with_the_sequence(self):
        """The stable block's last input, 301 at a sequence of 512, becomes 2.5, as at 10."""
        for sequence in (10, 512):
            model, x = remedied(StableBlock, sequence, lambda model: add_norm(model, "*.out_proj"))
            assert block_inputs(model, x)[-1].mean_abs == pytest.approx(2.5, abs=0.1)

    @pytest.mark.parametrize("side", ["input", "output"])
    def test_the_tensor_before_it_stays_as_loud_as_it_was(self, side):
        """What it cannot do: contexts beyond float16's range stay beyond it."""
        after = remedied(UnstableBlock, 512, lambda model: add_norm(model, "*.out_proj", side=side))
        assert max(one.absmax for one in contexts(*after)) > 65_504

    def test_on_queries_and_keys_it_bounds_the_logits(self):
        """With weights 50 times too large: from over 50 to sqrt(8), 8 being a head's width."""
        model = gpt()
        with torch.no_grad():
            model.blocks[1].attn.qkv.weight.mul_(50)
        assert largest_logit(model) > 50
        add_norm(model, "blocks.1.attn.qkv", width=WIDTH // HEADS, first=2 * WIDTH)
        assert largest_logit(model) <= math.sqrt(WIDTH // HEADS) + 1e-3

    def test_values_pass_where_only_the_first_features_are_normalised(self):
        model = nn.Sequential(nn.Linear(4, 12))
        x = torch.randn(3, 4)
        before = model(x)
        add_norm(model, "0", width=4, first=8)
        after = model(x)
        torch.testing.assert_close(after[:, 8:], before[:, 8:])
        squares = after[:, :8].unflatten(-1, (2, 4)).square().mean(-1)
        torch.testing.assert_close(squares, torch.ones(3, 2), rtol=1e-3, atol=1e-3)

    def test_the_first_of_several_outputs_is_normalised(self):
        attention = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
        add_norm(attention, "0", gain=0.5)
        x = torch.randn(1, 5, 8) * 100
        out, weights = attention[0](x, x, x)
        torch.testing.assert_close(out.square().mean(-1), torch.full((1, 5), 0.25))
        assert weights.shape == (1, 5, 5)

    def test_a_fused_encoder_layer_does_not_pass_it_by(self):
        """In eval mode nn.TransformerEncoder computes layers at once where they have no hooks."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        x = torch.randn(1, 5, 8)
        with torch.no_grad():
            before = model(x)
            add_norm(model, "*.self_attn", gain=5.0)
            assert not torch.allclose(model(x), before)

    def test_weights_keep_their_names_and_the_gain_is_learnt(self):
        model = gpt()
        before = set(model.state_dict())
        assert add_norm(model, "*.attn", width=WIDTH) == ["blocks.0.attn", "blocks.1.attn"]
        added = {f"blocks.{i}.attn.added_output_norm.weight" for i in (0, 1)}
        assert set(model.state_dict()) == before | added
        model(TOKENS).square().mean().backward()
        gain = model.get_parameter("blocks.0.attn.added_output_norm.weight")
        assert gain.grad is not None
        assert gain.grad.abs().max() > 0

    def test_copies_and_pickles_have_norms_of_their_own(self):
        model = gpt()
        add_norm(model, "*.attn", width=WIDTH)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        pickled = torch.load(file, weights_only=False)
        expected = model(TOKENS)
        for other in (copy.deepcopy(model), pickled):
            nn.init.zeros_(other.get_parameter("blocks.0.attn.added_output_norm.weight"))
            assert not torch.allclose(other(TOKENS), expected)
        torch.testing.assert_close(model(TOKENS), expected)

    def test_half_precision_is_normalised_beyond_the_squares_of_its_range(self):
        model = nn.Sequential(nn.Linear(8, 8)).half()
        add_norm(model, "0")
        out = model(torch.full((2, 8), 30_000.0, dtype=torch.float16))
        assert out.dtype is torch.float16
        torch.testing.assert_close(out.float().square().mean(-1), torch.ones(2), rtol=1e-2, atol=0)

    def test_under_autocast_what_follows_gets_the_dtype_that_it_got(self):
        model = nn.Sequential(nn.Linear(8, 8))
        add_norm(model, "0")
        with torch.autocast("cpu", torch.bfloat16):
            assert model(torch.randn(2, 8)).dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("layer", "more", "words"),
        [
            ("blocks.7.attn", {}, "no module is called 'blocks.7.attn'"),
            ("blocks.0.attn", {}, "blocks.0.attn: width=None for an unknown number of features"),
            ("blocks.0.attn.proj", {"width": 5}, "width=5 for 32 features"),
        ],
    )
    def test_what_cannot_be_is_refused(self, layer, more, words):
        with pytest.raises(SettingError, match=words):
            add_norm(gpt(), layer, **more)

    def test_a_second_norm_at_the_same_place_is_refused(self):
        model = gpt()
        add_norm(model, "*.proj")
        with pytest.raises(SettingError, match="has added_output_norm already"):
            add_norm(model, "blocks.1.attn.proj")

    def test_a_module_that_is_never_called_is_refused(self):
        model = nn.TransformerEncoderLayer(8, 2, 16)
        with pytest.raises(SettingError, match=r"self_attn\.out_proj is never called"):
            add_norm(model, "self_attn.out_proj")


class TestSetGains:
    def test_gains_of_one_undo_loud_ones(self):
        """Gains of 30 make logits 900 times as large, those of 1 as large as before."""
        model = gpt()
        before = largest_logit(model)
        set_gains(model, 30.0, "blocks.*.norm1")
        assert largest_logit(model) > 500 * before
        assert set_gains(model, 1.0, "*.norm1") == ["blocks.0.norm1", "blocks.1.norm1"]
        assert largest_logit(model) == pytest.approx(before)

    def test_small_gains_lower_the_contexts_of_the_unstable_block(self):
        """At sequence 512 from 195,000 to 11,000: the article's 0.1."""
        small = remedied(UnstableBlock, 512, lambda model: set_gains(model, 0.1))
        assert max(one.absmax for one in contexts(*small)) < 195_000 / 15

    @pytest.mark.parametrize(
        "norm", [nn.LayerNorm(8), nn.RMSNorm(8), LlamaRMSNorm(8), GemmaRMSNorm(8)]
    )
    def test_the_gain_is_what_it_multiplies_by(self, norm):
        """Gemma's multiplies by 1 + weight."""
        model = nn.Sequential(nn.Linear(8, 8), norm)
        x = torch.randn(4, 8)
        set_gains(model, 1.0)
        whole = norm(x)
        assert set_gains(model, 0.1) == ["1"]
        torch.testing.assert_close(norm(x), whole / 10)

    def test_what_is_no_norm_is_refused(self):
        with pytest.raises(SettingError, match=r"blocks\.0\.attn\.proj is no norm"):
            set_gains(gpt(), 0.1, "blocks.0.attn.proj")


@pytest.mark.parametrize(
    ("config", "layers", "more"),
    [
        (SMALL_GPT2, ("*.attn.c_attn",), {"width": 8, "first": 64}),
        (SMALL_GPT2, ("*.attn",), {"width": 32}),
        (SMALL_GPT2, ("*.mlp.c_proj",), {}),
        (SMALL_LLAMA, ("*.q_proj", "*.k_proj"), {"width": 8}),
        (SMALL_LLAMA, ("*.self_attn",), {"width": 32}),
        (SMALL_LLAMA, ("*.o_proj", "*.down_proj"), {"side": "input"}),
    ],
)
def test_transformers_models_run_and_learn_with_it(config, layers, more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    before = model(TOKENS, labels=TOKENS).loss
    changed = add_norm(model, *layers, **more)
    assert len(changed) == len(layers) * config.num_hidden_layers
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert loss.item() != before.item()
    gains = [own for name, own in model.named_parameters() if ".added_" in name]
    assert len(gains) == len(changed)
    assert all(own.grad is not None and own.grad.isfinite().all() for own in gains)


def test_what_is_watched_stays_the_same():
    """The exporter finds attentions and projections as before, by the same names."""
    model = gpt()
    before = [(tap.layer, tap.tensor) for tap in find_taps(model)]
    add_norm(model, "*.attn", "*.mlp", width=WIDTH)
    add_norm(model, "*.proj", side="input")
    assert [(tap.layer, tap.tensor) for tap in find_taps(model)] == before


def test_a_compiled_model_has_the_norm_too():
    model = gpt()
    add_norm(model, "*.attn", width=WIDTH, gain=3.0)
    expected = model(TOKENS)
    torch.testing.assert_close(torch.compile(model, backend="eager")(TOKENS), expected)
