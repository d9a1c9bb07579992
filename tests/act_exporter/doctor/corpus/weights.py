"""Faults of weights and norms. Sources: the second seed's checklist, items 2 and 3."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from tests.act_exporter.doctor.corpus import bodies, measures, own, places
from tests.act_exporter.doctor.corpus.measures import rms, shown
from tests.act_exporter.doctor.corpus.patient import NotShownError, Patient, patient


def nonfinite_weight(random: Random) -> Patient:
    """One element of a weight is NaN or Inf: a broken checkpoint, or a step that went wrong."""
    body = bodies.body(random)
    name = random.choice([*places.matrices(body.model), *places.norms(body.model)])
    module = body.model.get_submodule(name)
    parameter = max(module.parameters(recurse=False), key=torch.Tensor.numel)
    value = random.choice([torch.nan, torch.inf])
    with torch.no_grad():
        parameter.view(-1)[random.randrange(parameter.numel())] = value
    loss = measures.loss(body)
    return patient(
        "non-finite weight",
        body,
        f"{value} in {name}",
        {"nonfinite-weight"},
        layers=places.holders(body.model, parameter),
        shown=shown("loss is not finite", float(not math.isfinite(loss)), 1),
    )


def odd_weight(random: Random) -> Patient:
    """One matrix many times its like: a wrong scale at load, an initialisation that was forgotten.

    Source: the practice guide's hundredfold growth.
    """
    body = bodies.body(random)
    name, parameter = random.choice(list(places.matrices(body.model).items()))
    factor = 10 ** random.uniform(1.7, 3)
    before = measures.tensors(body)
    with torch.no_grad():
        parameter.mul_(factor)
    after = measures.tensors(body)
    if name not in before:
        raise NotShownError(f"{name} is not called")
    return patient(
        "odd weight",
        body,
        f"{name} times {factor:.0f}",
        {"odd-weight"},
        layers=places.holders(body.model, parameter),
        shown=shown("output over the healthy one's", rms(after[name]) / rms(before[name]), 10),
    )


def norm_free(random: Random) -> Patient:
    """A deep residual net without norms: each part adds as much as there is.

    Source: "Fixup Initialization", Zhang et al. 2019, section 2.
    """
    if random.random() < 0.6:
        body = bodies.gpt(
            random,
            norm=lambda width: nn.Identity(),
            blocks=random.randint(8, 14),
            init="xavier",
            embed_scale=50.0,  # of 0.02: the stream begins at 1
        )
        stream = "blocks"
    else:
        body = bodies.cnn(random)
        body.model = own.CNN(16, random.randint(8, 14), 8, lambda channels: nn.Identity())
        body.name = f"cnn {len(body.model.blocks)}x16"
        stream = "blocks"
    found = measures.tensors(body)
    last = len(body.model.get_submodule(stream)) - 1
    growth = rms(found[f"{stream}.{last}"]) / rms(found[f"{stream}.0"])
    return patient(
        "no norms",
        body,
        "in any block",
        {"missing-norm"},
        shown=shown("last block over the first", growth, 10),
    )


def missing_norm(random: Random) -> Patient:
    """One part of a pre-norm block gets the stream as it is, which is much larger than a norm's."""
    body = bodies.gpt(
        random,
        blocks=random.randint(3, 6),
        pre=True,
        init=random.choice(["xavier", "torch"]),
        embed_scale=random.choice([500.0, 1500.0]),
    )
    index, which = random.randrange(len(body.model.blocks)), random.choice(["1", "2"])
    name = f"blocks.{index}.norm{which}"
    part = f"blocks.{index}.{'attn' if which == '1' else 'mlp'}"
    before = measures.tensors(body)
    setattr(body.model.blocks[index], f"norm{which}", nn.Identity())
    after = measures.tensors(body)
    return patient(
        "one norm missing",
        body,
        name,
        {"missing-norm"},
        layers=frozenset({name, part, f"blocks.{index}"}),
        shown=shown(
            "the part's output over the healthy one's", rms(after[part]) / rms(before[part]), 5
        ),
    )


