"""What the optimizers' steps do to the weights, against direct computations and known faults."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from act_exporter import matrices as sampled
from act_exporter.exporter import Exporter
from act_exporter.gradients import Which
from act_exporter.history import Thresholds
from act_exporter.layers import find_taps
from act_exporter.sample import Update
from act_exporter.steps import Steps
from act_exporter.torch_exporter import TorchExporter
from act_exporter.updates import Updates
from tests.act_exporter.models import gpt, train
from tests.act_exporter.test_gradients import in_two_processes
from tests.act_exporter.test_probe import Device, Event, OnDevice

PROJECTION = "blocks.0.attn.proj"
"""A watched layer with one matrix, of 256 elements: all of them are looked at."""


class Watched:
    """The updates of one model, as the exporter would take them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.errors: list[str] = []
        self.arrived: list[Update] = []
        self.updates = Updates(
            model, find_taps(model), enabled=True, on_error=lambda _, error: self._fail(error)
        )
        self.steps = Steps(model, self.take, lambda _, error: self._fail(error), self.updates)

    def take(self, step: int) -> None:
        if self.updates.sampling:
            self.updates.take(step)
        self.arrived += self.updates.arrived()

    def _fail(self, error: Exception) -> None:
        self.errors.append(f"{type(error).__name__}: {error}")

    @property
    def seen(self) -> list[int]:
        """The steps that were looked at."""
        return [update.step for update in self.arrived]

    def close(self) -> None:
        self.steps.close()
        self.updates.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched(gpt())
    yield watched
    assert watched.errors == []
    watched.close()


def backward(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 9))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim >= 2]


def exporter_of(model: nn.Module, gradients: Which = True) -> Exporter:
    return TorchExporter(
        model,
        run="test",
        rank=0,
        watch="blocks",
        sample_every=1,
        thresholds=Thresholds(window=40, window_minimum=10),
        gradients=gradients,
    )


