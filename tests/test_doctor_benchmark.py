"""The doctor's figures: what counts as named first, and what as an alarm on a healthy model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from act_exporter.doctor import Finding, examination
from act_exporter.doctor.subject import Subject
from tests.act_exporter.doctor.corpus import draw, healthy
from tests.act_exporter.doctor.corpus.data import constant_batch
from tests.act_exporter.doctor.corpus.weights import nonfinite_weight
from tests.benchmarks.doctor import examined, judged


def _nonfinite(subject: Subject) -> Iterator[Finding]:
    """A check that knows one kind of fault only."""
    for name, parameter in subject.model.named_parameters():
        if not parameter.isfinite().all():
            yield Finding(
                fault="nonfinite-weight",
                severity="critical",
                layer=name.rpartition(".")[0],
                what="One.",
                change="It.",
                why="So.",
            )
    if subject.batches is not None:
        raise RuntimeError("broken")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch):
    check = SimpleNamespace(__name__="checks.nonfinite", check=_nonfinite)
    monkeypatch.setattr(examination, "CHECKS", (check,))
    patients = [draw(nonfinite_weight, "tuning", 0), draw(constant_batch, "tuning", 0)]
    sick = healthy("tuning", 5)
    sick.given = {"batches": []}
    next(sick.body.model.parameters()).data.fill_(float("nan"))
    return judged([examined(patient) for patient in [*patients, sick]])


def test_a_kind_that_no_check_knows_counts_against_it(figures) -> None:
    assert figures["named_first"] == 0.5
    assert figures["placed_first"] == 1.0  # a constant batch has no layer
    assert figures["confusion"] == {
        "non-finite weight": {"nonfinite-weight": 1},
        "constant batch": {"nothing": 1},
    }
    (wrong,) = figures["wrong"]
    assert wrong["right"] == ["constant-batch"]
    assert wrong["said"] == []


def test_alarms_on_healthy_ones_are_counted_and_named(figures) -> None:
    name = healthy("tuning", 5).name
    (alarmed,) = figures["alarmed"]
    assert alarmed["example"] == name
    assert figures["critical_on_healthy"] == 1
    # What was found before the check broke stands.
    assert figures["failed"] == [f"{name}: nonfinite failed: RuntimeError: broken"]
