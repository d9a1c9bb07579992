"""Faults of attention. Sources: the second seed's checklist, item 4, and the cases A04 and A14."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from tests.act_exporter.doctor.corpus import bodies, measures, own, places
from tests.act_exporter.doctor.corpus.measures import rms, shown
from tests.act_exporter.doctor.corpus.patient import Body, Patient, patient


def unbounded(random: Random) -> Patient:
    """Linear attention with exp as feature map and no normaliser: the seed's unstable block."""
    phi = random.choice([torch.exp, torch.exp2, lambda t: torch.exp(2 * t)])
    body, attention = _linear(random, phi, 64)
    scale = random.uniform(1, 2)
    for module in body.model.modules():
        if isinstance(module, own.LinearAttention):
            width = module.qkv_proj.in_features
            nn.init.normal_(module.qkv_proj.weight, std=scale / width**0.5)
    after = _context(body, attention)
    with torch.no_grad():
        attention.qkv_proj.weight.div_(2)
        before = _context(body, attention)
        attention.qkv_proj.weight.mul_(2)
    name = _name(body, attention)
    return patient(
        "unbounded feature map",
        body,
        name,
        {"unbounded-feature-map"},
        layers=places.family(f"{name}.qkv_proj", f"{name}.out_proj"),
        # Queries, keys and values doubled: a bounded map would make it twice as large.
        shown=shown("context over that at half the scale", after / before, 20),
    )


