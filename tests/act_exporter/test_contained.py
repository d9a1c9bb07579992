"""Training survives a fault in any function of ours that it calls, and the fault is counted.

The functions are found by looking, not by a list: one that is added tomorrow is broken here too.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from act_exporter import Thresholds, start_exporter, statistics
from act_exporter.exporter import Exporter
from act_exporter.torch_exporter import TorchExporter
from tests.act_exporter.models import gpt

MODULES = (
    "hooks",
    "probe",
    "statistics",
    "rows",
    "sample",
    "steps",
    "history",
    "window",
    "baseline",
    "exporter",
    "torch_exporter",
    "torch_instrumentation",
    "chronicle",
    "collector",
    "gradients",
    "norms",
    "silence",
    "overhead",
    "graphs",
    "transfer",
    "profile",
    "drift",
    "attention",
    "training",
    "diagnosis",
    "peaks",
    "updates",
    "changes",
    "matrices",
    "memory",
    "ranks",
    "faults",
    "fault_hook",
    "live.alerts",
    "live.conditions",
    "live.guard",
    "live.html",
    "live.incident",
    "live.page",
    "live.query",
    "live.rows",
    "live.svg",
    "live.table",
    "live.trail",
    "live.view",
    "live.words",
)

# Not called between the first forward and the last step of a run: where a fault in them is
# raised, it is raised to somebody who called us by name (or is logged, as a busy port is).
AT_START_OR_CLOSE = {
    "hooks._define_operators",
    "hooks._keep_out_of_dynamo",
    "hooks.add_observer",
    "hooks.remove_observer",
    "probe.Probe._hook",
    "probe._on_cpu",
    "probe.Probe.close",
    "steps.Steps.close",
    "statistics.empty_rows",
    "statistics.warm_up",
    "gradients.Gradients.close",
    "gradients.Gradients.series",
    "ranks.Ranks._compare",
    "ranks.Ranks.close",
    "updates.Updates.close",
    "updates.Updates.series",
    "torch_instrumentation.TorchInstrumentation.close",
    "torch_instrumentation.TorchInstrumentation.joined",
    "torch_instrumentation.TorchInstrumentation.series",
    "torch_instrumentation.TorchInstrumentation.speaks",
    "exporter.Exporter.__enter__",
    "exporter.Exporter.__exit__",
    "exporter.Exporter.close",
    "exporter.Exporter.serve",
    "exporter.Exporter._list",
    "live.html._hash",  # of style and script, when the module is imported
    "faults.Faults.end",
    "faults.Faults._remove",
    "collector.LayerPage._prefixes_of",  # and where there are more series than may be
    "collector._escaped",
    "collector._more_labels",
    "collector.sample_prefix",
    "collector._nesting",
    "collector.constants",
}
FOR_THE_GUARD = {
    "torch_instrumentation.TorchInstrumentation.drop",
    "torch_instrumentation.TorchInstrumentation.forget",
    "torch_instrumentation.TorchInstrumentation.idle",
    "torch_instrumentation.TorchInstrumentation.look_often",
    "torch_instrumentation.TorchInstrumentation.restart",
    "torch_instrumentation.TorchInstrumentation.set_step",
    "torch_exporter.TorchExporter.load_state_dict",
    "torch_exporter.TorchExporter.state_dict",
    "transfer.arrays_of",
    "transfer.tensors_of",
    "probe.Probe.forget",
    "ranks.Ranks.forget",
    "steps.Steps.restart",
    "steps.Steps.set",
    "history.History.load_state_dict",
    "history.History.rebaseline",
    "history.History.reset",
    "history.History.state_dict",
    "history.History.set_baseline",
    "peaks.HeldMaximum.clear",
    "drift.Drift.clear",
    "diagnosis.Diagnosis.resumed",
    "attention.AttentionLogits.rebaseline",
    "attention.AttentionLogits.restore",
    "attention.AttentionLogits.state",
    "training.TrainingHistory.rebaseline",
    "training.TrainingHistory.reset",
    "training._SignalHistory.learn_anew",
    "training._SignalHistory.forget_recent",
    "baseline.Baseline.set",
    "gradients.Gradients.drop",
    "gradients.Gradients.forget",
    "updates.Updates.drop",
    "updates.Updates.forget",
    "updates.Updates.look_often",
    "exporter.Exporter._resumed",
    "training.TrainingHistory.is_learnt",
    "window.Window.clear",
    "window.Window.restore",
    "window.Window.state",
    "baseline.Baseline.clear",
    "baseline.Baseline.restore",
    "baseline.Baseline.state",
    "exporter.Exporter.load_state_dict",
    "exporter.Exporter.onset",
    "exporter.Exporter.paused",
    "exporter.Exporter.rebaseline",
    "exporter.Exporter.reset",
    "exporter.Exporter.state_dict",
    "exporter.Exporter.step",
    "overhead.Overhead.pause",
    "training.TrainingHistory.load_state_dict",
    "training.TrainingHistory.onset",
    "training.TrainingHistory.state_dict",
    "probe.Probe.idle",
    "faults.Faults.resume",
}

# What holds the fault itself, and is nothing else: see `test_a_boundary_is_one_try`.
BOUNDARIES = {
    "hooks._Hook.__call__",
    "hooks._begin",
    "hooks._end",
    "hooks._observe",
    "hooks._tell",
    "gradients._Trigger.__call__",
    "exporter.Exporter.record",
    "exporter.Exporter._render",  # raises again, in the thread of the scrape
    "exporter.Exporter._show",  # likewise
    "steps.Steps._began",
    "steps.Steps._stepped",
}

# What tells of a fault: broken together with something that there is to tell of.
REPORTERS = {
    "hooks._on_fake_tensors",
    "probe.Probe.failed",
    "gradients.Gradients.failed",
    "gradients._Trigger._tell",
    "updates.Updates._failed",
    "exporter.Exporter._count_error",
    "exporter.Exporter._log",
    "ranks.Ranks._end",
}

# Without effect on what is watched here: a copy's hook, what stands in for an operator where there
# is nothing to see or where a compiler traced a fault, and what only an accelerator calls.
ELSEWHERE = {
    "hooks._Hook.run",  # abstract
    "hooks.Unwatched.__call__",
    "hooks._failed_in_trace",
    "hooks._skip",
    "hooks.Observer.begin",
    "hooks.Observer.end",
    "hooks.Observer.failed",
    "hooks.Observer.observe",
    "gradients.Scaler.is_enabled",
    "gradients.Scaler.scale",
    "gradients.Gradients._scan",  # at the start, and then once in a hundred steps
    "matrices.Matrices.find",  # likewise, once in ten looks
    "norms.find_shards",
    "norms._holders",  # of a model that is spread over ranks
    "norms.Shards.norms",
    "probe.Probe._clear",  # for the guard, and where copies do not arrive
    "probe.Probe.skip",  # in a step that is not sampled
    "torch_instrumentation.TorchInstrumentation.skip",  # likewise
    "rows.empty",  # of a sample that is lost
    "statistics._add_fused",
    "statistics.add_row_norm",  # of queries and keys that have modules of their own
    "training._excess",  # of a value that is high, once there is a window
    "drift.Drift._judge",  # after a hundred sampled steps
    "silence.Silence._nothing_ran",
    "silence.Silence._some_did_not",
    "overhead.Overhead._exceeded",
    "overhead.Overhead._extra",  # at steps that are not sampled, one in fifty
    "overhead._error",
    "exporter.Exporter._refresh_target",  # one try, in the server's thread, where there is one
    "exporter.Exporter.inject_fault",  # raised to who asks for a fault, and what it puts in place
    "faults.Faults.arm",
    "torch_instrumentation.TorchInstrumentation.fault",
    "faults.Faults._check",
    "faults._Fault.in_force",
    "fault_hook.FaultHook.__call__",
    "fault_hook.FaultHook.remove",
    "fault_hook.FaultHook.set",
}

# Called on an accelerator, or of tensors that this model has not; here the CPU takes the same way.
ON_DEVICE = {"statistics.add_on_device", "statistics.count_call"}

QUICK = Thresholds(window=4, window_minimum=2, baseline_steps=2, clean_steps=2)


def functions() -> Iterator[str]:
    """`module.function` and `module.Class.method` of everything that is written in MODULES."""
    for name in MODULES:
        module = importlib.import_module(f"act_exporter.{name}")
        for key, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isroutine(inspect.unwrap(value)):
                yield f"{name}.{key}"
            elif isinstance(value, type):
                for method, body in vars(value).items():
                    if _is_ours(method, body):
                        yield f"{name}.{key}.{method}"


def _is_ours(name: str, body: object) -> bool:
    if isinstance(body, property):
        return True
    if isinstance(body, classmethod | staticmethod):
        body = body.__func__
    if not isinstance(body, types.FunctionType) or body.__module__ == "enum":
        return False
    return name in ("__call__", "__enter__", "__exit__") or not name.startswith("__")


BROKEN = sorted(
    set(functions()) - AT_START_OR_CLOSE - FOR_THE_GUARD - BOUNDARIES - REPORTERS - ELSEWHERE
)


def fail(*_: object, **__: object) -> None:
    raise ArithmeticError("broken on purpose")


def break_(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it raise for whoever calls it, one who took hold of it before too."""
    _, _, body = find(name)
    for cached in (body, statistics._square_limit):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()  # or what an earlier run was told would be told again
    if isinstance(body, property):
        body = body.fget
    elif isinstance(body, classmethod | staticmethod):
        body = body.__func__
    monkeypatch.setattr(inspect.unwrap(body), "__code__", fail.__code__)


