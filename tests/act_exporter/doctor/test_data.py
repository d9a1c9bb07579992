"""What is wrong with the batch itself."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from act_exporter.doctor import examine
from act_exporter.doctor.checks import data
from act_exporter.doctor.finding import Finding, UnusableBatchError
from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES, VOCABULARY
from tests.act_exporter.doctor.learners import assert_same, faults, learner, state_of, text


def found(subject: Subject) -> list[Finding]:
    """The findings, those before a batch proved unusable included."""
    findings: list[Finding] = []
    with contextlib.suppress(UnusableBatchError):
        findings += data.check(subject)
    return findings


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_healthy_batches_have_no_finding(name: str) -> None:
    model, batch = learner(name)
    batches = [ARCHITECTURES[name].batch() for _ in range(8)]
    assert faults(data, Subject(model, batch, batches=batches)) == []


@pytest.mark.parametrize(
    ("name", "layer"),
    [("gpt2", "inner.transformer.wte"), ("bert", "inner.bert.embeddings.word_embeddings")],
)
@pytest.mark.parametrize("bad", [VOCABULARY, -1])
def test_an_id_beyond_its_table_is_found_before_the_lookup(name: str, layer: str, bad: int) -> None:
    model, batch = learner(name)
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][1, 3] = bad
    [finding] = found(Subject(model, batch))
    assert (finding.fault, finding.severity, finding.layer) == (
        "token-out-of-range",
        "critical",
        layer,
    )
    assert f"Id {bad} at [1, 3]" in finding.what
    assert finding.evidence["rows"] == VOCABULARY


def test_after_it_nothing_else_runs_and_that_is_said() -> None:
    model, batch = learner("gpt2")
    report = examine(model, {**batch, "input_ids": batch["input_ids"] + VOCABULARY})
    assert report.findings[0].fault == "token-out-of-range"
    assert report.not_run["gradients"] == "needs ids within their tables"
    assert report.profile == ()


def test_a_label_beyond_the_classes_is_found() -> None:
    model, batch = learner("gpt2")
    [finding] = found(Subject(model, {**batch, "labels": batch["labels"] + VOCABULARY}))
    assert finding.fault == "token-out-of-range"
    assert "labels" in finding.what


def test_an_id_beyond_its_table_in_a_further_batch_is_found() -> None:
    model, batch = learner("gpt2")
    batches = [text(), text(), {**text(), "input_ids": torch.full((2, 8), VOCABULARY)}]
    [finding] = found(Subject(model, batch, batches=batches))
    assert finding.fault == "token-out-of-range"
    assert 'batch 2 of "batches"' in finding.what


@pytest.mark.parametrize(
    ("name", "layer"),
    [("gpt2", "inner.transformer.wpe"), ("bert", None)],  # BERT fails before it looks one up
)
def test_more_tokens_than_positions_is_a_matter_of_length(name: str, layer: str | None) -> None:
    model, _ = learner(name)
    [finding] = found(Subject(model, text(length=40)))
    assert (finding.fault, finding.severity) == ("odd-length", "critical")
    assert finding.layer == layer


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_found(value: float) -> None:
    model, batch = learner("mlp")
    batch["x"][2, 5] = value
    [finding] = found(Subject(model, batch))
    assert (finding.fault, finding.severity) == ("nonfinite-input", "critical")
    assert finding.evidence == {"input": "x", "nonfinite": 1, "values": 32}


def test_a_mask_of_minus_infinity_is_no_fault() -> None:
    model, batch = learner("llama")
    mask = torch.full((8, 8), -torch.inf).triu(1)[None, None].expand(2, 1, 8, 8)
    assert faults(data, Subject(model, {**batch, "attention_mask": mask})) == []


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.zeros(0, 8, dtype=torch.long)},
        {"labels": torch.full((2, 8), -100)},
        {"attention_mask": torch.zeros(2, 8, dtype=torch.long)},
    ],
)
def test_a_batch_with_nothing_to_learn_from_is_found(change: dict[str, torch.Tensor]) -> None:
    model, batch = learner("gpt2")
    findings = found(Subject(model, {**batch, **change}))
    assert (findings[0].fault, findings[0].severity) == ("empty-batch", "critical")


class Takes(nn.Module):
    """A model that takes what a test gives it."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.inner = nn.Linear(8, 8)
        self.own = forward

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.own(self, *args)


