"""A fault that was asked for: where it is, when, and that nothing of it is left."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from act_exporter import Exporter, SettingError, start_exporter
from tests.act_exporter.models import Checkpointed, gpt, train
from tests.act_exporter.test_exporter import value

LAYER = "blocks.1.mlp.down"
FACTOR = 100.0


@pytest.fixture
def model() -> nn.Module:
    return gpt()


@pytest.fixture
def exporter(model: nn.Module) -> Iterator[Exporter]:
    with start_exporter(model, 0, run="test", gradients=False) as exporter:
        yield exporter


def absmax(exporter: Exporter, layer: str = LAYER) -> float:
    found = value(exporter, "act_layer_absmax", layer=layer, tensor="output")
    assert found is not None
    return found


def times(factor: float) -> Callable[[nn.Module, object, torch.Tensor], torch.Tensor]:
    """What a user would write by hand."""
    return lambda _module, _args, output: output * factor


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class TestWhen:
    def test_from_its_step_on_and_for_so_many(self, model: nn.Module, exporter: Exporter) -> None:
        train(model, 2)
        usual = absmax(exporter)
        exporter.inject_fault(LAYER, FACTOR, 5, steps=2)
        seen = []
        for _ in range(6):
            train(model, 1)
            seen.append(absmax(exporter) / usual > FACTOR / 5)
        assert seen == [False, False, True, True, False, False]

    def test_the_step_under_way_may_be_the_first(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 2)
        usual = absmax(exporter)
        exporter.inject_fault(LAYER, FACTOR, 3)
        train(model, 1)
        assert absmax(exporter) / usual > FACTOR / 5

    def test_a_rollback_ends_it_though_its_step_comes_again(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        exporter.reset(0)  # as a guard begins
        exporter.step(0)
        exporter.inject_fault(LAYER, FACTOR, 2)
        exporter.step(1)
        train(model, 1)
        saved = copy.deepcopy(model.state_dict())
        exporter.step(2)
        train(model, 1)
        exporter.step(3)
        spoilt = absmax(exporter)
        model.load_state_dict(saved)
        exporter.reset(1)
        exporter.step(1)
        for step in (2, 3):
            train(model, 1)
            exporter.step(step)
        assert absmax(exporter) < spoilt / 5

    @pytest.mark.parametrize(("generation", "step"), [(0, 400), (1, 2)])
    def test_a_process_that_goes_on_later_or_after_a_rollback_has_none(
        self, generation: int, step: int, model: nn.Module, exporter: Exporter
    ) -> None:
        """The same script is started again, with the same call in it."""
        exporter.inject_fault(LAYER, FACTOR, 1 if generation == 0 else 3)
        exporter.reset(generation)
        exporter.step(step)
        assert value(exporter, "act_injected_fault") is None
        assert not any(map(_is_ours, _hooks(model)))

    def test_a_restored_state_counts_too(self, model: nn.Module, exporter: Exporter) -> None:
        train(model, 3)
        state = exporter.state_dict()
        with start_exporter(gpt(), 0, run="next") as later:
            later.inject_fault(LAYER, FACTOR, 3)
            later.load_state_dict(state)
            assert value(later, "act_injected_fault") is None


class TestWhere:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradients_flow_through_it_under_checkpointing_too(self, reentrant: bool) -> None:
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        x = torch.randn(2, 4, requires_grad=True)
        with start_exporter(model, 0) as exporter:
            exporter.inject_fault("blocks.1.0", FACTOR, 1)
            injected = gradients(model, x)
        model.blocks[1][0].register_forward_hook(times(FACTOR))  # type: ignore[index]
        assert all(map(torch.equal, injected, gradients(model, x)))

    def test_backward_may_come_when_the_fault_is_over(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        exporter.inject_fault(LAYER, FACTOR, 1, steps=1)
        loss = model(torch.randint(0, 256, (2, 8))).sum()
        exporter.step(0)
        exporter.step(1)
        loss.backward()

    @pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
    def test_compiled_before_or_after_it_was_asked_for(
        self, early: bool, model: nn.Module, exporter: Exporter
    ) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        if early:
            train(compiled, 1)
        exporter.inject_fault(LAYER, FACTOR, 3, steps=1)
        train(compiled, 2 - early)
        usual = absmax(exporter)
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(compiled, 1)
        assert absmax(exporter) / usual > FACTOR / 5
        train(compiled, 1)
        assert absmax(exporter) / usual < FACTOR / 5
        assert sum(exporter._errors.values()) == 0

    def test_a_layer_without_a_hook_may_have_been_compiled(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        """A graph does not look for hooks that were not there when it was compiled."""
        torch._dynamo.reset()
        layer = "blocks.1.attn"
        assert not model.get_submodule(layer)._forward_hooks  # its input is watched
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        train(compiled, 1)
        usual = absmax(exporter, "blocks.1")
        exporter.inject_fault(layer, 1e6, 2, steps=1)
        train(compiled, 1)
        assert absmax(exporter, "blocks.1") / usual > FACTOR
        train(compiled, 1)
        assert absmax(exporter, "blocks.1") / usual < FACTOR / 5

    def test_the_output_keeps_its_format_under_autocast(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        formats: list[torch.dtype] = []
        exporter.inject_fault(LAYER, FACTOR, 1)
        model.get_submodule(LAYER).register_forward_hook(lambda *a: formats.append(a[-1].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            train(model, 1)
        assert formats == [torch.bfloat16]

    def test_under_ddp(self, model: nn.Module) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            wrapped = DistributedDataParallel(model)
            with start_exporter(wrapped, 0) as exporter:
                train(wrapped, 1)
                usual = absmax(exporter)
                exporter.inject_fault(LAYER, FACTOR, 2)
                train(wrapped, 1)
                assert absmax(exporter) / usual > FACTOR / 5
        finally:
            dist.destroy_process_group()

    def test_an_evaluation_does_not_have_it(self, model: nn.Module, exporter: Exporter) -> None:
        x = torch.randint(0, 256, (2, 8))
        with torch.no_grad():
            before = model.eval()(x)
            exporter.inject_fault(LAYER, FACTOR, 1)
            assert torch.equal(model(x), before)

    def test_of_a_tuple_the_tensor_that_is_watched(self) -> None:
        model = nn.ModuleDict({"rnn": nn.LSTM(4, 4)})
        x = torch.randn(3, 2, 4)
        with start_exporter(model, 0, watch="all") as exporter:
            usual, (state, _) = model["rnn"](x)
            exporter.inject_fault("rnn", FACTOR, 1)
            output, (same, _) = model["rnn"](x)
        assert torch.equal(output, usual * FACTOR)
        assert torch.equal(same, state)

    def test_a_copy_of_the_model_has_none(self, model: nn.Module, exporter: Exporter) -> None:
        x = torch.randint(0, 256, (2, 8))
        usual = model(x)
        exporter.inject_fault(LAYER, FACTOR, 1)
        assert torch.equal(copy.deepcopy(model)(x), usual)
        assert not torch.equal(model(x), usual)


class TestNothingIsLeft:
    @pytest.mark.parametrize("asked", ["never in force", "over", "rolled back", "closed"])
    def test_training_is_bitwise_what_it_would_be(self, asked: str) -> None:
        def weights(asked: str | None) -> list[torch.Tensor]:
            model = gpt()
            clean = copy.deepcopy(model.state_dict())
            exporter = start_exporter(model, 0, run="test")
            hooks = list(_hooks(model))
            if asked is not None:
                exporter.inject_fault(LAYER, FACTOR, 1 if asked != "never in force" else 9, steps=2)
                train(model, 3 if asked == "over" else 1)
                if asked == "rolled back":
                    exporter.reset(1)
                if asked == "closed":
                    exporter.close()
            if asked != "closed" and asked != "never in force":
                assert list(_hooks(model)) == hooks
            model.load_state_dict(clean)
            torch.manual_seed(3)
            train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1))
            exporter.close()
            return list(model.state_dict().values())

        assert all(map(torch.equal, weights(asked), weights(None)))


class TestSaidAloud:
    def test_in_the_log_when_armed_when_it_begins_and_when_it_ends(
        self, model: nn.Module, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            exporter.inject_fault(LAYER, FACTOR, 2, steps=1)
            train(model, 2)
        said = [r.getMessage() for r in caplog.records if "fault" in r.getMessage()]
        output = f"the output of {LAYER} times 100 from step 2 on"
        assert said == [
            f"a fault is armed: {output}, until step 3 begins",
            f"injected fault: {output}",
            f"the fault of {LAYER} has ended: step 3 begins",
        ]

    @pytest.mark.parametrize("step", [1, 2], ids=["at once", "later"])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_that_an_output_has_nothing_to_multiply(
        self, compiled: bool, step: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A class that torch's pytree does not know is one leaf, and no tensor."""
        torch._dynamo.reset()
        model = Wrapping()
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        with start_exporter(model, 0, run="test", watch="all") as exporter:
            exporter.inject_fault("inner", FACTOR, step)
            for number in (1, 2):
                forward(torch.randn(2, 4))
                assert value(exporter, "act_injected_fault", layer="inner") in (1, None)
                exporter.step(number)
            assert value(exporter, "act_injected_fault") is None
        told = [r for r in caplog.records if r.name == "act_exporter.faults"]
        assert [(r.levelname, r.getMessage()) for r in told[1:]] == [
            (
                "ERROR",
                "the fault of inner has not been injected: no tensor of floats was found in its"
                " last output",
            )
        ]

    def test_on_the_page(self, model: nn.Module, exporter: Exporter) -> None:
        seen = [value(exporter, "act_injected_fault")]
        exporter.inject_fault(LAYER, FACTOR, 2, steps=1)
        for _ in range(3):
            seen.append(value(exporter, "act_injected_fault", layer=LAYER))
            train(model, 1)
        assert seen == [None, 1, FACTOR, None]


