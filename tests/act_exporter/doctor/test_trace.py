"""What is seen of a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from act_exporter.doctor.examination import examine
from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place
from tests.act_exporter.architectures import ARCHITECTURES


def test_torchs_own_encoder_shows_its_layers_in_eval_mode() -> None:
    model = ARCHITECTURES["encoder"].build()
    batch = ARCHITECTURES["encoder"].batch()
    layers = []
    for training in (True, False):
        model.train(training)
        layers.append([own.layer for own in Subject(model, batch).plain.seen])
    assert "encoder.layers.1.linear2" in layers[1]
    assert layers[0] == layers[1]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_compiled_model_shows_its_layers_and_is_not_compiled_for_it() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _examples: object) -> object:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimized = torch.compile(model, backend=backend)
    optimized(torch.randn(2, 4))
    before = len(compiled)
    seen = Subject(optimized, torch.randn(2, 4)).plain.seen
    assert [own.layer for own in seen if own.place.side == "output"] == ["0", "1", "2"]
    assert before == len(compiled) == 1


class Graph(nn.Module):
    """Multiplies by its neighbours, which are given as a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.aggregate = Product()
        self.out = nn.Linear(4, 2)

    def forward(self, neighbours: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.aggregate(neighbours, x))


class Product(nn.Module):
    def forward(self, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return matrix @ x


def test_of_a_sparse_tensor_and_a_dense_one_the_dense_one_is_seen() -> None:
    report = examine(Graph(), (torch.eye(3).to_sparse(), torch.randn(3, 4)))
    assert report.error is None
    assert [(own.layer, own.shape) for own in report.profile] == [
        ("aggregate", (3, 4)),
        ("aggregate", (3, 4)),
        ("out", (3, 4)),
        ("out", (3, 2)),
    ]


def test_what_breaks_in_the_doctors_own_look_is_no_error_of_the_forward() -> None:
    ran: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            return x

    def look(_place: Place, _tensor: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        Subject(nn.Sequential(Counted(), Counted()), torch.ones(1)).trace(look=look)
    assert len(ran) == 2


def test_a_tensor_without_values_is_left_out() -> None:
    subject = Subject(
        nn.Sequential(nn.Linear(2, 2, device="meta")), torch.ones(1, 2, device="meta")
    )
    assert subject.plain.error is None
    assert subject.plain.output.shape == (1, 2)
    assert not subject.plain.seen


def test_lazy_modules_must_have_run_once() -> None:
    report = examine(nn.Sequential(nn.LazyLinear(2)), torch.ones(1, 3))
    assert {*report.not_run} == {*report.checks}
    assert "has run once" in str(report)


def test_statistics_of_a_large_tensor_are_those_of_the_whole_and_take_little_memory() -> None:
    x = torch.randn(5_000_001) + 3
    x[:2] = torch.tensor([torch.nan, -torch.inf])
    x[-1] = -50
    with largest_allocation() as largest:
        (seen, _) = Subject(nn.Sequential(nn.Identity()), x).plain.seen
    assert largest[0] <= x.nbytes / 2
    finite = x[2:].double()
    assert seen.nonfinite == 2
    assert seen.absmax == 50
    assert seen.mean_abs == pytest.approx(float(finite.abs().mean()))
    assert seen.median_abs == pytest.approx(float(finite.abs().median()), rel=0.02)
    assert seen.rms == pytest.approx(float(finite.square().mean().sqrt()))
    assert seen.mean == pytest.approx(float(finite.mean()))
    assert seen.std == pytest.approx(float(finite.std(correction=0)))


def test_a_large_constant_has_no_deviation() -> None:
    (seen, _) = Subject(nn.Sequential(nn.Identity()), torch.full((3_000_000,), 0.1)).plain.seen
    assert seen.std < 1e-9


@contextlib.contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """Bytes of the largest tensor that an operation inside makes anew."""
    found = [0]

    class Made(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            given = [x.data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if isinstance(result, torch.Tensor) and result.data_ptr() not in given:
                found[0] = max(found[0], result.nbytes)
            return result

    with Made():
        yield found
