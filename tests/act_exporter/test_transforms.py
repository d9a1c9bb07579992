"""What people do to a model between its definition and its gradients, with our hooks in it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from act_exporter import start_exporter
from act_exporter.rows import Statistics
from deploy.demo.train import GPT
from tests.act_exporter.models import gpt
from tests.act_exporter.test_probe import Watched, tokens


class TestFunctional:
    """Skipped, as the hooks' module says: no statistics of it, no error, no warning."""

    def mlp(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def test_functional_call_counts_as_the_call_that_it_is(self) -> None:
        model = self.mlp()
        watched = Watched(model)
        parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, parameters, torch.ones(2, 3))
        assert set(watched.calls().values()) == {1}
        assert watched.errors == []

    def test_fake_tensors_have_nothing_to_be_seen(self) -> None:
        """Planners run a model on them to learn shapes and memory."""
        model = self.mlp()
        watched = Watched(model)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            out = model(mode.from_tensor(torch.ones(2, 3)))
        assert out.shape == (2, 1)
        assert watched.errors == []
        model(torch.ones(2, 3))
        assert set(watched.calls().values()) == {1}

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("transform", ["grad", "vmap", "per sample", "jvp", "jacrev"])
    def test_a_transform_sees_the_same_and_we_see_nothing(
        self, transform: str, compiled: bool
    ) -> None:
        torch._dynamo.reset()
        model = self.mlp()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        x = torch.randn(5, 3)

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.func.functional_call(model, parameters, x)
            return out.square().mean()

        def value() -> Any:
            if transform == "grad":
                return torch.func.grad(loss)(parameters, x)
            if transform == "vmap":
                return torch.func.vmap(model)(x)
            if transform == "per sample":
                return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
            if transform == "jvp":
                return torch.func.jvp(lambda x: loss(parameters, x), (x,), (torch.ones_like(x),))
            return torch.func.jacrev(lambda x: loss(parameters, x))(x)

        run = torch.compile(value, backend="aot_eager", fullgraph=True) if compiled else value
        expected = run()
        torch._dynamo.reset()
        watched = Watched(model)
        found = run()
        same = torch.utils._pytree.tree_map(torch.allclose, expected, found)
        assert all(torch.utils._pytree.tree_leaves(same))
        assert watched.errors == []
        assert set(watched.calls().values()) == {0}
        model(x)
        assert set(watched.calls().values()) == {1}

    def test_inference_mode_counts_nothing_and_spoils_nothing(self) -> None:
        model = gpt()
        watched = Watched(model)
        with torch.inference_mode():
            model(tokens())
        model(tokens()).sum().backward()
        assert set(watched.calls().values()) == {1}
        assert watched.errors == []

    def test_a_probe_that_is_made_in_inference_mode_counts_later(self) -> None:
        model = gpt()
        with torch.inference_mode():
            watched = Watched(model)
        model(tokens()).sum().backward()
        assert set(watched.calls().values()) == {1}
        assert watched.errors == []

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_a_traced_program_has_nothing_of_ours(self) -> None:
        model = self.mlp()
        Watched(model)
        assert "act_exporter" not in str(torch.jit.trace(model, torch.ones(1, 3)).inlined_graph)


class Checkpointing(nn.Module):
    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return x


def save_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def save_products(_ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    wanted = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in wanted else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


HOWS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "no early stop": partial(checkpoint, use_reentrant=False, early_stop=False),
    **{
        policy.__name__: partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
        for policy in (save_all, save_products, recompute_all)
    },
}


class TestCheckpointing:
    @pytest.mark.parametrize("how", HOWS)
    def test_a_layer_counts_once_and_gradients_are_the_same(self, how: str) -> None:
        def gradients(model: Checkpointing) -> list[torch.Tensor | None]:
            model(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()).sum().backward()
            return [parameter.grad for parameter in model.parameters()]

        expected = gradients(Checkpointing(HOWS[how]))
        model = Checkpointing(HOWS[how])
        watched = Watched(model, "all")
        found = gradients(model)
        assert set(watched.calls().values()) == {1}
        assert all(map(torch.equal, expected, found))  # type: ignore[arg-type]
        assert watched.errors == []

    @pytest.mark.parametrize("how", ["non-reentrant", "save_products"])
    def test_in_one_compiled_graph_too(self, how: str) -> None:
        torch._dynamo.reset()
        model = Checkpointing(HOWS[how])
        watched = Watched(model, "all")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert set(watched.calls().values()) == {1}
        assert watched.errors == []