class TestWrong:
    @pytest.mark.parametrize(
        ("layer", "told"),
        [
            ("blocks.1.mlp.dwn", f"one of these, for example: {LAYER}, "),
            ("*.mlp.down", f"one of these, for example: blocks.0.mlp.down, {LAYER}"),
            ("###", "layers are: embed, "),
        ],
    )
    def test_an_unknown_layer_is_answered_with_the_nearest(
        self, layer: str, told: str, exporter: Exporter
    ) -> None:
        with pytest.raises(SettingError) as caught:
            exporter.inject_fault(layer, FACTOR, 1)
        assert told in str(caught.value)

    def test_a_step_that_is_over(self, model: nn.Module, exporter: Exporter) -> None:
        train(model, 2)
        with pytest.raises(SettingError, match="step=2 must be a step to come; 2 are finished"):
            exporter.inject_fault(LAYER, FACTOR, 2)

    def test_a_second_one(self, exporter: Exporter) -> None:
        exporter.inject_fault(LAYER, FACTOR, 9)
        with pytest.raises(SettingError, match="one at a time"):
            exporter.inject_fault("embed", FACTOR, 9)

    @pytest.mark.parametrize(("factor", "steps"), [("100", None), (True, None), (2.0, 0)])
    def test_what_is_no_number(self, factor: float, steps: int | None, exporter: Exporter) -> None:
        with pytest.raises(SettingError):
            exporter.inject_fault(LAYER, factor, 1, steps=steps)


class Output:
    """What a module may return besides tensors, tuples and dicts."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Wrapping(nn.Module):
    """A layer that returns an object, in a model that returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x).hidden
        return hidden


def _hooks(model: nn.Module) -> Iterator[object]:
    for module in model.modules():
        yield from module._forward_hooks.values()


def _is_ours(hook: object) -> bool:
    return type(hook).__module__ == "act_exporter.faults"
