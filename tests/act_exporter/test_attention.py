"""The bound on attention logits, held to the logits themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from act_exporter import Thresholds, start_exporter
from act_exporter.layers import find_taps
from tests.act_exporter.architectures import ARCHITECTURES
from tests.act_exporter.test_exporter import value

QUICK = Thresholds(window=4, window_minimum=2, baseline_steps=3)


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16)
        self.largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = (*x.shape[:-1], self.num_heads, -1)
        q, k = self.q_proj(x).view(cut), self.k_proj(x).view(cut)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (16 / self.num_heads) ** -0.5
        self.largest = float(logits.detach().abs().max())
        out: torch.Tensor = self.o_proj(x)
        return x + out * logits.softmax(-1).mean()


class Model(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = [nn.Sequential() for _ in range(2)]
        for part in block:
            part.add_module("attn", Attention(heads))
            part.add_module("mlp", nn.Linear(16, 16))
        self.blocks = nn.ModuleList(block)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(model: Model, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(2, 5, 16)).square().mean().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_no_logit_is_beyond_the_bound_and_it_is_not_far_from_them(heads: int) -> None:
    model = Model(heads)
    with start_exporter(model, 0, thresholds=QUICK) as exporter:
        train(model, 1)
        for name in ("blocks.0.attn", "blocks.1.attn"):
            bound = value(exporter, "act_attention_logit_bound", layer=name)
            largest = model.get_submodule(name).largest
            assert largest <= bound * (1 + 1e-5)
            assert bound < 10 * largest + 1


def test_growth_is_seen_against_its_own_baseline() -> None:
    model = Model()
    with start_exporter(model, 0, thresholds=QUICK) as exporter:
        train(model, 8)
        with torch.no_grad():
            model.blocks[1].attn.q_proj.weight.mul_(20)
            model.blocks[1].attn.q_proj.bias.mul_(20)
        train(model, 1)
        ratio = {
            layer: value(exporter, "act_attention_logit_bound", layer=layer)
            / value(exporter, "act_attention_logit_bound_baseline", layer=layer)
            for layer in ("blocks.0.attn", "blocks.1.attn")
        }
        assert 0.5 < ratio["blocks.0.attn"] < 2
        assert 10 < ratio["blocks.1.attn"] < 40


def test_baselines_are_saved_and_restored() -> None:
    model = Model()
    with start_exporter(model, 0, thresholds=QUICK) as exporter:
        train(model, 8)
        state = exporter.state_dict()
        before = value(exporter, "act_attention_logit_bound_baseline", layer="blocks.0.attn")
    with start_exporter(model, 0, thresholds=QUICK) as exporter:
        exporter.load_state_dict(state)
        train(model, 1)
        name = "act_attention_logit_bound_baseline"
        assert value(exporter, name, layer="blocks.0.attn") == before


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "bert", "t5"])
def test_heads_are_cut_as_the_model_says(name: str) -> None:
    model = ARCHITECTURES[name].build()
    config: Any = model.config
    dim = getattr(config, "d_kv", None) or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    heads = [tap.heads for tap in find_taps(model) if tap.heads is not None]
    assert heads
    assert {own.dim for own in heads} == {dim}
