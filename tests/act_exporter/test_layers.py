"""Which tensors are watched, by the names that a user knows from the model."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from act_exporter import NothingToWatchError, SettingError
from act_exporter.collector import LayerPage
from act_exporter.layers import find_taps
from act_exporter.taps import LOGITS_LIMIT
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
                # Many models register it last.
                self.router = nn.Linear(4, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return sum(expert(x) for expert in self.experts)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.self_attn = nn.Sequential(nn.Linear(4, 4))
                self.moe = Mixture()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.moe(self.self_attn(x))

        model = nn.Sequential(Layer(), Layer())
        assert "0.moe output" in names(model)
        assert not [name for name in names(model) if "experts" in name or "router" in name]

    def test_blocks_that_are_mere_lists_are_seen_at_their_parts(self) -> None:
        class Attention(nn.Sequential):
            pass

        def block() -> nn.ModuleList:
            return nn.ModuleList(
                [Attention(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))]
            )

        model = nn.ModuleDict({"layers": nn.ModuleList([block(), block()])})
        assert names(model)[:6] == [
            "layers.0.0 input",
            "layers.0.0.0 input",
            "layers.0.0.0 output",
            "layers.0.1.1 input",
            "layers.0.1.1 output",
            "layers.0.1 output",
        ]
        assert names(model, watch="blocks") == ["layers.0.1 output", "layers.1.1 output"]

    def test_a_weight_that_is_computed_makes_a_projection_too(self) -> None:
        """weight_norm puts modules inside the layer; they put out weights, not activations."""
        model = gpt()
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                nn.utils.parametrizations.weight_norm(module)
        assert names(model) == EXPECTED
        assert not [name for name in names(model, watch="all") if "parametrizations" in name]

    def test_a_layer_with_an_adapter_stays_one_layer(self) -> None:
        """As peft wraps one, and as one with a weight of its own has it inside."""

        class Wrapped(nn.Module):
            def __init__(self, base_layer: nn.Linear) -> None:
                super().__init__()
                self.base_layer = base_layer
                self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2)})
                self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features)})

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.base_layer(x)
                return out + self.lora_B["default"](self.lora_A["default"](x))

        class Inside(nn.Linear):
            def __init__(self, base_layer: nn.Linear) -> None:
                super().__init__(base_layer.in_features, base_layer.out_features)
                self.lora_a = nn.Linear(base_layer.in_features, 2, bias=False)
                self.lora_b = nn.Linear(2, base_layer.out_features, bias=False)

        for adapter in (Wrapped, Inside):
            model = gpt()
            for block in model.blocks:
                block.attn.proj = adapter(block.attn.proj)
                block.mlp.down = adapter(block.mlp.down)
            model.head = adapter(model.head)
            assert names(model) == EXPECTED

    def test_an_attention_inside_an_attention_is_its_projection(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attn = nn.Sequential(nn.MultiheadAttention(4, 1))
                self.up = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.up(self.attn(x))

        model = nn.Sequential(Layer(), Layer())
        assert names(model)[:3] == ["0.attn input", "0.attn.0 input", "0.attn.0 output"]
        assert not [name for name in names(model, watch="all") if "out_proj" in name]

    def test_the_blocks_of_two_alike_towers_are_watched(self) -> None:
        class Tower(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
                )
                self.downsample = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x)
                return self.downsample(x)

        model = nn.Sequential(Tower(), Tower())
        assert names(model, watch="blocks") == [
            f"{tower}.blocks.{block} output" for tower in range(2) for block in range(2)
        ]

    def test_a_block_of_small_alike_parts_stays_one_block(self) -> None:
        def part() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

        model = nn.Sequential(*(nn.Sequential(part(), part()) for _ in range(2)))
        assert names(model, watch="blocks") == ["0 output", "1 output"]

    def test_attentions_in_a_list_are_seen_one_by_one(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attns = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
                self.up = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.up(self.attns[0](x) + self.attns[1](x))

        found = names(nn.Sequential(Layer(), Layer()))
        assert found[:6] == [
            f"0.attns.{number}{tap}"
            for number in range(2)
            for tap in (" input", ".0 input", ".0 output")
        ]

    def test_all_experts_in_one_tensor_are_a_mixture(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.down = nn.Parameter(torch.ones(2, 4, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x @ self.down).sum(0)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attn = nn.Sequential(nn.Linear(4, 4))
                self.experts = Experts()
                self.router = nn.Linear(4, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.experts(self.attn(x))

        assert names(nn.Sequential(Layer(), Layer()))[3:6] == [
            "0.experts input",
            "0.experts output",
            "0 output",
        ]

    def test_an_embedding_that_only_keeps_a_weight_is_not_watched(self) -> None:
        model = nn.ModuleDict({"shared": nn.Embedding(8, 4), "embed": nn.Embedding(8, 4)})
        model["embed"].weight = model["shared"].weight
        model["blocks"] = nn.Sequential(HybridBlock(4), HybridBlock(4))
        assert names(model)[0] == "embed output"

    def test_a_layer_without_a_shape_yet_is_watched(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
        assert names(model) == ["0 output"]

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


COMMAND = Path(sys.executable).with_name("act-exporter")

USERS_MODULE = """
from torch import nn