def unnormalised(random: Random) -> Patient:
    """Linear attention with a tame feature map and no normaliser: it grows with the text."""
    phi = random.choice([lambda t: F.elu(t) + 1, F.softplus, torch.sigmoid])
    body, attention = _linear(random, phi, random.choice([128, 192, 256]))
    name = _name(body, attention)
    # Values with a mean, as trained ones have: sums of them grow with their number.
    with torch.no_grad():
        attention.qkv_proj.bias[-attention.out_proj.in_features :].normal_()
    whole = _context(body, attention)
    text = body.batch
    length = text["input_ids"].shape[1]
    body.batch = {key: tensor[:, : length // 8] for key, tensor in text.items()}
    part = _context(body, attention)
    body.batch = text
    return patient(
        "unnormalised attention",
        body,
        f"{name}, length {length}",
        {"unnormalised-attention"},
        layers=places.family(f"{name}.qkv_proj", f"{name}.out_proj"),
        shown=shown("context over that of an eighth of the text", whole / part, 4),
    )


def _linear(random: Random, phi: own.Map, context: int) -> tuple[Body, own.LinearAttention]:
    """A GPT with one such attention, or with several that are the same, and the first of them."""
    body = bodies.gpt(
        random,
        name="gpt with linear attention",
        attention=lambda blocks: bodies.hybrid(
            random, blocks, lambda: bodies.linear(random, phi, False)
        ),
        context=context,
        init=random.choice(["xavier", "torch"]),
        embed_scale=50.0,  # of 0.02: a post-norm model's first block gets inputs of 1, too
    )
    body.batch = {
        key: torch.randint(3, body.vocabulary, (2, context)) for key in ("input_ids", "labels")
    }
    return body, next(m for m in body.model.modules() if isinstance(m, own.LinearAttention))


def _name(body: Body, module: nn.Module) -> str:
    return next(name for name, own_ in body.model.named_modules() if own_ is module)


def _context(body: Body, attention: own.LinearAttention) -> float:
    return rms(measures.tensors(body, "input")[f"{_name(body, attention)}.out_proj"])


def large_logits(random: Random) -> Patient:
    """Queries and keys of all blocks so large that softmax sees one token only.

    Source: Dehghani et al. 2023 (ViT-22B), Wortsman et al. 2023, arXiv:2309.14322; A04.
    """
    body = bodies.body(random, (bodies.gpt, bodies.llama, bodies.gpt2, bodies.bert, bodies.moe))
    wanted = random.uniform(60, 200)
    factor = (wanted / max(map(_largest, _pairs(body).values()))) ** 0.5
    with torch.no_grad():
        for name in _pairs(body):
            for weight, _ in _queries_keys(body.model.get_submodule(name)):
                weight.mul_(factor)
    faults = {"large-logits", "collapsed-entropy"}
    # Of small initial weights: the same matrices are many times their like, which is as right.
    faults |= {"odd-weight"} if factor >= 30 else set()
    return _scored("large logits", body, f"{wanted:.0f}", faults)


def loud_qk_norm(random: Random) -> Patient:
    """Queries and keys are normed, but with gains that let the logits grow as before.

    Source: A14, huggingface/transformers#45676: a logit scale of 1 where 1/sqrt(d) was meant.
    """
    body = bodies.body(random, (bodies.qwen3,))
    gain = random.uniform(4.5, 8)
    with torch.no_grad():
        for name, module in body.model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                module.weight.mul_(gain)
    faults = {"large-logits", "collapsed-entropy", "large-gain"}
    return _scored("loud norms of queries and keys", body, f"times {gain:.1f}", faults)


def _scored(kind: str, body: Body, what: str, faults: set[str]) -> Patient:
    pairs = _pairs(body)
    return patient(
        kind,
        body,
        what,
        faults,
        layers=frozenset().union(
            *(
                places.family(f"{name}.{part}")
                for name in pairs
                for part, _ in body.model.get_submodule(name).named_children()
            )
        ),
        shown=shown("largest logit", max(map(_largest, pairs.values())), 40)
        | shown("mean of the largest probability", max(map(_sureness, pairs.values())), 0.6),
    )


def softmax_overflow(random: Random) -> Patient:
    """Biases of queries and keys whose product is beyond fp16, and the same for all keys.

    In fp32 the softmax takes it away again. Source: huggingface/transformers PR#33317, Qwen2.
    """
    body = random.choice([bodies.gpt2, bodies.bert, bodies.gpt])(random)
    names = list(_pairs(body))
    if hasattr(body.model, "config"):
        body.model.set_attn_implementation("eager")
    else:
        for name in names:
            body.model.get_submodule(name).fused = False
    name = random.choice(names)
    sign = random.choice([-1, 1])
    (_, q_bias), (_, k_bias) = _queries_keys(body.model.get_submodule(name))
    with torch.no_grad():
        q_bias[:2] = random.uniform(50, 70)
        k_bias[:2] = sign * random.uniform(800, 1200)
    full, sick = measures.loss(body), measures.in_half(body)
    half = measures.loss(sick)
    return patient(
        "softmax overflow in fp16",
        sick,
        name,
        {"softmax-overflow", "fp16-overflow"},
        layers=places.family(
            *(f"{name}.{part}" for part, _ in body.model.get_submodule(name).named_children())
        ),
        shown=shown("NaN in fp16, finite in fp32", float(math.isnan(half) and full == full), 1),
    )


def _queries_keys(attention: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and biases that make queries, and those that make keys, as views."""
    if hasattr(attention, "c_attn"):  # GPT-2's, transposed, values beside
        weights = attention.c_attn.weight.chunk(3, dim=1)[:2]
        biases = attention.c_attn.bias.chunk(3)[:2]
        return list(zip(weights, biases, strict=True))
    names = ("query", "key") if hasattr(attention, "query") else ("q_proj", "k_proj")
    parts = [attention.get_submodule(name) for name in names]
    return [(part.weight, part.bias) for part in parts]


def _pairs(body: Body) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys by the attention's name; before rotation, which changes no sizes."""
    outputs = measures.tensors(body)
    config = getattr(body.model, "config", None)
    found = {}
    for name, module in body.model.named_modules():
        if hasattr(module, "c_attn"):
            pair = list(outputs[f"{name}.c_attn"].chunk(3, dim=-1)[:2])
        elif hasattr(module, "q_norm"):
            pair = [outputs[f"{name}.q_norm"].flatten(2), outputs[f"{name}.k_norm"].flatten(2)]
        elif hasattr(module, "q_proj"):
            pair = [outputs[f"{name}.q_proj"], outputs[f"{name}.k_proj"]]
        elif hasattr(module, "query"):
            pair = [outputs[f"{name}.query"], outputs[f"{name}.key"]]
        else:
            continue
        heads = module.heads if config is None else config.num_attention_heads
        width = pair[0].shape[-1] // heads
        q, k = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in pair)
        found[name] = (q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    return found


def _largest(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    q, k = pair
    return float((q @ k.transpose(-2, -1)).abs().max() / q.shape[-1] ** 0.5)


def _sureness(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    q, k = pair
    return float((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1).amax(-1).mean())
