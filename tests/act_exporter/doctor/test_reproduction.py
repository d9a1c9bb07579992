"""Scripts that reproduce: they run, with few layers and the configuration of the model."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from act_exporter.doctor.finding import NeedsMoreError
from act_exporter.doctor.reproduction import reproduce

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 40}


def built(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(getattr(transformers, f"{name_of_config(name)}")(**settings))


def name_of_config(name: str) -> str:
    return name.partition("For")[0].removesuffix("LMHeadModel") + "Config"


MODELS = {
    "GPT2LMHeadModel": {"n_layer": 7, "n_embd": 16, "n_head": 2, "vocab_size": 40},
    "LlamaForCausalLM": {**SMALL, "num_hidden_layers": 6, "initializer_range": 0.5},
    "Qwen3ForCausalLM": {
        **SMALL,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "BertForMaskedLM": {**SMALL, "num_hidden_layers": 2},
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_heads": 2,
        "num_layers": 6,
        "num_decoder_layers": 3,
        "vocab_size": 40,
        "decoder_start_token_id": 0,
    },
}


def executed(script: str) -> dict[str, Any]:
    """Its names, when it has run but for the examination."""
    names: dict[str, Any] = {}
    tree = ast.parse(script)
    tree.body.pop()
    exec(compile(tree, "script", "exec"), names)
    return names


@pytest.mark.parametrize("name", MODELS)
def test_runs_with_few_layers_of_the_same_configuration(name: str) -> None:
    model = built(name, **MODELS[name]).eval()
    tokens = torch.arange(24).view(2, 12)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    script = reproduce(nn.Sequential(model), batch)
    made = executed(script)
    small, given = made["model"], made["batch"]
    assert type(small) is type(model)
    assert not small.training
    layers = model.config.num_hidden_layers
    assert small.config.num_hidden_layers == min(layers, 4)
    assert f"with {min(layers, 4)} of its layers" in script
    for setting, value in MODELS[name].items():
        if "layer" not in setting:
            assert getattr(small.config, setting) == value
    assert given["input_ids"].shape == (2, 12)
    assert given["attention_mask"].unique().tolist() == [1]
    assert small(**given).loss.isfinite()


def test_labels_that_are_left_out_become_tokens_and_formats_stay() -> None:
    model = built("GPT2LMHeadModel", **MODELS["GPT2LMHeadModel"]).to(torch.bfloat16)
    labels = torch.tensor([[-100, -100, 39, 2]])
    made = executed(reproduce(model, {"input_ids": labels.abs().clamp_max(39), "labels": labels}))
    assert made["batch"]["labels"].min() >= 0
    assert next(made["model"].parameters()).dtype is torch.bfloat16
    assert made["model"].training


def test_the_whole_script_prints_a_report(tmp_path: Path) -> None:
    model = built("GPT2LMHeadModel", **MODELS["GPT2LMHeadModel"])
    script = tmp_path / "small.py"
    script.write_text(reproduce(model, {"input_ids": torch.arange(8).view(1, 8)}))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "checks ran" in done.stdout


def test_needs_a_model_of_transformers() -> None:
    with pytest.raises(NeedsMoreError, match="of transformers"):
        reproduce(nn.Linear(2, 2), torch.ones(1, 2))
