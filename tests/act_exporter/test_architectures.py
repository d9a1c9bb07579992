"""The architectures that people train: what is watched, that it is seen, and that nothing changes.

Widths and depths are tiny; what is held here does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from act_exporter import Exporter, start_exporter
from act_exporter.layers import find_taps
from tests.act_exporter.architectures import ARCHITECTURES, Architecture
from tests.act_exporter.test_exporter import page

NAMES = list(ARCHITECTURES)


def build(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return architecture.build().train()


def both(name: str) -> list[str]:
    return [f"{name} input", f"{name} output"]


def repeated(block: str, count: int, parts: Callable[[str], list[str]]) -> list[str]:
    names = [block.format(number) for number in range(count)]
    return [tap for name in names for tap in [*parts(name), f"{name} output"]]


def decoder(feed_forward: str, query_and_key: str) -> Callable[[str], list[str]]:
    return lambda name: [
        f"{name}.self_attn input",
        f"{name}.self_attn.q_{query_and_key} output",
        f"{name}.self_attn.k_{query_and_key} output",
        *both(f"{name}.self_attn.o_proj"),
        *both(f"{name}.{feed_forward}"),
    ]


def convolutions(name: str) -> list[str]:
    shortcut = both(f"{name}.downsample.0") if name == "layer2.0" else []
    return [*both(f"{name}.conv1"), *both(f"{name}.conv2"), *shortcut]


def llama_like(feed_forward: str, query_and_key: str = "proj") -> list[str]:
    return [
        "model.embed_tokens output",
        *repeated("model.layers.{}", 2, decoder(feed_forward, query_and_key)),
        "model.norm output",
        "lm_head output",
    ]


def hybrid(name: str) -> list[str]:
    return [*both(f"{name}.qkv_proj"), *both(f"{name}.out_proj")]


WATCHED = {
    "gpt2": [
        "transformer.wte output",
        *repeated(
            "transformer.h.{}",
            2,
            lambda name: [
                f"{name}.attn input",
                *both(f"{name}.attn.c_proj"),
                *both(f"{name}.mlp.c_proj"),
            ],
        ),
        "transformer.ln_f output",
        "lm_head output",
    ],
    "llama": llama_like("mlp.down_proj"),
    "mixtral": llama_like("mlp"),
    "qwen3": llama_like("mlp.down_proj", query_and_key="norm"),
    "bert": [
        "bert.embeddings.word_embeddings output",
        *repeated(
            "bert.encoder.layer.{}",
            2,
            lambda name: [
                f"{name}.attention input",
                f"{name}.attention.self.query output",
                f"{name}.attention.self.key output",
                *both(f"{name}.attention.output.dense"),
                *both(f"{name}.output.dense"),
            ],
        ),
        "cls.predictions.transform.LayerNorm output",
        "cls.predictions.decoder output",
    ],
    "t5": [
        # Not "shared": that only keeps the weight.
        "encoder.embed_tokens output",
        *repeated(
            "encoder.block.{}",
            2,
            lambda name: [
                f"{name}.layer.0.SelfAttention input",
                f"{name}.layer.0.SelfAttention.q output",
                f"{name}.layer.0.SelfAttention.k output",
                *both(f"{name}.layer.0.SelfAttention.o"),
                *both(f"{name}.layer.1.DenseReluDense.wo"),
            ],
        ),
        *repeated(
            "decoder.block.{}",
            2,
            lambda name: [
                f"{name}.layer.0.SelfAttention input",
                f"{name}.layer.0.SelfAttention.q output",
                f"{name}.layer.0.SelfAttention.k output",
                *both(f"{name}.layer.0.SelfAttention.o"),
                f"{name}.layer.1.EncDecAttention input",
                f"{name}.layer.1.EncDecAttention.q output",
                f"{name}.layer.1.EncDecAttention.k output",
                *both(f"{name}.layer.1.EncDecAttention.o"),
                *both(f"{name}.layer.2.DenseReluDense.wo"),
            ],
        ),
        "decoder.final_layer_norm output",
        "lm_head output",
    ],
    "resnet": [
        "conv1 output",
        *repeated("layer1.{}", 2, convolutions),
        *repeated("layer2.{}", 2, convolutions),
        "fc output",
    ],
    "mlp": ["layers.0 output", "layers.3 output", "head output"],
    "encoder": [
        "embed output",
        *repeated(
            "encoder.layers.{}",
            2,
            lambda name: [*both(f"{name}.self_attn"), *both(f"{name}.linear2")],
        ),
        "head output",
    ],
    "unstable": repeated("blocks.{}", 3, hybrid),
    "stable": repeated("blocks.{}", 3, hybrid),
}

BLOCKS = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama": ["model.layers.0", "model.layers.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "qwen3": ["model.layers.0", "model.layers.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "resnet": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    "encoder": ["encoder.layers.0", "encoder.layers.1"],
    "unstable": ["blocks.0", "blocks.1", "blocks.2"],
    "stable": ["blocks.0", "blocks.1", "blocks.2"],
}


def names(model: nn.Module, watch: str = "sublayers") -> list[str]:
    return [f"{tap.layer} {tap.tensor}" for tap in find_taps(model, watch)]


class TestWhatIsWatched:
    def test_one_block_written_out(self) -> None:
        assert names(build(ARCHITECTURES["mixtral"]))[1:9] == [
            "model.layers.0.self_attn input",
            "model.layers.0.self_attn.q_proj output",
            "model.layers.0.self_attn.k_proj output",
            "model.layers.0.self_attn.o_proj input",
            "model.layers.0.self_attn.o_proj output",
            "model.layers.0.mlp input",
            "model.layers.0.mlp output",
            "model.layers.0 output",
        ]

    @pytest.mark.parametrize("name", NAMES)
    def test_inside_the_blocks(self, name: str) -> None:
        assert names(build(ARCHITECTURES[name])) == WATCHED[name]

    @pytest.mark.parametrize("name", list(BLOCKS))
    def test_the_blocks(self, name: str) -> None:
        found = names(build(ARCHITECTURES[name]), "blocks")
        assert found == [f"{block} output" for block in BLOCKS[name]]


def calls(exporter: Exporter) -> dict[str, float]:
    return {
        f"{sample.labels['layer']} {sample.labels['tensor']}": sample.value
        for family in text_string_to_metric_families(page(exporter))
        for sample in family.samples
        if sample.name == "act_layer_calls_total"
    }


def errors(exporter: Exporter) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(page(exporter))
        for sample in family.samples
        if sample.name == "act_errors_total"
    )


@dataclass
class Trained:
    """What training left behind."""

    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    randomness: torch.Tensor


def train(
    architecture: Architecture,
    model: nn.Module,
    steps: int,
    forward: Callable[..., Any] | None = None,
) -> Trained:
    """A few steps of AdamW; `forward` is the model's compiled form, if it has one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    # A compiled model has no length and cannot be asked whether it is there.
    forward = model if forward is None else forward
    for _ in range(steps):
        loss = architecture.loss(forward(**architecture.batch()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return Trained(losses, model.state_dict(), torch.get_rng_state())


@pytest.mark.parametrize("name", NAMES)
def test_every_tap_is_seen_and_training_is_bitwise_the_same(name: str) -> None:
    architecture = ARCHITECTURES[name]
    plain = train(architecture, build(architecture), 4)
    model = build(architecture)
    with start_exporter(model, 0) as exporter:
        watched = train(architecture, model, 4)
        seen = calls(exporter)
        assert set(seen) == set(WATCHED[name])
        # The hybrid blocks use their output projection three times.
        often = {"out_proj": 12} if name in ("stable", "unstable") else {}
        for tap, count in seen.items():
            assert count == often.get(tap.split()[0].rpartition(".")[2], 4), tap
        assert errors(exporter) == 0
    assert all(map(torch.equal, plain.losses, watched.losses))
    assert plain.state.keys() == watched.state.keys()
    for weight, value in plain.state.items():
        assert torch.equal(value, watched.state[weight]), weight
    assert torch.equal(plain.randomness, watched.randomness)


@dataclass
class Compiled:
    """What compiled training left behind, and what the compiler did."""

    losses: list[float]
    graphs: int  # one more for each break and each recompilation
    breaks: dict[str, int]


def train_compiled(architecture: Architecture, backend: str, watch: bool) -> Compiled:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(architecture)
    exporter = start_exporter(model, 0) if watch else None
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = torch.compile(model, backend=backend)
            trained = train(architecture, model, 3, compiled)
        if exporter is not None:
            # As often as in eager mode: no hook was lost on the way.
            assert min(calls(exporter).values()) >= 3
            assert errors(exporter) == 0
    finally:
        if exporter is not None:
            exporter.close()
    counters = torch._dynamo.utils.counters
    return Compiled(
        [loss.item() for loss in trained.losses],
        counters["stats"]["unique_graphs"],
        dict(counters["graph_break"]),
    )


# The compiler's front half for all; its code generator, which takes long, for two.
# torch warns of its own access to .grad where a graph goes on after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in NAMES), ("mlp", "inductor"), ("llama", "inductor")],
)
def test_compiled_training_has_no_other_graphs_and_the_same_losses(name: str, backend: str) -> None:
    plain = train_compiled(ARCHITECTURES[name], backend, watch=False)
    watched = train_compiled(ARCHITECTURES[name], backend, watch=True)
    assert watched.losses == pytest.approx(plain.losses, rel=1e-5)
    assert watched.graphs == plain.graphs
    # GPT-2 breaks by itself, where it logs a warning about its loss.
    assert watched.breaks == plain.breaks
