"""Faults of fp16. Sources: Micikevicius et al. 2018, arXiv:1710.03740; the cases A01 and A02."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import nn

from tests.act_exporter.doctor.corpus import bodies, measures, own, places
from tests.act_exporter.doctor.corpus.measures import shown
from tests.act_exporter.doctor.corpus.patient import Body, Patient, given, patient, trained


def loud_part(random: Random) -> Patient:
    """Feed-forward parts with a squared gate, whose products are beyond fp16's 65,504.

    Source: A01, huggingface/transformers#5651.
    """
    body = bodies.gpt(
        random,
        forward=lambda width: own.GatedFeedForward(
            width, 4 * width, lambda t: torch.relu(t).square()
        ),
        init="xavier",
        pre=True,
        blocks=random.randint(2, 5),
    )
    gain = random.uniform(11, 15)
    with torch.no_grad():
        for block in body.model.blocks:
            for linear in block.mlp.children():
                linear.weight.normal_(0, gain / math.sqrt(linear.in_features))
    names = [
        f"blocks.{index}.mlp.{part}"
        for index in range(len(body.model.blocks))
        for part in ("down",)
    ]
    return _overflowing(random, "fp16 overflow in a part", body, f"gain {gain:.0f}", names)


def raw_input(random: Random) -> Patient:
    """Pictures of 16 bits as they come: the first sums are beyond fp16's 65,504, a norm follows."""
    if random.random() < 0.5:
        body = bodies.cnn(random)
        names = ["stem"]
    else:
        body = bodies.mlp(random)
        width = random.choice([32, 64])
        body.model = own.MLP(
            body.batch["x"].shape[1], width, random.randint(3, 5), 8, nn.ReLU, nn.LayerNorm
        )
        body.name = f"mlp of width {width}"
        names = ["layers.0"]
    body.batch["x"] = torch.rand_like(body.batch["x"]) * random.uniform(5e4, 6.5e4)
    if isinstance(body.model, own.MLP):
        with torch.no_grad():  # as initialised for ReLU: torch's own is a third of it
            nn.init.kaiming_normal_(body.model.layers[0].weight)
    return _overflowing(random, "fp16 overflow of raw inputs", body, "16-bit numbers", names)


def residual_sum(random: Random) -> Patient:
    """A part's output and the stream, each within fp16, and their sum beyond it. Source: A02."""
    # A norm that squares in fp16 would overflow before the sum does.
    body = bodies.gpt(random, pre=True, blocks=random.randint(2, 4), norm=nn.LayerNorm)
    index, channel = random.randrange(len(body.model.blocks)), random.randrange(8)
    with torch.no_grad():
        # Biases, as the massive activations of trained models are the same for all tokens.
        for name, size in (("attn.out_proj", 3e4), ("mlp.down", 4e4)):
            module = body.model.blocks[index].get_submodule(name)
            if module.bias is None:
                module.bias = nn.Parameter(torch.zeros(module.out_features))
            module.bias[channel] = size * random.uniform(0.95, 1.1)
    names = [f"blocks.{index}"]
    return _overflowing(random, "fp16 overflow of a residual sum", body, names[0], names)


def _overflowing(random: Random, kind: str, body: Body, what: str, names: list[str]) -> Patient:
    """In fp16, as weights or by autocast with a scaler.

    Raises:
        NotShownError: fp32 is not finite, or fp16 is, or something else is the first to overflow.
    """
    full = measures.loss(body)
    more = {}
    if random.random() < 0.5:
        body, what = measures.in_half(body), f"{what}, weights in fp16"
    else:
        what = f"{what}, autocast"
        more = given(trained(random, body, half=True))
    with torch.autocast("cpu", torch.float16, enabled=bool(more)):
        outputs = measures.tensors(body)
    first = next((name for name, t in outputs.items() if not t.isfinite().all()), "")
    place = places.family(*names)
    return patient(
        kind,
        body,
        what,
        {"fp16-overflow"},
        layers=place,
        given=more,
        shown=shown(
            "fp16 alone overflows, there", float(math.isfinite(full) and first in place), 1
        ),
    )