def test_one_tensor_without_elements_among_others_is_no_fault() -> None:
    model = Takes(lambda own, x, boxes: own.inner(x).square().mean() + boxes.sum())
    assert faults(data, Subject(model, (torch.randn(4, 8), torch.zeros(0, 4)))) == []
    model = Takes(lambda own, ids, boxes: own.inner(own.table(ids)).mean() + boxes.sum())
    assert faults(data, Subject(model, (torch.arange(64), torch.zeros(0, 4)))) == []


def test_a_batch_without_elements_is_found_whatever_its_tensors_are() -> None:
    model = Takes(lambda own, x, labels: own.inner(x).mean() + labels.sum())
    [finding] = found(Subject(model, (torch.zeros(0, 8), torch.zeros(0, dtype=torch.long))))
    assert (finding.fault, finding.severity) == ("empty-batch", "critical")


@pytest.mark.parametrize(
    "tokens", [torch.full((2, 8), 5), torch.arange(3, 11).expand(4, 8).clone()]
)
def test_a_batch_that_says_one_thing_is_found(tokens: torch.Tensor) -> None:
    model, _ = learner("gpt2")
    [finding] = found(Subject(model, {"input_ids": tokens, "labels": tokens}))
    assert (finding.fault, finding.severity) == ("constant-batch", "warning")


@pytest.mark.parametrize("hidden", [0.0, -1e4, -torch.inf])
def test_a_mask_without_a_name_is_no_content(hidden: float) -> None:
    model = Takes(lambda own, x, mask: (own.inner(x) + mask).softmax(-1).max())
    mask = torch.zeros(2, 8, 8)
    mask[:, :, 5:] = hidden
    assert faults(data, Subject(model, (torch.randn(2, 8, 8), mask))) == []
    assert faults(data, Subject(model, (torch.ones(2, 8, 8), mask))) == ["constant-batch"]


def test_pixels_of_one_colour_are_found() -> None:
    model, _ = learner("resnet")
    assert faults(data, Subject(model, {"x": torch.zeros(2, 3, 8, 8)})) == ["constant-batch"]


def batches(kind: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    distinct = [text() for _ in range(8)]
    if kind == "one comes again":
        return [*distinct, distinct[3]]
    if kind == "two take turns":
        return distinct[:2] * 4
    rows = torch.cat([batch["input_ids"] for batch in distinct])
    shuffled = rows[torch.randperm(len(rows))].split(2)
    return distinct + [{"input_ids": own, "labels": own} for own in shuffled]


@pytest.mark.parametrize("kind", ["one comes again", "two take turns", "rows come shuffled again"])
def test_data_that_comes_again_is_found(kind: str) -> None:
    model, batch = learner("gpt2")
    [finding] = found(Subject(model, batch, batches=iter(batches(kind))))
    assert (finding.fault, finding.severity) == ("repeated-batches", "warning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_are_compared_without_a_copy_of_all(dtype: torch.dtype) -> None:
    model = Takes(lambda own, x: own.inner(x[:, :8].float()).mean())
    batch = torch.randn(8, 16_384, dtype=dtype)
    more = [batch, *(torch.randn(8, 16_384, dtype=dtype) for _ in range(31)), batch]
    tracemalloc.start()
    try:
        assert faults(data, Subject(model, batch, batches=more)) == ["repeated-batches"]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("lengths", "own"), [([4, 4, 4, 32], 4), ([], 1)], ids=["one far longer", "one token"]
)
def test_odd_lengths_are_found(lengths: list[int], own: int) -> None:
    model, _ = learner("llama")
    more = [text(length=length) for length in lengths]
    findings = found(Subject(model, text(length=own), batches=more))
    assert findings[0].fault == "odd-length"


def test_a_column_of_ids_is_no_short_sequence() -> None:
    def loss(own: Any, users: torch.Tensor, ratings: torch.Tensor) -> torch.Tensor:
        return (own.inner(own.table(users)).mean(-1) - ratings).square().mean()

    batch = (torch.arange(64)[:, None], torch.randn(64, 1))
    assert faults(data, Subject(Takes(loss), batch)) == []


def test_lengths_beyond_what_the_model_was_made_for_are_found() -> None:
    model, _ = learner("llama")
    [finding] = found(Subject(model, text(length=48)))
    assert (finding.fault, finding.evidence["max_position_embeddings"]) == ("odd-length", 32)


def test_everything_is_as_it_was() -> None:
    model, batch = learner("resnet")  # whose norms count batches
    subject: Any = Subject(model, batch)
    before = state_of(subject)
    list(data.check(subject))
    assert_same(before, state_of(subject))
