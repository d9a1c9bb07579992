"""Healthy models, with what healthy models have and a doctor could take for a fault."""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from tests.act_exporter.doctor.corpus import bodies, own
from tests.act_exporter.doctor.corpus.patient import Body, Patient, given, trained


def healthy(random: Random, build: bodies.Build) -> Patient:
    """One with a habit or none, and with all of a training, with half of it, or with none."""
    body = bodies.body(random, (build,))
    habit = random.choice([plain, plain, *HABITS])
    what = habit(random, body)
    step = trained(
        random, body, steps=random.choice([0, 0, 5]), half=habit is plain and random.random() < 0.25
    )
    parts = given(step, batches=random.choice([0, 8]))
    if random.random() < 0.3:
        parts = {}
    given_ = ", ".join(parts) or "model and batch alone"
    return Patient(
        kind="healthy", name=f"healthy | {body.name} | {what} | {given_}", body=body, given=parts
    )


def plain(random: Random, body: Body) -> str:
    return "as initialised"


def zeroed(random: Random, body: Body) -> str:
    """Residual branches that begin at zero: the habit of ReZero 2020 and of muP."""
    ends = ("out_proj", "down", "down_proj", "o_proj", "c_proj", "wo", "linear2", "bn2")
    for name, module in body.model.named_modules():
        if name.endswith(ends):
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)
    return "residual branches zero"


def massive(random: Random, body: Body) -> str:
    """One channel of the first position is loud. Source: Sun et al. 2024, arXiv:2402.17762."""
    if isinstance(body.model, own.GPT) and body.model.blocks[0].pre:
        with torch.no_grad():
            body.model.position.weight[0, 3] = random.uniform(100, 400) / body.model.embed_scale
        return "a massive activation"
    return "as initialised"


def padded(random: Random, body: Body) -> str:
    """Rows of unequal lengths, whose rest is masked and has no label."""
    if not hasattr(body.model, "config"):
        return "as initialised"
    draw = body.draw

    def shorter():
        batch = draw()
        mask = torch.ones_like(batch["input_ids"])
        for row in range(1, len(mask)):
            mask[row, mask.shape[1] - 2 * row :] = 0
        batch["labels"][mask == 0] = -100
        return batch | {"attention_mask": mask}

    body.draw = shorter
    body.batch = shorter()
    return "padded"


def learned(random: Random, body: Body) -> str:
    """Trained for a while on data that has something to learn."""
    draw = body.draw

    def regular():
        batch = draw()
        if body.vocabulary:
            start = batch["input_ids"][:, :1]
            steps = torch.arange(batch["input_ids"].shape[1])
            batch["input_ids"] = 3 + (start + 7 * steps) % (body.vocabulary - 3)
            batch["labels"] = batch["input_ids"].clone()
        else:
            rows = batch["x"].flatten(1)
            batch["labels"] = rows[:, :8].argmax(1)
        return batch

    body.draw = regular
    body.batch = regular()
    mode = body.model.training
    body.model.train()
    optimizer = torch.optim.AdamW(body.model.parameters(), lr=1e-3)
    for _ in range(60):
        body.loss(regular()).backward()
        torch.nn.utils.clip_grad_norm_(body.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    body.model.train(mode)
    return "trained for 60 steps"


def in_bf16(random: Random, body: Body) -> str:
    """Weights in bf16, as most checkpoints are served."""
    body.model.bfloat16()
    draw = body.draw
    if body.vocabulary is None:
        body.draw = lambda: (batch := draw()) | {"x": batch["x"].bfloat16()}
        body.batch = body.draw()
    return "weights in bf16"


HABITS = (zeroed, massive, padded, learned, learned, in_bf16)
