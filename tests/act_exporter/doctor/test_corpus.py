"""The corpus itself, and the doctor on one example of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from act_exporter.doctor import examine
from tests.act_exporter.doctor.corpus import KINDS, draw, healthy
from tests.act_exporter.doctor.corpus.bodies import BODIES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models: a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_fault_is_the_first_finding(kind) -> None:
    patient = draw(kind, "tuning", 0)
    report = examine(patient.body.model, patient.body.batch, **patient.given)
    first = report.findings[0]
    assert first.fault in patient.faults, patient.name
    if patient.layers:
        assert first.layer in patient.layers, patient.name


@pytest.mark.parametrize("number", range(0, len(BODIES), 3))
def test_nothing_is_critical_in_a_healthy_model(number: int) -> None:
    patient = healthy("tuning", number)
    report = examine(patient.body.model, patient.body.batch, **patient.given)
    assert [f for f in report.findings if f.severity == "critical"] == [], patient.name


def test_kinds_are_told_apart_by_their_names() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) >= 20


def test_an_example_is_the_same_each_time_and_its_number_tells_it_from_others() -> None:
    first, again, other = (draw(KINDS[7], "tuning", number) for number in (0, 0, 1))
    assert first.name == again.name != other.name
    for one, two in zip(first.body.model.parameters(), again.body.model.parameters(), strict=True):
        assert torch.equal(one, two)