class TestPrecision:
    def test_autocast_changes_no_statistic(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Linear(64, 64))
        x = torch.randn(64, 2048) + 10  # sums over it in bfloat16 are far off
        model[1] = nn.Identity()
        plain, cast = Watched(model, "0"), Watched(model, "0")
        cast.probe.sampling = False
        model(x)
        plain.probe.sampling, cast.probe.sampling = False, True
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        assert (plain.sample().rows == cast.sample().rows).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_scaled_and_autocast_run(self, dtype: torch.dtype) -> None:
        model = gpt()
        watched = Watched(model)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(tokens()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert set(watched.calls().values()) == {2}
        assert watched.errors == []

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_a_model_that_is_cast_while_it_trains(self, dtype: torch.dtype) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        watched = Watched(model)
        model(torch.ones(1, 4))
        model.to(dtype)
        model(torch.ones(1, 4, dtype=dtype))
        assert set(watched.calls().values()) == {2}
        assert watched.errors == []


class TestModules:
    def test_one_that_is_taken_out_stands_still(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        watched = Watched(model)
        model[1] = nn.Identity()
        model(torch.ones(1, 4))
        assert watched.calls() == {"0 output": 1, "1 output": 0, "2 output": 1}

    def test_one_that_is_put_in_is_no_trouble(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        watched = Watched(model)
        model.append(nn.Linear(4, 4))
        model(torch.ones(1, 4))
        assert list(watched.calls().values()) == [1]
        assert watched.errors == []

    def test_one_that_is_moved_to_another_place_keeps_its_name(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        watched = Watched(model)
        model[0], model[1] = model[1], model[0]
        model(torch.ones(1, 4))
        assert watched.calls() == {"0 output": 1, "1 output": 1}

    def test_one_in_two_places_is_one_layer(self) -> None:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.ReLU(), shared)
        watched = Watched(model)
        model(torch.ones(1, 4))
        assert watched.calls() == {"0 output": 2}

    def test_tied_weights_are_two_layers(self) -> None:
        model = gpt()
        model.head.weight = model.embed.weight
        watched = Watched(model, ["embed", "head"])
        model(tokens())
        assert watched.calls() == {"embed output": 1, "head output": 1}

    def test_several_exporters_see_the_same(self) -> None:
        model = gpt()
        first, second = Watched(model), Watched(model)
        torch._dynamo.reset()
        torch.compile(model, backend="aot_eager", fullgraph=True)(tokens()).sum().backward()
        model(tokens())
        first_rows, second_rows = first.sample().rows, second.sample().rows
        assert (first_rows == second_rows).all()
        assert (first_rows[:, 0] == 2).all()


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: torch.Tensor
    extra: None = None


class Output(OrderedDict[str, torch.Tensor]):
    """What a Hugging Face model returns is a mapping like this."""


class TestOutputs:
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("wrap", [Slots, lambda x: Output(x=x), lambda x: (None, [x])])
    def test_its_first_tensor_is_seen(self, wrap: Callable[[Any], Any], compiled: bool) -> None:
        torch._dynamo.reset()

        class Layer(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return wrap(x)

        model = nn.Sequential(nn.Linear(2, 2), Layer())
        watched = Watched(model, "1")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(torch.ones(1, 2))
        rows = watched.sample().rows
        assert Statistics.of(rows).absmax[0] > 0
        assert watched.errors == []

    def test_a_class_is_no_output_with_fields(self) -> None:
        class Layer(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return Slots, x

        model = nn.Sequential(nn.Linear(2, 2), Layer())
        watched = Watched(model, "1")
        model(torch.ones(1, 2))
        assert watched.calls() == {"1 output": 1}
        assert watched.errors == []


def compiled_graphs(watch: bool, how: str, lengths: tuple[int, ...]) -> tuple[int, list[str]]:
    """How many graphs a run makes, and what went wrong; each layer must have run each time."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    # Of blocks more than there may be recompilations of one function.
    layers = 2 if how.startswith("model") else torch._dynamo.config.recompile_limit + 1
    model = GPT(layers=layers, width=8, heads=2, context=16)
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True, "dynamic": False}
    if how == "blocks in place":
        for block in model.blocks:
            block.compile(**options)
    elif how == "blocks replaced":  # as torchtitan does
        for name, block in model.blocks.named_children():
            model.blocks.register_module(name, torch.compile(block, **options))
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if how == "model":
        run = torch.compile(model, **options)
    elif how == "model in place":
        model.compile(**options)
    watched = Watched(model) if watch else None
    for length in lengths:
        for training in (True, True, False):
            model.train(training)
            out = run(torch.randint(0, 256, (2, length)))
            if training:
                out.square().mean().backward()
                model.zero_grad()
    assert not torch._dynamo.utils.counters["graph_break"]
    if watched is not None:
        assert set(watched.calls().values()) == {2 * len(lengths)}
    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs, watched.errors if watched is not None else []


class TestCompiled:
    # Of torch's own, with or without us: it asks each block's input for a gradient.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize(
        "how", ["model", "model in place", "blocks in place", "blocks replaced"]
    )
    def test_no_graph_more_than_without_us(self, how: str) -> None:
        """With several sequence lengths, and evaluations between."""
        lengths = (4, 8)
        without, _ = compiled_graphs(False, how, lengths)
        graphs, errors = compiled_graphs(True, how, lengths)
        assert graphs == without
        assert errors == []

    @pytest.mark.parametrize("how", ["model", "in place"])
    def test_hooks_after_the_first_compiled_call_are_said_to_be_silent(self, how: str) -> None:
        torch._dynamo.reset()
        model = gpt()
        run: Callable[[torch.Tensor], torch.Tensor] = model
        if how == "model":
            run = torch.compile(model, backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
        run(tokens())
        with start_exporter(model, 0) as exporter:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(6):
                run(tokens()).square().mean().backward()
                optimizer.step()
            layers = exporter._training.layers
            assert layers is not None
            heard = (layers.calls > 0).all()
            assert heard or exporter._errors["silent"] == 1

    def test_a_fault_while_a_hook_is_traced_costs_the_layer_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("trap")

        monkeypatch.setattr("act_exporter.hooks._first_tensor", fail)
        torch._dynamo.reset()
        model = gpt()
        watched = Watched(model, "norm")
        torch.compile(model, backend="aot_eager", fullgraph=True)(tokens()).sum().backward()
        assert watched.errors == ["hook: while the model was compiled: RuntimeError"]
        assert watched.calls() == {"norm output": 0}
