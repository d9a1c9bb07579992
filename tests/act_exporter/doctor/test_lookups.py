"""Which lookups are watched."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from act_exporter.doctor.lookups import look_up
from act_exporter.doctor.subject import Subject


class Bag(nn.Module):
    """A table of 8 rows, whose mean is one of 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(self.table(ids).log_softmax(-1), labels)


def test_an_id_beyond_a_bags_table_is_found() -> None:
    found = look_up(Subject(Bag(), (torch.tensor([[1, 8]]), torch.tensor([0])))).beyond
    assert found is not None
    assert (found.fault, found.layer) == ("token-out-of-range", "table")
    assert found.what.startswith('Id 8 at [0, 1] of "0" does not exist: table has 8 rows')


def test_a_label_beyond_the_classes_of_nll_loss_is_found() -> None:
    found = look_up(Subject(Bag(), (torch.tensor([[1, 7]]), torch.tensor([3])))).beyond
    assert found is not None
    assert found.what.startswith("Id 3 at [0] of the labels does not exist: there are 3 classes")


def test_ids_and_labels_that_exist_are_fine() -> None:
    lookups = look_up(Subject(Bag(), (torch.tensor([[1, 7]]), torch.tensor([-100]))))
    assert lookups.beyond is None
    (none,) = lookups.findings
    assert none.fault == "empty-batch"  # no label that counts
    lookups = look_up(Subject(Bag(), (torch.tensor([[1, 7]]), torch.tensor([2]))))
    assert (lookups.beyond, lookups.findings) == (None, [])
