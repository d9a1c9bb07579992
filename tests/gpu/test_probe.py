"""What only a CUDA device can show of the hooks: that nothing waits for it, and its own graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from act_exporter import start_exporter
from act_exporter.memory import device_memory
from act_exporter.rows import Column, Statistics
from deploy.demo.train import GPT
from tests.act_exporter.test_probe import Watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=64, heads=2, context=32).cuda()


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 32), device="cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device raises, from here on."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_in_a_run(model: GPT, request: pytest.FixtureRequest) -> None:
    """Hooks, the end of a step, record: eager, each step sampled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start_exporter(model, 0) as exporter:
        batch = tokens()

        def step() -> None:
            loss = model(batch).square().mean()
            loss.backward()
            exporter.record(loss=loss)
            optimizer.step()
            optimizer.zero_grad()

        step()  # kernels are compiled and memory is pinned
        request.getfixturevalue("no_waiting")
        for _ in range(10):
            step()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        step()
        assert sum(exporter._errors.values()) == 0
        assert exporter._training.layers is not None
        assert exporter._training.layers.calls.min() >= 10
        assert exporter._training.update is not None
        assert exporter._training.update.values["update_rms"] > 0


def test_numbers_are_those_of_the_tensor(model: GPT) -> None:
    watched = Watched(model, "norm")
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *args: seen.append(args[-1].detach()))
    model(tokens())
    watched.probe.take(1)
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    found = Statistics.of(sample.rows)
    assert found.absmax[0] == pytest.approx(float(seen[0].abs().max()))
    assert found.std[0] == pytest.approx(float(seen[0].double().std(unbiased=False)), rel=1e-4)
    assert watched.errors == []


def test_training_is_bitwise_what_it_is_without_us() -> None:
    def run(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        probe = Watched(model) if watched else None
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.randn(16, 32, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            assert probe.errors == []
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, run(False), run(True)))


def test_a_model_that_is_moved_to_the_device_while_it_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    watched = Watched(model)
    model(torch.ones(1, 4))
    model.cuda()
    model(torch.ones(1, 4, device="cuda"))
    watched.probe.take(1)
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    assert sample.rows[:, Column.CALLS].tolist() == [2]
    assert watched.errors == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to("cuda:1")
    watched = Watched(model)
    model(torch.ones(1, 4, device="cuda:1"))
    watched.probe.take(1)
    torch.cuda.synchronize(1)
    (sample,) = watched.probe.arrived()
    assert sample.rows[:, Column.CALLS].tolist() == [1]


def test_compiled_for_the_device(model: GPT) -> None:
    """One graph, no waiting, one call a forward."""
    torch._dynamo.reset()
    watched = Watched(model)
    compiled = torch.compile(model, fullgraph=True)
    batch = tokens()
    compiled(batch).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(batch).sum().backward()
        watched.probe.take(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    assert set(sample.rows[:, Column.CALLS].tolist()) == {2}
    assert watched.errors == []


def test_a_graph_that_is_captured_by_hand_is_seen_at_each_replay(model: GPT) -> None:
    watched = Watched(model, "norm")
    batch = tokens()
    model(batch)  # memory is reserved and kernels are compiled
    watched.probe.forget()
    watched.probe.sampling = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch)
    for _ in range(3):
        graph.replay()
    watched.probe.take(1)
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    assert sample.rows[:, Column.CALLS].tolist() == [3]
    assert watched.errors == []


def test_a_graph_may_be_captured_though_nothing_was_sampled_before(model: GPT) -> None:
    """Kernels are ready from the start, or torch's are captured."""
    watched = Watched(model)
    watched.probe.sampling = False
    batch = tokens()
    model(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch)
    graph.replay()
    watched.probe.take(1)
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    assert set(sample.rows[:, Column.CALLS].tolist()) == {1}
    assert watched.errors == []


def test_graphs_that_a_compiler_makes_can_be_sampled_or_not(model: GPT) -> None:
    torch._dynamo.reset()
    watched = Watched(model)
    compiled = torch.compile(model, mode="reduce-overhead")
    batch = tokens()
    for number in range(10):
        watched.probe.sampling = number % 2 == 0
        torch.compiler.cudagraph_mark_step_begin()
        compiled(batch).sum().backward()
    watched.probe.take(1)
    torch.cuda.synchronize()
    (sample,) = watched.probe.arrived()
    assert set(sample.rows[:, Column.CALLS].tolist()) == {5}
    assert watched.errors == []


def test_device_memory_is_on_the_page(model: GPT) -> None:
    found = device_memory()
    allocated, limit = found[str(next(model.parameters()).device)]
    assert 0 < allocated < limit