def shown(exporter: Exporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(name, {"run": "test", "rank": "0", **labels})


class Resumed(NamedTuple):
    """What came of a resume: the first update, and what was said of it five steps later."""

    first: float
    verdict: str | None
    peak_ratio: float
    gradient_calm: bool


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


class TestValues:
    def test_are_those_of_the_weights_before_and_after(self, watched: Watched) -> None:
        """Of larger matrices than are read as a whole, those of a sample."""
        model = watched.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            backward(model)
            before = [parameter.detach().clone() for parameter in matrices(model)]
            old = model.get_submodule(PROJECTION).weight.detach().clone()
            optimizer.step()
            changes = [new.detach() - was for new, was in zip(matrices(model), before, strict=True)]
            change = model.get_submodule(PROJECTION).weight.detach() - old
            optimizer.zero_grad()
            elements = sum(parameter.numel() for parameter in before)
            update = watched.arrived[-1]
            rms = norm(changes) / math.sqrt(elements) / 0.01
            assert update.values["update_rms"] == pytest.approx(rms, rel=0.1)
            ratio = norm(changes) / norm(before)
            assert update.values["update_ratio"] == pytest.approx(ratio, rel=0.1)
            assert update.ratios[PROJECTION] == pytest.approx(norm([change]) / norm([old]))
            assert update.unchanged[PROJECTION] == 0
        assert watched.seen == [1, 2, 3]

    def test_are_of_each_groups_own_learning_rate(self, watched: Watched) -> None:
        """Sign descent moves each weight by its rate: the quotient is 1 whatever the rates are."""
        groups = [
            {"params": watched.model.blocks.parameters(), "lr": 0.1},
            {"params": watched.model.embed.parameters(), "lr": 1e-4},
            {"params": watched.model.head.parameters(), "lr": 0.0},
        ]
        backward(watched.model)
        for parameter in watched.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
        torch.optim.SGD(groups, lr=0.1).step()
        # The position's table is in no group: the next step of any of these ends the look.
        assert watched.arrived == []
        train(watched.model, 2)
        update = watched.arrived[0]
        assert update.values["update_rms"] == pytest.approx(1, rel=1e-3)
        assert update.ratios["head"] == 0
        assert "head" not in update.unchanged

    def test_of_a_learning_rate_of_0_there_are_none(self, watched: Watched) -> None:
        train(watched.model, 1, torch.optim.AdamW(watched.model.parameters(), lr=0.0))
        (update,) = watched.arrived
        assert update.values == {"update_ratio": 0.0}
        assert update.unchanged == {}

    def test_of_a_rate_that_nobody_knows_the_quotient_is_missing(self, watched: Watched) -> None:
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)
        backward(watched.model)
        optimizer.step(lambda: optimizer.param_groups[0].update(lr=0.1) or 0.0)  # type: ignore
        optimizer.param_groups[0]["lr"] = None
        watched.updates.begin(optimizer)
        with torch.no_grad():
            watched.model.get_submodule("head").weight.add_(1)
        watched.updates.end(optimizer)
        watched.take(2)
        assert watched.arrived[-1].values.keys() == {"update_ratio", "update_unchanged_ratio"}

    def test_nan_is_told(self, watched: Watched) -> None:
        backward(watched.model)
        gradient = watched.model.get_submodule(PROJECTION).weight.grad
        assert gradient is not None
        gradient.fill_(math.nan)
        torch.optim.SGD(watched.model.parameters(), lr=0.1).step()
        (update,) = watched.arrived
        assert math.isnan(update.values["update_rms"])
        assert math.isnan(update.ratios[PROJECTION])
        assert math.isfinite(update.ratios["blocks.1"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_what_is_rounded_away_is_counted(self, dtype: torch.dtype) -> None:
        """Half of the weights are so large that the step is less than their spacing."""
        model = gpt().to(dtype)
        watched = Watched(model)
        weight = model.get_submodule(PROJECTION).weight
        with torch.no_grad():
            weight.fill_(2.0**-20)
            weight[:8] = 2.0**40
        backward(model)
        assert weight.grad is not None
        weight.grad.fill_(1.0)
        weight.grad[:4] = 0.0  # of these nothing was asked
        torch.optim.SGD(model.parameters(), lr=1e-4).step()
        (update,) = watched.arrived
        expected = 4 / 12 if dtype is not torch.float64 else 0
        assert update.unchanged[PROJECTION] == pytest.approx(expected)
        assert watched.errors == []
        watched.close()

    def test_frozen_and_unused_weights_do_not_count(self, watched: Watched) -> None:
        model = watched.model
        model.blocks[1].requires_grad_(False)
        model.spare = nn.Linear(3, 3)
        train(model, 3)
        assert watched.seen == [1, 2, 3]
        update = watched.arrived[-1]
        assert "blocks.0" in update.ratios
        assert "blocks.1" not in update.ratios

    @pytest.mark.parametrize(
        "shape", [(1, 5), (4096, 4096), (768, 50257), (30, 2048), (512, 512), (64, 64, 3, 3)]
    )
    def test_the_sample_is_of_all_columns_and_rows(self, shape: tuple[int, ...]) -> None:
        """A distance of whole rows would see one column for ever."""
        taken = sampled.sample(torch.empty(shape, dtype=torch.int8))
        stride, count, width = taken.stride(0), len(taken), shape[-1]
        places = torch.arange(count) * stride
        assert min(math.prod(shape), 350) <= count <= 1024
        columns = torch.bincount(places % width, minlength=width)
        quarters = columns.split(-(-width // 4))
        assert all(len(part) == 0 or int(part.sum()) > count / 8 for part in quarters[:4]) or (
            width < 8
        )
        assert columns.max() <= max(2 * count / width, 2) or width < 8
        assert places[-1] > math.prod(shape) - 1 - stride


class TestOptimizers:
    def test_two_of_one_model_are_one_update(self, watched: Watched) -> None:
        """The step ends with the first of them: the second joins before anything is told."""
        model = watched.model
        halves = [
            torch.optim.SGD(model.blocks.parameters(), lr=1.0),
            torch.optim.SGD([model.embed.weight, model.position, model.head.weight], lr=1.0),
        ]
        for _ in range(14):
            backward(model)
            for optimizer in halves:
                optimizer.step()
            model.zero_grad()
            watched.arrived += watched.updates.arrived()
        assert watched.seen == list(range(1, 15))
        for update in watched.arrived:
            assert {"embed", "head", "blocks.0", "blocks.1"} <= update.ratios.keys()

    def test_one_a_parameter_in_backward_is_one_update(self, watched: Watched) -> None:
        model = watched.model
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            backward(model)
        watched.take(4)
        assert watched.seen[:2] == [1, 2]
        for update in watched.arrived:
            assert {"embed", "head", "blocks.0", "blocks.1"} <= update.ratios.keys()

    def test_a_closure_may_make_the_gradients(self, watched: Watched) -> None:
        """Some trainers do so with every optimizer: before the step there is none."""
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return backward(watched.model)

        optimizer.step(closure)  # type: ignore[arg-type]
        (update,) = watched.arrived
        assert update.values.keys() == {"update_ratio", "update_rms", "update_unchanged_ratio"}

    def test_a_new_one_in_place_of_the_old_is_no_second_update(self, watched: Watched) -> None:
        watched.model.spare = nn.Linear(3, 3)  # in no optimizer: no look is complete by itself
        stepped = list(watched.model.blocks.parameters())
        for _ in range(3):
            backward(watched.model)
            for parameter in stepped:
                assert parameter.grad is not None
                parameter.grad.fill_(1.0)
            torch.optim.SGD(stepped, lr=0.5).step()
        for update in [*watched.arrived, *watched.updates.arrived()]:
            assert update.values["update_rms"] == pytest.approx(1, rel=1e-3)

    def test_one_that_calls_its_base_is_one_update(self, watched: Watched) -> None:
        class Averaging(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        train(watched.model, 3, Averaging(watched.model.parameters(), lr=0.1))
        assert watched.seen == [1, 2, 3]

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_step_that_a_scaler_skips_is_none(self, watched: Watched, fused: bool) -> None:
        """A fused optimizer is called all the same and leaves all weights unchanged."""
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1, fused=fused)
        for step in range(3):
            tokens = torch.randint(0, 256, (2, 8))
            loss = watched.model(tokens).square().mean() * (math.inf if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert len(watched.arrived) == 2
        for update in watched.arrived:
            assert 0 < update.values["update_rms"] < math.inf
            assert update.values["update_unchanged_ratio"] < 0.5

    def test_a_step_that_raises_does_not_count(self, watched: Watched) -> None:
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)

        def closure() -> float:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(closure)
        train(watched.model, 2, optimizer)
        assert watched.seen == [1, 2]

    def test_of_another_model_are_not_looked_at(self, watched: Watched) -> None:
        train(gpt(), 2)
        assert watched.arrived == []


class TestWhen:
    def test_each_tenth_step_once_there_is_a_window(self, watched: Watched) -> None:
        watched.updates.look_often(learnt=True)
        train(watched.model, 45)
        assert watched.seen == [*range(1, 11), 20, 30, 40]

    def test_each_step_where_there_is_no_window_yet(self, watched: Watched) -> None:
        train(watched.model, 30)
        assert watched.seen == list(range(1, 31))

    def test_only_in_sampled_steps_and_not_in_a_pause(self, watched: Watched) -> None:
        watched.updates.sampling = False
        train(watched.model, 2)
        watched.updates.sampling = True
        watched.steps.paused = True
        train(watched.model, 2)
        watched.steps.paused = False
        assert watched.arrived == []
        train(watched.model, 1)
        assert len(watched.arrived) == 1

    def test_not_while_a_graph_is_captured(
        self, watched: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("act_exporter.steps.capturing", lambda: True)
        train(watched.model, 2)
        assert watched.arrived == []

    def test_parameters_may_be_replaced(self, watched: Watched) -> None:
        train(watched.model, 1)
        for module in watched.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
        watched.model.optimizer = None  # type: ignore[assignment]
        del parameter
        gc.collect()
        train(watched.model, 2)
        assert "head" in watched.arrived[-1].ratios

    def test_of_very_many_matrices_some_of_each_depth(self) -> None:
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))
        looked = Updates(model, find_taps(model, "*"), enabled=True, on_error=pytest.fail)
        places = [int(layer.split(".")[1]) for layer in looked._matrices.layers]
        assert 100 <= len(places) <= 128
        assert places[0] == 0
        assert places[-1] == 499


class TestDevice:
    def test_nothing_waits_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "current stream")
        monkeypatch.setattr(Event, "passed", False)
        monkeypatch.setattr(sampled, "_PLAIN", (OnDevice,))
        numbers = [torch.ones(64, 64), torch.ones(3, 5)]
        with Device() as device:
            model = nn.Module()
            for place, tensor in enumerate(numbers):
                parameter = nn.Parameter(OnDevice(tensor))
                parameter.grad = OnDevice(torch.ones_like(tensor))
                model.register_parameter(f"weight{place}", parameter)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            optimizer.found_inf = OnDevice(torch.zeros(1))  # type: ignore[attr-defined]
            looked = Updates(model, [], enabled=True, on_error=lambda _, error: pytest.fail(error))
            looked.begin(optimizer)
            for tensor in numbers:
                tensor.sub_(0.5)
            looked.end(optimizer)
            looked.take(7)
            assert looked.arrived() == []
            assert device.waits == []
            assert device.copies == 2
            Event.passed = True
            (update,) = looked.arrived()
            assert device.waits == []
        assert update.step == 7
        assert update.values == {
            "update_ratio": pytest.approx(0.5),
            "update_rms": pytest.approx(1.0),
            "update_unchanged_ratio": 0.0,
        }


class TestModel:
    def test_is_not_kept_by_us(self) -> None:
        watched = Watched(gpt())
        backward(watched.model)
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)
        watched.updates.begin(optimizer)  # and then the step fails
        weight = weakref.ref(watched.model.get_submodule("head").weight)
        del watched.model, optimizer
        gc.collect()
        assert weight() is None
        watched.close()

    def test_is_not_looked_at_without_gradients(self) -> None:
        model = gpt()
        with exporter_of(model, gradients=False) as exporter:
            train(model, 2)
            assert exporter._training.update is None
            assert exporter._instrumentation._updates.series == 0

    @pytest.mark.parametrize("name", ["_begin", "_end", "_take", "_send", "_learn_matrices"])
    def test_survives_a_fault_of_ours(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ArithmeticError("broken")

        weights = []
        for watch in (False, True):
            model = gpt()
            watched = Watched(model) if watch else None
            if watched is not None:
                monkeypatch.setattr(Updates, name, fail)
            torch.manual_seed(3)
            train(model, 12)
            weights.append([parameter.detach() for parameter in model.parameters()])
            if watched is not None:
                assert "ArithmeticError: broken" in watched.errors
                watched.close()
        assert all(map(torch.equal, *weights))

    def test_is_bitwise_what_it_is_without_us(self) -> None:
        weights = []
        for watch in (False, True):
            model = gpt()
            torch.manual_seed(3)
            with exporter_of(model) if watch else contextlib.nullcontext() as exporter:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                train(model, 15, optimizer)
                random = torch.rand(4)
            if exporter is not None:
                assert exporter._training.update is not None
                assert exporter._errors["update"] == 0
            weights.append([*(parameter.detach() for parameter in model.parameters()), random])
        assert all(map(torch.equal, *weights))


class TestExporter:
    def test_shows_the_last_update_that_was_looked_at(self) -> None:
        model = gpt()
        with exporter_of(model) as exporter:
            train(model, 2, torch.optim.AdamW(model.parameters(), lr=1e-3))
            assert 0.5 < (shown(exporter, "act_update_rms") or 0) < 1.1
            assert (shown(exporter, "act_update_ratio") or 0) > 0
            assert shown(exporter, "act_update_unchanged_ratio") == 0
            assert (shown(exporter, "act_layer_update_ratio", layer="blocks.1") or 0) > 0
            assert shown(exporter, "act_layer_update_unchanged_ratio", layer="blocks.1") == 0
            train(model, 1, torch.optim.AdamW(model.parameters(), lr=0.0))
            train(model, 1)
            assert shown(exporter, "act_update_unchanged_ratio") is None

    def test_takes_steps_that_are_told(self) -> None:
        """As the guard does: after all optimizers, and with numbers of its own."""
        model = gpt()
        with exporter_of(model) as exporter:
            exporter.step(40)
            for step in (41, 42):
                train(model, 1)
                exporter.step(step)
                assert exporter._training.update is not None
                assert exporter._training.update.step == step

    def test_forgets_an_undone_update_and_looks_at_the_next_ten(self) -> None:
        model = gpt()
        with exporter_of(model) as exporter:
            train(model, 60)
            assert exporter._numbers.is_learnt("update_rms")
            exporter.reset(generation=1)
            assert shown(exporter, "act_update_ratio") is None
            seen = []
            for _ in range(25):
                train(model, 1)
                assert exporter._training.update is not None
                seen.append(exporter._training.update.step)
            assert seen[:10] == list(range(61, 71))
            assert set(seen[10:]) <= {70, 80}

    def test_looks_at_nothing_in_a_pause(self) -> None:
        model = gpt()
        with exporter_of(model) as exporter:
            with exporter.paused():
                train(model, 1)
            assert exporter._instrumentation._updates.wanted
            train(model, 1)
            assert exporter._training.update is not None
            assert exporter._training.update.step == 1


def _sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    watched = Watched(model)  # all its parameters will be gone
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        backward(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
        optimizer.step()
    assert watched.errors == []
    assert watched.seen == [1, 2]
    assert watched.arrived[-1].values["update_rms"] == pytest.approx(1, rel=1e-3)
    assert "blocks.1.mlp.down" in watched.arrived[-1].ratios


class TestRanks:
    def test_each_looks_at_its_own_shards(self, tmp_path: Path) -> None:
        mp.start_processes(
            in_two_processes, (_sharded, str(tmp_path / "store")), nprocs=2, start_method="spawn"
        )


class TestFaults:
    """Two faults that no activation shows, as they were met in the field."""

    def test_a_resume_that_has_lost_the_step_counter_is_a_resume_fault(self) -> None:
        """Adam corrects its moments for a beginning that was long ago: 2.24 times too far."""
        calm = self.resume(lambda state: None)
        assert calm.verdict is None
        assert math.isnan(calm.peak_ratio)
        lost = self.resume(lambda state: state["step"].zero_())
        assert lost.verdict == "resume"
        assert lost.first / calm.first == pytest.approx(2.236, rel=0.02)
        assert lost.peak_ratio > 1.5
        assert lost.gradient_calm

    def test_lost_moments_are_one_too(self) -> None:
        def lose(state: dict[str, torch.Tensor]) -> None:
            for tensor in state.values():
                tensor.zero_()

        assert self.resume(lose).verdict == "resume"

    def test_the_same_update_later_on_has_no_verdict(self) -> None:
        """It is on the page, and people are told by its own alert."""
        late = self.resume(lambda state: state["step"].zero_(), after=15)
        assert late.verdict is None
        assert late.peak_ratio > 1.5

    def resume(
        self, change: Callable[[dict[str, torch.Tensor]], object], after: int = 0
    ) -> Resumed:
        """Train, save, load and train on; `change` is done to each parameter's loaded state."""
        torch.manual_seed(1)
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        with exporter_of(model) as exporter:
            train(model, 160, optimizer)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            kept = exporter.state_dict()
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        with exporter_of(model) as exporter:
            exporter.load_state_dict(kept)
            torch.manual_seed(2)
            train(model, after, optimizer)
            exporter._instrumentation._updates.look_often(learnt=True)
            for state in optimizer.state.values():
                change(state)
            train(model, 1, optimizer)
            assert exporter._training.update is not None
            first = exporter._training.update.values["update_rms"]
            train(model, 5, optimizer)
            now = exporter._training
            return Resumed(
                first,
                now.verdict,
                now.signals["update_rms"].peak_ratio,
                math.isnan(now.signals["grad_norm"].peak_ratio),
            )

    def test_in_bf16_a_third_of_the_weights_are_left_unchanged_and_in_float32_none(self) -> None:
        shares = {}
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(1)
            model = gpt().to(dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
            with exporter_of(model) as exporter:
                for _ in range(100):
                    backward(model)
                    optimizer.step()
                    optimizer.zero_grad()
                assert exporter._training.update is not None
                shares[dtype] = exporter._training.update.values["update_unchanged_ratio"]
                assert exporter._training.verdict is None
        assert shares[torch.float32] < 0.001
        assert shares[torch.bfloat16] > 0.3
