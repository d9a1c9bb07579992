"""Healthy bodies of all architectures, of random sizes, with their own initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.act_exporter.doctor.corpus import own
from tests.act_exporter.doctor.corpus.own import Block, Part
from tests.act_exporter.doctor.corpus.patient import Batch, Body

Build = Callable[[Random], Body]


def _text(random: Random, vocabulary: int, longest: int = 40) -> Callable[[], Batch]:
    rows, length = random.randint(2, 4), random.randint(16, longest)

    def draw() -> Batch:
        tokens = torch.randint(3, vocabulary, (rows, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return draw


def _vectors(random: Random, shape: tuple[int, ...], classes: int) -> Callable[[], Batch]:
    rows = random.randint(8, 24)

    def draw() -> Batch:
        return {"x": torch.randn(rows, *shape), "labels": torch.randint(classes, (rows,))}

    return draw


def _sizes(random: Random) -> tuple[int, int, int, int]:
    """Blocks, width, heads, vocabulary."""
    heads = random.choice([2, 4])
    return random.randint(2, 6), heads * random.choice([8, 16]), heads, random.randint(50, 300)


def _named(kind: str, blocks: int, width: int) -> str:
    return f"{kind} {blocks}x{width}"


def _attention(random: Random) -> dict[str, Any]:
    return {"attn_implementation": random.choice(["eager", "sdpa"])}


def gpt2(random: Random) -> Body:
    blocks, width, heads, vocabulary = _sizes(random)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=blocks,
        n_head=heads,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        **_attention(random),
    )
    return Body(
        name=_named("gpt2", blocks, width),
        model=transformers.GPT2LMHeadModel(config),
        draw=_text(random, vocabulary),
        vocabulary=vocabulary,
    )


def _llama_like(kind: str, model: Any, config: Any, random: Random, **more: Any) -> Body:
    blocks, width, heads, vocabulary = _sizes(random)
    built = config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=random.choice([2, 3]) * width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **_attention(random),
        **{name: more[name](heads, width) for name in more},
    )
    return Body(
        name=_named(kind, blocks, width),
        model=model(built),
        draw=_text(random, vocabulary),
        vocabulary=vocabulary,
    )


def _shared(heads: int, width: int) -> int:
    return heads // 2


def llama(random: Random) -> Body:
    return _llama_like(
        "llama",
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        random,
        num_key_value_heads=_shared,
    )


def qwen3(random: Random) -> Body:
    return _llama_like(
        "qwen3",
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
        random,
        num_key_value_heads=_shared,
        head_dim=lambda heads, width: width // heads,
    )


def mixtral(random: Random) -> Body:
    return _llama_like(
        "mixtral",
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        random,
        num_key_value_heads=_shared,
        num_local_experts=lambda heads, width: 4,
        num_experts_per_tok=lambda heads, width: 2,
    )


def bert(random: Random) -> Body:
    return _llama_like("bert", transformers.BertForMaskedLM, transformers.BertConfig, random)


def t5(random: Random) -> Body:
    blocks, width, heads, vocabulary = _sizes(random)
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=blocks,
        num_heads=heads,
        decoder_start_token_id=0,
        feed_forward_proj=random.choice(["relu", "gated-gelu"]),
    )
    return Body(
        name=_named("t5", blocks, width),
        model=transformers.T5ForConditionalGeneration(config),
        draw=_text(random, vocabulary, 24),
        vocabulary=vocabulary,
    )


def encoder(random: Random) -> Body:
    blocks, width, heads, vocabulary = _sizes(random)
    pre = random.random() < 0.5
    return Body(
        name=_named(f"{'pre' if pre else 'post'}-norm nn.TransformerEncoder", blocks, width),
        model=own.Encoder(vocabulary, width, blocks, heads, pre),
        draw=_text(random, vocabulary),
        vocabulary=vocabulary,
    )


def softmax(random: Random, heads: int) -> Part:
    fused = random.random() < 0.5
    return lambda width: own.Attention(width, heads, fused)


def feed_forward(random: Random) -> Part:
    if random.random() < 0.5:
        act = random.choice([F.gelu, F.relu])
        return lambda width: own.FeedForward(width, 4 * width, act)
    return lambda width: own.GatedFeedForward(width, 3 * width, F.silu)


def gpt(
    random: Random,
    *,
    name: str = "gpt",
    attention: Callable[[int], list[Part]] | None = None,
    forward: Part | None = None,
    norm: Part | None = None,
    blocks: int | None = None,
    context: int = 64,
    pre: bool | None = None,
    init: str | None = None,
    embed_scale: float = 1.0,
) -> Body:
    """Our own GPT; what is not given is drawn.

    Args:
        random: for what is not given.
        name: for people.
        attention: for a number of blocks, each block's.
        forward: the blocks' other part.
        norm: the norms.
        blocks: how many.
        context: the longest text; given ones are this long.
        pre: whether norms come before their parts.
        init: "gpt2" (0.02, projections scaled for depth), "xavier" or "torch".
        embed_scale: see `own.GPT`.
    """
    drawn, width, heads, vocabulary = _sizes(random)
    blocks = blocks or drawn
    pre = random.random() < 0.7 if pre is None else pre
    norm = norm or random.choice([nn.LayerNorm, own.RMSNorm])
    forward = forward or feed_forward(random)
    kinds = attention(blocks) if attention else [softmax(random, heads)] * blocks
    makers = [lambda kind=kind: Block(width, kind, forward, norm, pre) for kind in kinds]
    model = own.GPT(vocabulary, context, width, makers, norm, embed_scale)
    initialise(model, init or random.choice(["gpt2", "xavier", "torch"]))
    return Body(
        name=_named(f"{'pre' if pre else 'post'}-norm {name}", blocks, width),
        model=model,
        draw=_text(random, vocabulary, context),
        vocabulary=vocabulary,
    )


def initialise(model: own.GPT, how: str) -> None:
    """As codebases do; "torch" leaves it to torch, but for the embeddings' 0.02."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if not isinstance(module, nn.Linear) or how == "torch":
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if how == "xavier":
            nn.init.xavier_normal_(module.weight)
            continue
        last = name.endswith(("out_proj", "down"))
        nn.init.normal_(
            module.weight, std=0.02 / math.sqrt(2 * len(model.blocks)) if last else 0.02
        )


