"""What the hooks count, and what they leave alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from act_exporter import hooks
from act_exporter.layers import Watch, find_taps
from act_exporter.probe import Probe
from act_exporter.rows import Column, Statistics
from act_exporter.sample import Sample
from tests.act_exporter.models import Checkpointed, HybridBlock, gpt


class Watched:
    """A probe on a model, and what it saw by layer."""

    def __init__(self, model: nn.Module, watch: Watch = "sublayers") -> None:
        self.taps = find_taps(model, watch)
        self.errors: list[str] = []
        self.stuck = 0
        self.probe = Probe(
            model,
            self.taps,
            exceed_threshold=100,
            on_stuck=self._note_stuck,
            on_error=lambda stage, error: self.errors.append(f"{stage}: {error}"),
        )

    def _note_stuck(self) -> None:
        self.stuck += 1
        self.probe.take(0)

    def sample(self) -> Sample:
        self.probe.take(1)
        (sample,) = self.probe.arrived()
        return sample

    def calls(self) -> dict[str, int]:
        rows = self.sample().rows[:, Column.CALLS].astype(int).tolist()
        return {
            f"{tap.layer} {tap.tensor}": count for tap, count in zip(self.taps, rows, strict=True)
        }


class Fragile(nn.Module):
    """Fails in the middle where an index is 3, which no compiler can foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.table = nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) + self.table(index)
        return out


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 8))


