"""Small models of the kinds that people train, each with its batch: random weights, no downloads.

Dropout is left as each model has it, so that a disturbed random number generator would be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.act_exporter.models import HybridBlock

VOCABULARY = 64
WIDTH = 32

Batch = dict[str, torch.Tensor]

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of model.

    Attributes:
        build: makes the model.
        batch: makes a random batch, the model's keyword arguments.
        loss: of what the model returned.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], torch.Tensor]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LLAMA, head_dim=16))


def bert() -> nn.Module:
    options = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**options))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _text() -> Batch:
    tokens = torch.randint(3, VOCABULARY, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


class ResidualBlock(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if before != after:
            self.downsample.append(nn.Conv2d(before, after, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.downsample(x))


class ResNet(nn.Module):
    """Stages of blocks held as attributes, as torchvision's are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 8))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16), ResidualBlock(16, 16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.conv1(x)))
        return self.fc(x.mean((-2, -1)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Encoder(nn.Module):
    """torch's own encoder, whose attention never calls its out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)))


class StableBlock(nn.Module):
    """`HybridBlock` with elu + 1 as its feature map, smaller weights and norms before the parts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**-0.25
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        nn.init.normal_(self.qkv_proj.weight, std=0.02)
        self.out_proj = nn.Linear(dim, dim)
        self.ln1 = nn.LayerNorm(dim)
        self.ln2 = nn.LayerNorm(dim)
        nn.init.constant_(self.ln1.weight, 0.1)
        nn.init.constant_(self.ln2.weight, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(self.ln1(x)).chunk(3, dim=-1)
        q, k = (F.elu(q) + 1) * self.scale, (F.elu(k) + 1) * self.scale
        x = x + self.out_proj(q @ (k.transpose(-2, -1) @ v))
        return x + self.out_proj(F.gelu(self.out_proj(self.ln2(x))))


class Hybrid(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block(16) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _classes(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), torch.zeros(output[..., 0].numel()).long())


def _to_one(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def _vectors(*shape: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(shape)}


ARCHITECTURES = {
    **{
        build.__name__: Architecture(build=build, batch=_text, loss=_own_loss)
        for build in (gpt2, llama, mixtral, qwen3, bert, t5)
    },
    "resnet": Architecture(build=ResNet, batch=_vectors(2, 3, 8, 8), loss=_classes),
    "mlp": Architecture(build=MLP, batch=_vectors(4, 8), loss=_classes),
    "encoder": Architecture(
        build=Encoder,
        batch=lambda: {"x": torch.randint(0, VOCABULARY, (2, 8))},
        loss=_classes,
    ),
    "unstable": Architecture(
        build=lambda: Hybrid(HybridBlock), batch=_vectors(2, 10, 16), loss=_to_one
    ),
    "stable": Architecture(
        build=lambda: Hybrid(StableBlock), batch=_vectors(2, 10, 16), loss=_to_one
    ),
}
