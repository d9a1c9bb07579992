"""Faults of the data. Sources: the second seed's checklist, "data"; PaLM 2022, section 5.1."""

from __future__ import annotations

from random import Random

import torch

from tests.act_exporter.doctor.corpus import bodies, measures
from tests.act_exporter.doctor.corpus.measures import shown
from tests.act_exporter.doctor.corpus.patient import NotShownError, Patient, given, patient, trained


def token_out_of_range(random: Random) -> Patient:
    """A token id that the embedding does not have: another tokenizer's, or padding of -100."""
    body = bodies.body(random, bodies.TEXT)
    token = random.choice([body.vocabulary, body.vocabulary + random.randint(1, 5000), -100])
    tokens = body.batch["input_ids"]
    tokens[random.randrange(len(tokens)), random.randrange(tokens.shape[1])] = token
    try:
        measures.loss(body)
    except (IndexError, RuntimeError):
        pass
    else:
        raise NotShownError("the embedding takes it")
    return patient("token out of range", body, f"token {token}", {"token-out-of-range"})


def nonfinite_input(random: Random) -> Patient:
    """One NaN or Inf among the inputs."""
    body = bodies.body(random, bodies.VECTORS)
    value = random.choice([torch.nan, torch.inf, -torch.inf])
    x = body.batch["x"]
    x.view(-1)[random.randrange(x.numel())] = value
    loss = measures.loss(body)
    return patient(
        "non-finite input",
        body,
        f"{value}",
        {"nonfinite-input"},
        shown=shown("loss is not finite", float(loss != loss or loss == torch.inf), 1),
    )


def empty_batch(random: Random) -> Patient:
    """No label that counts, or no row at all: a mean over nothing."""
    body = bodies.body(random)
    what = random.choice(["no rows", "no labels"])
    if what == "no rows":
        body.batch = {name: tensor[:0] for name, tensor in body.batch.items()}
    else:
        body.batch["labels"].fill_(-100)
    try:
        loss = measures.loss(body)
    except (RuntimeError, ValueError, IndexError):
        loss = torch.nan
    return patient(
        "empty batch",
        body,
        what,
        {"empty-batch"},
        shown=shown("loss is not finite", float(loss != loss), 1),
    )


def constant_batch(random: Random) -> Patient:
    """The same token, or the same number, over and over: padding alone, or a broken decoder."""
    body = bodies.body(random)
    if body.vocabulary:
        body.batch["input_ids"].fill_(random.randrange(body.vocabulary))
        body.batch["labels"].copy_(body.batch["input_ids"])
        values = body.batch["input_ids"]
    else:
        body.batch["x"].fill_(random.choice([0.0, 1.0, -0.5]))
        values = body.batch["x"]
    same = float(values.unique().numel() == 1)
    return patient(
        "constant batch", body, "one value", {"constant-batch"}, shown=shown("one value", same, 1)
    )


def repeated_batches(random: Random) -> Patient:
    """A loader that gives the same batch again and again, or a few in turns."""
    body = bodies.body(random)
    different = random.choice([1, 1, 2])
    few = [body.draw() for _ in range(different)]
    body.batch = few[0]
    batches = [few[index % different] for index in range(16)]
    again = sum(torch.equal(batch["labels"], few[0]["labels"]) for batch in batches)
    return patient(
        "repeated batches",
        body,
        f"{different} in turns",
        {"repeated-batches"},
        given={**given(trained(random, body)), "batches": batches},
        shown=shown("times that the first is seen", again, 8),
    )


def odd_length(random: Random) -> Patient:
    """A text longer than there are positions."""
    body = bodies.body(random, (bodies.gpt2, bodies.bert, bodies.gpt))
    length = 64 + random.choice([1, 16, 64])
    rows = len(body.batch["input_ids"])
    tokens = torch.randint(3, body.vocabulary, (rows, length))
    body.batch = {"input_ids": tokens, "labels": tokens.clone()}
    try:
        measures.loss(body)
    except (IndexError, RuntimeError):
        pass
    else:
        raise NotShownError("the model takes it")
    # The position is an id too, of an embedding that it is out of range of.
    faults = {"odd-length", "token-out-of-range"}
    return patient("too long a text", body, f"{length} of 64 positions", faults)