WIDTH = 4

def build():
    return nn.ModuleDict({"[red]a": nn.Linear(2, WIDTH), "b" * 120: nn.Linear(WIDTH, 1)})

def number():
    return 1

def failing():
    raise ValueError("no data\\nin here")
"""


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "mine.py").write_text(USERS_MODULE)
        (tmp_path / "needs.py").write_text("import absent_package")
        (tmp_path / "broken.py").write_text("def build(:")
        return tmp_path

    def layers(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "layers", *arguments],
            cwd=folder,
            # A width of its own: the test must not depend on the terminal that it runs in.
            env={"COLUMNS": "100", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_lists_tensors_one_a_line_and_counts_their_series(self, folder: Path) -> None:
        done = self.layers(folder, "mine:build")
        assert done.returncode == 0, done.stderr
        head, *rows, total = [line.split() for line in done.stdout.splitlines()]
        assert head == ["layer", "tensor", "kind"]
        assert [row[:2] for row in rows] == [["[red]a", "output"], ["b" * 120, "output"]]
        labels = {"run": "x", "rank": "0"}
        series = LayerPage(find_taps(nn.Sequential(nn.Linear(2, 2))), labels).series
        assert " ".join(total) == f"2 tensors, {2 * series} series at most"

    def test_watches_what_it_is_told_to(self, folder: Path) -> None:
        done = self.layers(folder, "mine:build", "--watch", "b*", "--watch", "c*")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 3
        assert done.stdout.splitlines()[-1].startswith("1 tensor, ")

    def test_help_teaches_with_an_example(self, folder: Path) -> None:
        done = self.layers(folder, "--help")
        assert done.returncode == 0
        assert "act-exporter layers train:build_model" in done.stdout
        assert "sublayers, blocks, all" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["mine"], "'mine' is not of the form module:function, such as train:build_model"),
            (["mine:"], "'mine:' is not of the form module:function, such as train:build_model"),
            (["other:build"], "no module 'other' can be imported from {folder}"),
            (
                ["needs:build"],
                "importing 'needs' failed: ModuleNotFoundError: No module named 'absent_package'",
            ),
            (
                ["broken:build"],
                "importing 'broken' failed: SyntaxError: invalid syntax (broken.py, line 1)",
            ),
            (["mine:buidl"], "module 'mine' has no function 'buidl'"),
            (["mine:WIDTH"], "module 'mine' has no function 'WIDTH'"),
            (["mine:number"], "mine:number returned int, which is no torch.nn.Module"),
            (["mine:failing"], "mine:failing failed: ValueError: no data in here"),
            (
                ["mine:build", "--watch", "c*"],
                "ModuleDict has no module to watch with watch='c*'; its modules are: [red]a, "
                + "b" * 120,
            ),
            (
                ["mine:build", "--watch", "all", "--watch", "b*"],
                "--watch all is a level and cannot be joined with others",
            ),
        ],
    )
    def test_a_mistake_is_one_sentence(self, folder: Path, arguments: list[str], says: str) -> None:
        done = self.layers(folder, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == f"act-exporter: {says.format(folder=folder)}\n"
