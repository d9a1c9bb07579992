"""Faults that backward shows. Sources: Pascanu et al. 2013, arXiv:1211.5063; Glorot 2010; A09."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from tests.act_exporter.doctor.corpus import bodies, measures, own
from tests.act_exporter.doctor.corpus.measures import shown
from tests.act_exporter.doctor.corpus.patient import Body, Patient, patient


def exploding(random: Random) -> Patient:
    """A recurrent net in its chaotic state: activations are bounded, gradients are not."""
    body, gain = _recurrent(random), random.uniform(3, 5)
    width = body.model.onward.in_features
    nn.init.normal_(body.model.onward.weight, std=gain / math.sqrt(width))
    return patient(
        "exploding gradients",
        body,
        f"gain {gain:.1f}",
        {"exploding-gradients"},
        shown=shown("largest gradient norm", max(_norms(body).values()), 1e3),
    )


def amplifying(random: Random) -> Patient:
    """A deep net whose layers each amplify, some three times: forward as backward."""
    body, gain = _deep(random, nn.ReLU, random.randint(10, 16)), random.uniform(3, 5)
    _spread(body, gain)
    outputs = measures.tensors(body)
    growth = measures.rms(outputs["head"]) / measures.rms(outputs["layers.0"])
    return patient(
        "layers that amplify",
        body,
        f"gain {gain:.1f}",
        # One thing by three names: where it begins, and what it does either way.
        {"growth-with-depth", "exploding-gradients", "odd-weight"},
        shown=shown("last output over the first", growth, 1e3),
    )


def vanishing(random: Random) -> Patient:
    """A deep net of sigmoids, or of tanh with small weights."""
    act = random.choice([nn.Sigmoid, nn.Tanh])
    body = _deep(random, act, random.randint(10, 16))
    gain = random.uniform(0.2, 0.3) if act is nn.Tanh else random.uniform(0.5, 1)
    _spread(body, gain)
    norms = _norms(body)
    ratio = norms["head.weight"] / max(norms["layers.0.weight"], 1e-45)
    return patient(
        "vanishing gradients",
        body,
        f"{act.__name__}, gain {gain:.2f}",
        {"vanishing-gradients"},
        shown=shown("last layer's gradient over the first's", ratio, 1e5),
    )


def _recurrent(random: Random) -> Body:
    width, length = random.choice([48, 64, 96]), random.randint(40, 80)
    rows = random.randint(4, 12)
    return Body(
        name=f"recurrent net of {width}, {length} steps",
        model=own.Recurrent(8, width, 4),
        draw=lambda: {"x": torch.randn(rows, length, 8), "labels": torch.randint(4, (rows,))},
    )


def _deep(random: Random, act: type[nn.Module], depth: int) -> Body:
    width = random.choice([32, 64, 96])
    return Body(
        name=f"{act.__name__} mlp {depth}x{width}",
        model=own.MLP(16, width, depth, 4, act, None),
        draw=lambda: {"x": torch.randn(16, 16), "labels": torch.randint(4, (16,))},
    )


def _spread(body: Body, gain: float) -> None:
    for module in body.model.layers:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain / math.sqrt(module.in_features))


def _norms(body: Body) -> dict[str, float]:
    return {
        name: float(gradient.double().norm()) for name, gradient in measures.gradients(body).items()
    }


class Root(nn.Module):
    """The root of what is positive: `where` hides the others' NaN, but 0 times its slope is NaN.

    Source: pytorch/pytorch#187297, #16317; A09 for what it looks like in training.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)


class Unit(nn.Module):
    """Rows of length 1, with a norm written out: at a row of zeros its backward is 0/0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (x > 0.5)
        length = x.square().sum(-1, keepdim=True).sqrt()
        return torch.where(length > 0, x / length, 0.0)


def nonfinite(random: Random) -> Patient:
    """A part whose forward is right and whose backward is NaN."""
    part = random.choice([Root, Unit])
    if random.random() < 0.5:
        body = bodies.mlp(random)
        indices = [
            index
            for index, module in enumerate(body.model.layers)
            if not isinstance(module, nn.Linear | nn.LayerNorm | nn.BatchNorm1d)
        ]
        index = random.choice(indices)
        body.model.layers[index] = part()
        place = f"layers.{index}"
        # What feeds it gets the first NaN: the layer before, or the norm between.
        right = {place, f"layers.{index - 1}", f"layers.{index - 2}"}
    else:
        act = part()
        body = bodies.gpt(random, forward=lambda width: own.FeedForward(width, 4 * width, F.relu))
        index = random.randrange(len(body.model.blocks))
        body.model.blocks[index].mlp.act = act
        place = f"blocks.{index}.mlp.act"
        right = {place, f"blocks.{index}.mlp", f"blocks.{index}.mlp.up"}
    bad = sum(not gradient.isfinite().all() for gradient in measures.gradients(body).values())
    finite = float(math.isfinite(measures.loss(body)))
    return patient(
        "NaN in backward only",
        body,
        f"{part.__name__} at {place}",
        {"nonfinite-gradients"},
        layers=frozenset(right),
        shown=shown("gradients with NaN, of a finite loss", bad * finite, 1),
    )


def dead(random: Random) -> Patient:
    """ReLUs that are off for every input. Source: Lu et al. 2019, arXiv:1903.06733."""
    pick = random.random()
    if pick < 0.5:
        body = bodies.gpt(random, forward=lambda width: own.FeedForward(width, 4 * width, F.relu))
        place = f"blocks.{random.randrange(len(body.model.blocks))}.mlp.up"
        right = {place, place.removesuffix(".up"), place.removesuffix("up") + "down"}
    else:
        width, depth = random.choice([32, 64]), random.randint(3, 6)
        body = bodies.mlp(random)
        body.model = own.MLP(
            body.batch["x"].shape[1], width, depth, 8, nn.ReLU, random.choice([None, nn.LayerNorm])
        )
        body.name = f"ReLU mlp {depth}x{width}"
        index = random.choice(
            [i for i, module in enumerate(body.model.layers) if isinstance(module, nn.ReLU)]
        )
        place = f"layers.{index - 1}"
        right = {place, f"layers.{index}", f"layers.{index + 1}"} | {f"layers.{index - 2}"}
    module = body.model.get_submodule(place)
    with torch.no_grad():
        module.bias.fill_(-random.uniform(8, 30))
    share = float((measures.tensors(body)[place] <= 0).float().mean())
    return patient(
        "dead units",
        body,
        place,
        {"dead-units"},
        layers=frozenset(right),
        shown=shown("share of units that are off", share, 0.99),
    )