def large_gain(random: Random) -> Patient:
    """A norm's gain far too large. Source: bigscience tr11-176B chronicles, a gain not as saved."""
    body = bodies.body(random, tuple(build for build in bodies.BODIES if build is not bodies.mlp))
    name = random.choice(places.norms(body.model))
    factor = 10 ** random.uniform(1.6, 2.8)
    before = measures.tensors(body)
    with torch.no_grad():
        body.model.get_submodule(name).weight.mul_(factor)
    after = measures.tensors(body)
    return patient(
        "large gain",
        body,
        f"{name} times {factor:.0f}",
        {"large-gain"},
        layers=frozenset({name}),
        shown=shown("output over the healthy one's", rms(after[name]) / rms(before[name]), 20),
    )


def small_epsilon(random: Random) -> Patient:
    """An epsilon that is 0 in fp16, and a padding token whose embedding is 0: 0 times Inf.

    Source: microsoft/DeepSpeed#581, pytorch/pytorch#41527.
    """
    epsilon = random.choice([1e-12, 1e-8, 1e-10])
    body = bodies.gpt(random, norm=lambda width: own.RMSNorm(width, epsilon), pre=True)
    with torch.no_grad():
        body.model.embed.weight[0] = 0
        body.model.position.weight.zero_()
    body.batch["input_ids"][:, -random.randint(1, 8) :] = 0
    full = measures.loss(body)
    sick = measures.in_half(body)
    half = measures.loss(sick)
    return patient(
        "small epsilon in fp16",
        sick,
        f"{epsilon:g}",
        {"small-epsilon"},
        layers=frozenset(places.norms(sick.model)),
        shown=shown("NaN in fp16, finite in fp32", float(math.isnan(half) and full == full), 1),
    )


def outlier_channels(random: Random) -> Patient:
    """A few channels many times the others, made up for by the weights behind: only int8 suffers.

    Source: Dettmers et al. 2022, arXiv:2208.07339; Xiao et al. 2023, arXiv:2211.10438.
    """
    body = bodies.gpt(random, pre=True, blocks=random.randint(2, 6))
    index = random.randrange(len(body.model.blocks))
    block = body.model.blocks[index]
    channels = random.sample(range(block.norm2.weight.numel()), random.randint(1, 2))
    factor = random.uniform(40, 90)
    before = measures.tensors(body, "input")
    mlp = block.mlp
    readers = [mlp.up] if isinstance(mlp, own.FeedForward) else [mlp.up, mlp.gate]
    with torch.no_grad():
        block.norm2.weight[channels] *= factor
        for reader in readers:
            reader.weight[:, channels] /= factor
    name = f"blocks.{index}.mlp.up"
    after = measures.tensors(body, "input")
    return patient(
        "outlier channels",
        body,
        f"{len(channels)} of {name}'s input times {factor:.0f}",
        {"outlier-channels"},
        layers=frozenset({f"blocks.{index}.mlp.{part}" for part in ("up", "gate")})
        | {f"blocks.{index}.norm2", f"blocks.{index}.mlp"},
        shown=shown(
            "int8 error over the healthy one's",
            int8_error(after[name], mlp.up) / int8_error(before[name], mlp.up, channels, factor),
            5,
        ),
    )


def int8_error(
    x: torch.Tensor, reader: nn.Linear, channels: list[int] | None = None, factor: float = 1.0
) -> float:
    """Share of a product that is lost where its input is rounded to int8, one scale a tensor.

    Args:
        x: the input.
        reader: the matrix.
        channels: those whose weights are to be put back to what they were.
        factor: by which they had been divided.
    """
    weight = reader.weight.detach().clone()
    if channels:
        weight[:, channels] *= factor
    scale = x.abs().max() / 127
    rounded = (x / scale).round() * scale
    exact = F.linear(x, weight)
    return rms(F.linear(rounded, weight) - exact) / rms(exact)