class TestWhatCounts:
    def test_a_training_forward(self) -> None:
        model = gpt()
        watched = Watched(model)
        model(tokens())
        assert set(watched.calls().values()) == {1}

    def test_of_a_model_that_is_a_single_layer(self) -> None:
        """The hooks that begin and end the forward are on the same module as the tap's."""
        model = nn.Linear(4, 4)
        watched = Watched(model)
        model(torch.ones(1, 4))
        assert watched.calls() == {"model output": 1}

    def test_the_numbers_are_those_of_the_tensor(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        seen = []
        model.norm.register_forward_hook(lambda *args: seen.append(args[-1].detach()))
        model(tokens())
        found = Statistics.of(watched.sample().rows)
        assert found.absmax[0] == pytest.approx(float(seen[0].abs().max()))
        assert found.std[0] == pytest.approx(float(seen[0].std(unbiased=False)), rel=1e-5)

    def test_not_an_evaluation_in_the_middle_of_training(self) -> None:
        model = gpt()
        watched = Watched(model)
        model.eval()
        model(tokens())
        model.train()
        with torch.no_grad():
            model(tokens())
        assert set(watched.calls().values()) == {0}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpointed_block_once(self, reentrant: bool) -> None:
        model = Checkpointed(reentrant)
        watched = Watched(model)
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert set(watched.calls().values()) == {1}

    def test_a_part_that_is_called_by_itself_does_not(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        model(tokens())
        model.norm(torch.full((1, 16), 1e6))
        assert watched.calls() == {"norm output": 1}

    def test_nor_does_a_part_after_a_forward_that_failed(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        with pytest.raises(IndexError):
            model(torch.full((1, 8), 256))
        model.norm(torch.ones(1, 16))
        assert watched.calls() == {"norm output": 0}

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_forward_that_failed_does_not_and_the_one_instead_of_it_does(
        self, compiled: bool
    ) -> None:
        """Out of memory, and again with a smaller batch."""
        torch._dynamo.reset()
        model = Fragile()
        watched = Watched(model, "first")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        good, bad = torch.zeros(2, dtype=torch.long), torch.full((2,), 3)
        run(torch.ones(2, 4), good)
        try:
            run(torch.full((2, 4), 1e6), bad)
        except IndexError:
            run(torch.ones(2, 4), good)
        sample = watched.sample()
        assert sample.rows[0, Column.CALLS] == 2
        assert sample.rows[0, Column.MAX] < 10
        assert watched.errors == []

    def test_nor_where_the_step_is_made_or_the_model_evaluated_all_the_same(self) -> None:
        model = Fragile()
        watched = Watched(model, "first")
        good = torch.zeros(2, dtype=torch.long)
        model(torch.ones(2, 4), good)
        with pytest.raises(IndexError):
            model(torch.full((2, 4), 1e6), torch.full((2,), 3))
        with torch.no_grad():
            model(torch.ones(2, 4), good)
        assert watched.calls() == {"first output": 1}

    def test_a_model_that_makes_its_own_step_or_evaluates_itself_does(self) -> None:
        """Its end comes after what its forward is counted by, or is not told from another's."""
        model = Fragile()
        watched = Watched(model, "first")
        calls: list[dict[str, int]] = []
        x, good = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
        step = model.table.register_forward_hook(lambda *_: calls.append(watched.calls()))
        model(x, good)
        step.remove()
        assert calls == [{"first output": 1}]

        def evaluate(*_: object) -> None:
            with torch.no_grad():
                inner.remove()
                model(x, good)

        inner = model.table.register_forward_hook(evaluate)
        model(x, good)
        model(x, good)
        assert watched.calls() == {"first output": 2}

    def test_micro_batches_are_one_sample(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        for _ in range(3):
            model(tokens())
        assert watched.calls() == {"norm output": 3}
        assert watched.calls() == {"norm output": 0}

    def test_a_module_called_three_times_is_merged(self) -> None:
        model = nn.Sequential(HybridBlock(4), HybridBlock(4))
        watched = Watched(model)
        model(torch.randn(1, 5, 4))
        assert watched.calls()["0.out_proj output"] == 3

    def test_nothing_while_paused_or_between_samples(self) -> None:
        model = gpt()
        watched = Watched(model)
        watched.probe.paused = True
        model(tokens())
        watched.probe.paused, watched.probe.sampling = False, False
        model(tokens())
        assert set(watched.calls().values()) == {0}

    def test_inputs_that_come_as_keywords(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.proj = nn.Linear(4, 4)

            def forward(self, *, mask: None = None, hidden: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.proj(hidden)
                return out

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = Attention()

            def forward(self, x: torch.Tensor) -> dict[str, object]:
                return {"extra": None, "states": [self.attention(hidden=x)]}

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([Block(), Block()])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)["states"][0]
                return x

        model = Model()
        watched = Watched(model)
        model(torch.randn(2, 4))
        assert set(watched.calls().values()) == {1}


class TestStuck:
    def run(self, watched: Watched, model: nn.Module, forwards: int) -> None:
        for _ in range(forwards):
            model(tokens())

    def test_more_micro_batches_than_usual_are_not(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        self.run(watched, model, 10)
        watched.probe.end_step()
        self.run(watched, model, 20)
        assert watched.stuck == 0

    def test_twice_as_many_without_a_step_are(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        self.run(watched, model, 10)
        watched.probe.end_step()
        self.run(watched, model, 21)
        assert watched.stuck == 1

    def test_before_the_first_step_it_takes_many(self) -> None:
        model = gpt()
        watched = Watched(model, "norm")
        self.run(watched, model, 256)
        assert watched.stuck == 0
        self.run(watched, model, 1)
        assert watched.stuck == 1


class TestErrors:
    def test_a_failing_hook_is_told_and_the_forward_goes_on(self) -> None:
        class Trap(dict):  # type: ignore[type-arg]
            def values(self) -> None:  # type: ignore[override]
                raise RuntimeError("trap")

        class Layer(nn.Module):
            def forward(self, x: torch.Tensor) -> Trap:
                return Trap(x=x)

        model = nn.Sequential(nn.Linear(2, 2), Layer())
        watched = Watched(model, "1")
        assert "x" in model(torch.ones(1, 2))
        assert watched.errors == ["hook: trap"]

    def test_a_failing_reduction_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr("act_exporter.statistics.add_on_cpu", fail)
        model = gpt()
        watched = Watched(model, "norm")
        model(tokens())
        assert watched.errors == ["hook: no memory"]

    def test_outputs_without_elements_are_called_and_no_error(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
        watched = Watched(model, "1")
        for x in (torch.empty(0, 2), torch.ones(1, 2)):
            model(x)
        assert watched.calls() == {"1 output": 2}
        assert watched.errors == []


class TestModel:
    def test_a_copy_or_a_pickle_is_not_watched(self) -> None:
        model = gpt()
        watched = Watched(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ):
            other(tokens())
        assert set(watched.calls().values()) == {0}
        model(tokens())
        assert set(watched.calls().values()) == {1}

    def test_two_probes_do_not_mix(self) -> None:
        model = gpt()
        first, second = Watched(model, "norm"), Watched(model, "norm")
        first.probe.close()
        model(tokens())
        assert first.calls() == {"norm output": 0}
        assert second.calls() == {"norm output": 1}

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_one_compiled_graph_without_a_break(self, backend: str) -> None:
        torch._dynamo.reset()
        model = gpt()
        watched = Watched(model)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for sampling in (True, False, True):
            watched.probe.sampling = sampling
            with torch._dynamo.config.patch(error_on_recompile=True):
                compiled(tokens()).sum().backward()
        assert set(watched.calls().values()) == {2}
        model.eval()
        compiled(tokens())
        assert set(watched.calls().values()) == {0}
        assert watched.errors == []

    def test_a_model_that_is_materialised_later(self) -> None:
        with torch.device("meta"):
            model = gpt()
        watched = Watched(model)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(tokens())
        assert set(watched.calls().values()) == {1}
        assert watched.errors == []

    def test_the_default_device_does_not_matter(self) -> None:
        torch.set_default_device("meta")
        try:
            with torch.device("cpu"):
                model = gpt()
            watched = Watched(model, "norm")
            model(torch.zeros(1, 8, dtype=torch.long, device="cpu"))
        finally:
            torch.set_default_device(None)
        assert watched.calls() == {"norm output": 1}

    def test_an_exported_program_has_nothing_of_ours(self) -> None:
        model = gpt()
        Watched(model)
        program = torch.export.export(model, (tokens(),))
        assert "act_exporter" not in str(program.graph)


DEVICE = torch.device("lazy", 0)  # the one that no torch needs a library for

# What makes the host wait until a device has come so far. (`tolist`, `bool`, `float`, `numpy` and
# the like of a device's tensor end in the first, or in a copy.)
_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique2"}


class OnDevice(torch.Tensor):
    """Stands for a device's tensor: its numbers are on the host, but only operators reach them."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.size(),
            strides=numbers.stride(),
            dtype=numbers.dtype,
            device=DEVICE,
            requires_grad=numbers.requires_grad,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} outside of the device")


class Device(TorchDispatchMode):
    """Runs what is asked of the device, and notes what would wait and what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies = 0
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        if name == "empty_like" and kwargs.pop("pin_memory", False):
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        if function.namespace == "act_exporter":
            with self:  # ours calls the operators that are looked at
                return getattr(hooks, f"_{name}")(*args)
        target = kwargs.get("device")
        inside = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice)]
        if not inside and (target is None or torch.device(target).type != DEVICE.type):
            return function(*args, **kwargs)
        self.calls.append(name)
        if name in _WAITING:
            self.waits.append(name)
        if name == "copy_" and not isinstance(args[0], OnDevice):
            self.copies += 1
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self.waits.append("copy_")
        if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
            self.waits.append("_to_copy")
        if target is not None:
            kwargs["device"] = "cpu"
        args, kwargs = tree_map_only(OnDevice, lambda x: x.numbers, (args, kwargs))
        result = function(*args, **kwargs)
        if name == "copy_" or target == torch.device("cpu"):
            return result
        if function._schema.name.endswith("_") and inside:
            return inside[0]
        return tree_map_only(torch.Tensor, OnDevice, result)


class Event:
    """A device's event that passes when it is told to."""

    passed = False

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def record(self, stream: object) -> None:
        assert stream == "current stream"

    def query(self) -> bool:
        return Event.passed


class Moved(nn.Module):
    """A layer whose output is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OnDevice(x.detach())


class TestAccelerator:
    """With tensors that stand for a device's; what only a device can show is in tests/gpu."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "current stream")
        monkeypatch.setattr(Event, "passed", False)
        with Device() as device:
            yield device

    def model(self, layers: int = 1) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Moved() for _ in range(layers))

            def forward(self, x: torch.Tensor) -> None:
                for layer in self.layers:
                    layer(x)

        return Model()

    def test_nothing_waits_in_hooks_or_at_the_end_of_a_step(self, device: Device) -> None:
        """One copy a step that is sampled, whatever the layers and recorded values."""
        model = self.model(layers=3)
        watched = Watched(model, "layers.*")
        for step in range(1, 4):
            model(torch.tensor([[1.0, -3.0, torch.inf, torch.nan]]))
            watched.probe.record({"loss": OnDevice(torch.tensor(2.5)), "norm": torch.tensor(1.5)})
            watched.probe.take(step)
            assert watched.probe.arrived() == []
            assert device.copies == step
        assert watched.errors == []
        assert "isfinite" in device.calls or "eq" in device.calls  # statistics are made on it
        assert device.waits == []
        Event.passed = True
        first, *_ = watched.probe.arrived()
        assert first.values == {"loss": 2.5, "norm": 1.5}
        assert Statistics.of(first.rows).absmax.tolist() == [3, 3, 3]
        assert first.rows[:, Column.NAN].tolist() == [1, 1, 1]
        assert device.waits == []

    def test_nothing_is_asked_of_the_device_between_samples(self, device: Device) -> None:
        model = self.model()
        watched = Watched(model, "layers.*")
        watched.probe.sampling = False
        model(torch.ones(1, 4))
        watched.probe.end_step()
        # An output is handed over without its graph; nothing runs on the device for that.
        assert set(device.calls) <= {"detach"}
        assert device.copies == 0
        assert watched.errors == []

    def test_a_host_that_is_far_behind_loses_a_sample_and_does_not_wait(
        self, device: Device
    ) -> None:
        model = self.model()
        watched = Watched(model, "layers.*")
        for step in range(4):
            model(torch.ones(1, 4))
            watched.probe.take(step)
        with pytest.raises(RuntimeError, match="one is lost"):
            watched.probe.take(4)
        Event.passed = True
        arrived = watched.probe.arrived()
        assert [(sample.step, sample.lost) for sample in arrived] == [
            *((step, False) for step in range(4)),
            (4, True),
        ]
        assert not arrived[4].called.any()
        assert device.waits == []

    def test_the_stand_in_notices_who_waits(self, device: Device) -> None:
        x = OnDevice(torch.ones(2))
        float(x.sum())
        torch.empty(2).copy_(x)
        assert device.waits == ["_local_scalar_dense", "copy_"]


class TestRecord:
    def test_a_recorded_tensor_is_as_it_was_then(self) -> None:
        watched = Watched(gpt())
        loss = torch.tensor(4.0, requires_grad=True) * 1
        watched.probe.record({"loss": loss})
        loss.detach().div_(4)
        assert watched.sample().values == {"loss": 4.0}
        assert watched.sample().values == {}

    def test_only_single_numbers_are_taken(self) -> None:
        watched = Watched(gpt())
        with pytest.raises(ValueError, match="loss has 3 elements"):
            watched.probe.record({"loss": torch.ones(3)})