def linear_gpt(random: Random) -> Body:
    """Some or all of its blocks with normalised linear attention."""
    phi = random.choice([lambda t: F.elu(t) + 1, F.relu, torch.sigmoid, F.softplus])
    return gpt(
        random,
        name="gpt with linear attention",
        attention=lambda blocks: hybrid(random, blocks, lambda: linear(random, phi, True)),
    )


def linear(random: Random, phi: own.Map, normalised: bool) -> Part:
    causal = random.random() < 0.5
    return lambda width: own.LinearAttention(width, 2, phi, normalised, causal)


def hybrid(random: Random, blocks: int, make: Callable[[], Part]) -> list[Part]:
    """Linear attention in all blocks, or in some of them, softmax in the others."""
    chosen = make()
    if random.random() < 0.5:
        return [chosen] * blocks
    places = random.sample(range(blocks), random.randint(1, blocks - 1))
    other = softmax(random, 2)
    return [chosen if index in places else other for index in range(blocks)]


def moe(random: Random) -> Body:
    experts = random.choice([4, 8])
    expert = feed_forward(random)
    return gpt(random, name="moe", forward=lambda width: own.Mixture(width, experts, expert))


def mlp(random: Random) -> Body:
    depth, width, classes = random.randint(3, 6), random.choice([32, 64, 128]), 8
    inputs = random.choice([16, 32])
    act = random.choice([nn.ReLU, nn.GELU, nn.Tanh])
    norm = random.choice([None, nn.LayerNorm, nn.BatchNorm1d])
    return Body(
        name=_named("mlp", depth, width),
        model=own.MLP(inputs, width, depth, classes, act, norm),
        draw=_vectors(random, (inputs,), classes),
    )


def cnn(random: Random) -> Body:
    channels, blocks, classes = random.choice([8, 16, 24]), random.randint(2, 5), 8
    return Body(
        name=_named("cnn", blocks, channels),
        model=own.CNN(channels, blocks, classes, nn.BatchNorm2d),
        draw=_vectors(random, (3, 12, 12), classes),
    )


TEXT: tuple[Build, ...] = (gpt2, llama, mixtral, bert, t5, qwen3, encoder, gpt, linear_gpt, moe)
VECTORS: tuple[Build, ...] = (cnn, mlp)
BODIES = TEXT + VECTORS


def body(random: Random, among: tuple[Build, ...] = BODIES) -> Body:
    """One of these, in train or in eval mode."""
    made = random.choice(among)(random)
    made.model.train(random.random() < 0.7)
    return made