def find(name: str) -> tuple[Any, str, Any]:
    """Who has it, under which attribute, and what it is."""
    module, *path = name.split(".")
    owner: Any = importlib.import_module(f"act_exporter.{module}")
    for part in path[:-1]:
        owner = getattr(owner, part)
    return owner, path[-1], inspect.getattr_static(owner, path[-1])


def run(
    *, watched: bool, then: Callable[[], None] = lambda: None
) -> tuple[list[torch.Tensor], int | None]:
    """Train a small model through all that happens in a run; its weights, and errors counted.

    A learning rate, a forward that fails, micro-batches that no step follows, a spike of two steps
    beyond what float32 has squares of, a scrape a step; with a journal.
    """
    model = gpt()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"watch": "sublayers", "sample_every": 1, "thresholds": QUICK}
    if dist.is_initialized():
        options["reduce"] = "global"
    with tempfile.TemporaryDirectory() as folder:
        options["journal"] = Path(folder)
        exporter = TorchExporter(model, run="test", rank=0, **options) if watched else None
        then()
        errors = _train(model, optimizer, exporter)
    return [parameter.detach() for parameter in model.parameters()], errors


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, exporter: Exporter | None
) -> int | None:
    for step in range(9):
        if step == 2:
            with contextlib.suppress(IndexError):
                model(torch.full((1, 8), 256))
        for _ in range(12 if step == 3 else 1):
            loss = forward(model)
        loss.backward()
        if exporter is not None:
            exporter.record(loss=loss, grad_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (4, 6):
            with torch.no_grad():
                model.norm.weight.mul_(1e18 if step == 4 else 1e-18)
        if exporter is not None:
            with contextlib.suppress(ArithmeticError):  # the scraper's trouble
                exporter._render("")
            with contextlib.suppress(ArithmeticError):  # and a reader's
                exporter._show("")
    if exporter is None:
        return None
    errors = sum(exporter._errors.values())
    exporter.close()
    return errors


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of this process alone, whose ranks are joined."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def forward(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 256, (32, 9))  # logits that are enough to be summed in rows
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    return run(watched=False)[0]


def test_nothing_is_counted_where_nothing_is_broken(undisturbed: list[torch.Tensor]) -> None:
    weights, errors = run(watched=True)
    assert errors == 0
    assert all(map(torch.equal, weights, undisturbed))


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_counted_where_ranks_are_joined(undisturbed: list[torch.Tensor]) -> None:
    weights, errors = run(watched=True)
    assert errors == 0
    assert all(map(torch.equal, weights, undisturbed))


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_counted_and_changes_nothing(
    name: str,
    undisturbed: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A function that this run never calls fails here: let it be called, or say when it is."""
    if name.startswith("ranks."):
        request.getfixturevalue("one_rank")
    if name in ON_DEVICE:
        monkeypatch.setattr(statistics, "add_on_cpu", lambda *a: statistics.add_on_device(*a))
    weights, errors = run(watched=True, then=lambda: break_(name, monkeypatch))
    assert all(map(torch.equal, weights, undisturbed))
    assert errors


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ArithmeticError("broken on purpose")


@pytest.mark.parametrize("where", ["probe.Probe.observe", "probe.Probe.take", "probe.Probe.begin"])
@pytest.mark.parametrize("name", sorted(REPORTERS))
def test_a_fault_while_a_fault_is_told_changes_nothing(
    name: str, where: str, undisturbed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> None:
        break_(where, monkeypatch)
        break_(name, monkeypatch)

    weights, _ = run(watched=True, then=breaks)
    assert all(map(torch.equal, weights, undisturbed))


@pytest.mark.parametrize("where", ["observe", "take", "record"])
def test_an_error_without_a_text_is_counted(
    where: str, undisturbed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_it(*_: object) -> None:
        raise UnprintableError

    monkeypatch.setattr(f"act_exporter.probe.Probe.{where}", raise_it)
    weights, errors = run(watched=True)
    assert all(map(torch.equal, weights, undisturbed))
    assert errors


@pytest.mark.parametrize("name", ["steps.Steps.set", "probe.Probe.end_step", "probe.Probe.take"])
def test_a_fault_does_not_reach_who_tells_of_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exporter.step(n)` stands in the training loop as the optimizer's step does."""
    model = gpt()
    with start_exporter(model, 0) as exporter:
        exporter.step(4)
        forward(model).backward()
        break_(name, monkeypatch)
        exporter.step(5)
        assert sum(exporter._errors.values()) == 1


@pytest.mark.parametrize("name", sorted(BOUNDARIES))
def test_a_boundary_holds_what_it_calls(name: str) -> None:
    """It is one try (or suppress) of every Exception, after guards that do no more than return."""
    body = find(name)[2]
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(body))).body
    assert isinstance(function, ast.FunctionDef)
    *before, last = [part for part in function.body if not _is_docstring(part)]
    if isinstance(last, ast.With):
        assert ast.unparse(last.items[0]) == "contextlib.suppress(Exception)"
    else:
        assert isinstance(last, ast.Try)
        caught = [handler.type for handler in last.handlers]
        assert [ast.unparse(kind) for kind in caught if kind is not None] == ["Exception"]
    for part in before:
        assert isinstance(part, ast.If)
        assert [type(inner) for inner in part.body] == [ast.Return]


def _is_docstring(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def test_what_is_left_out_exists() -> None:
    """A name that was changed would be left out for nothing."""
    listed = AT_START_OR_CLOSE | FOR_THE_GUARD | BOUNDARIES | REPORTERS | ELSEWHERE | ON_DEVICE
    assert sorted(listed - set(functions())) == []


def test_an_interrupt_is_not_ours_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a hook ends the training, as the user wants."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("act_exporter.probe.Probe.observe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(watched=True)
