"""Which tensors are watched, by the names that a user knows from the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from act_exporter import NothingToWatchError, SettingError
from act_exporter.layers import LOGITS_LIMIT, find_taps
from tests.act_exporter.models import HybridBlock, gpt


def names(model: nn.Module, **options: object) -> list[str]:
    return [f"{tap.layer} {tap.tensor}" for tap in find_taps(model, **options)]  # type: ignore[arg-type]


def block(name: str) -> list[str]:
    return [
        f"{name}.attn input",
        f"{name}.attn.proj input",
        f"{name}.attn.proj output",
        f"{name}.mlp.down input",
        f"{name}.mlp.down output",
        f"{name} output",
    ]


EXPECTED = ["embed output", *block("blocks.0"), *block("blocks.1"), "norm output", "head output"]


class TestSublayers:
    def test_watches_inside_the_blocks_of_a_decoder(self) -> None:
        assert names(gpt()) == EXPECTED

    def test_names_have_no_wrapper_parts(self) -> None:
        model = gpt()
        model.blocks[0] = torch.compile(model.blocks[0])
        assert names(torch.compile(model)) == EXPECTED

    def test_data_parallel_is_a_wrapper(self) -> None:
        assert names(nn.DataParallel(gpt())) == EXPECTED

    def test_like_places_of_the_blocks_are_of_one_kind(self) -> None:
        kinds = {tap.layer: tap.kind for tap in find_taps(gpt()) if tap.tensor == "output"}
        assert kinds["blocks.0.attn.proj"] == kinds["blocks.1.attn.proj"]
        assert kinds["blocks.0.attn.proj"] != kinds["blocks.0.mlp.down"]

    def test_only_the_logits_have_a_limit(self) -> None:
        limits = {tap.layer: tap.limit for tap in find_taps(gpt())}
        assert limits.pop("head") == LOGITS_LIMIT
        assert set(limits.values()) == {None}

    def test_a_projection_that_is_never_called_is_not_watched(self) -> None:
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
        )
        assert names(encoder)[:5] == [
            "layers.0.self_attn input",
            "layers.0.self_attn output",
            "layers.0.linear2 input",
            "layers.0.linear2 output",
            "layers.0 output",
        ]

    def test_an_attention_without_a_module_is_seen_at_its_projections(self) -> None:
        assert names(nn.Sequential(HybridBlock(4), HybridBlock(4)))[:5] == [
            "0.qkv_proj input",
            "0.qkv_proj output",
            "0.out_proj input",
            "0.out_proj output",
            "0 output",
        ]

    def test_a_mixture_is_seen_as_a_whole(self) -> None:
        class Mixture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(8))

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.self_attn = nn.Sequential(nn.Linear(4, 4))
                self.moe = Mixture()

        model = nn.Sequential(Layer(), Layer())
        assert "0.moe output" in names(model)
        assert not [name for name in names(model) if "experts" in name]

    @pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
    def test_both_stacks_of_an_encoder_and_decoder_are_watched(self) -> None:
        model = nn.Transformer(8, 2, 2, 2, 16)
        assert {"encoder.layers.1 output", "decoder.layers.1 output"} <= set(names(model))

    def test_a_model_without_blocks_is_watched_at_its_weights(self) -> None:
        assert names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))) == [
            "0 output",
            "2 output",
        ]

    def test_a_bare_layer_is_called_model(self) -> None:
        assert names(nn.Linear(2, 2)) == ["model output"]

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_scripted_parts_take_no_hooks_and_are_left_out(self) -> None:
        scripted = torch.jit.script(nn.Linear(2, 2))
        assert names(nn.Sequential(nn.Linear(2, 2), scripted)) == ["0 output"]
        with pytest.raises(NothingToWatchError):
            find_taps(scripted)


class TestWatch:
    def test_blocks(self) -> None:
        assert names(gpt(), watch="blocks") == ["blocks.0 output", "blocks.1 output"]

    def test_all_is_each_module_that_is_called(self) -> None:
        found = names(gpt(), watch="all")
        assert "blocks.1.attn.qkv output" in found
        assert "blocks output" not in found

    def test_globs(self) -> None:
        assert names(gpt(), watch=["*.qkv", "norm"]) == [
            "blocks.0.attn.qkv output",
            "blocks.1.attn.qkv output",
            "norm output",
        ]

    def test_a_function(self) -> None:
        assert names(gpt(), watch=lambda _, module: isinstance(module, nn.Embedding)) == [
            "embed output"
        ]

    def test_nothing_selected_names_what_there_is(self) -> None:
        with pytest.raises(NothingToWatchError, match=r"embed, blocks, blocks\.0"):
            find_taps(gpt(), "layer.*")

    def test_a_model_without_modules_is_an_error(self) -> None:
        with pytest.raises(NothingToWatchError, match="Identity has no module to watch"):
            find_taps(nn.Identity())

    def test_a_wrong_type_is_an_error(self) -> None:
        with pytest.raises(SettingError, match="watch="):
            find_taps(gpt(), [])
