"""Gradient norms: what clipping would have seen, whatever a trainer does with its gradients."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from act_exporter.gradients import Gradients, Which
from act_exporter.layers import find_taps
from act_exporter.sample import Norms
from tests.act_exporter.models import Checkpointed, gpt

Loss = Callable[[nn.Module], torch.Tensor]


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 9))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Watched:
    """The gradients of one model, and the errors that were met."""

    def __init__(
        self, model: nn.Module, which: Which = True, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.model = model
        self.errors: list[Exception] = []
        self.gradients = Gradients(
            model,
            find_taps(model),
            which=which,
            scaler=scaler,
            on_error=lambda stage, error: self.errors.append(error),
        )

    def end_step(self, step: int = 1) -> Norms | None:
        """What came of the step; its gradients are cleared."""
        self.gradients.take(step)
        self.model.zero_grad()
        norms = self.gradients.arrived(None)
        assert len(norms) <= 1
        return norms[0] if norms else None

    def norm(self) -> float | None:
        norms = self.end_step()
        return norms.total if norms is not None else None


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched(gpt())
    yield watched
    assert watched.errors == []
    watched.gradients.close()


def clipped(model: nn.Module, limit: float = 1e-3) -> float:
    """The norm before clipping, as the trainer learns it, in float32 whatever the model is in."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dtype is not torch.float32:
            twin = nn.Parameter(torch.zeros_like(parameter, dtype=torch.float32))
            twin.grad = parameter.grad.float()
            parameter.twin = twin  # type: ignore[attr-defined]
    twins = [getattr(parameter, "twin", parameter) for parameter in model.parameters()]
    return float(nn.utils.clip_grad_norm_(twins, limit))


class TestTotal:
    def test_is_what_clipping_returns_and_not_what_it_leaves(self, watched: Watched) -> None:
        loss_of(watched.model).backward()
        expected = clipped(watched.model)
        assert expected > 0.1
        assert watched.norm() == pytest.approx(expected, rel=1e-5)

    def test_of_four_micro_batches_is_of_their_sum(self, watched: Watched) -> None:
        for _ in range(4):
            loss_of(watched.model).backward()
        expected = clipped(watched.model)
        assert watched.norm() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("kind", ["tied", "unused", "frozen", "bfloat16", "float64"])
    def test_of_every_model(self, kind: str) -> None:
        model = gpt()
        if kind == "tied":
            model.head.weight = model.embed.weight
        elif kind == "unused":
            model.spare = nn.Linear(3, 3)
        elif kind == "frozen":
            model.blocks.requires_grad_(False)
        else:
            model.to(getattr(torch, kind))
        watched = Watched(model)
        loss_of(model).backward()
        expected = clipped(model)
        norms = watched.end_step()
        assert norms is not None
        assert norms.total == pytest.approx(expected, rel=1e-5)
        assert ("blocks.0.attn.proj" in norms.layers) is (kind != "frozen")
        if kind == "tied":
            assert norms.layers["head"] == norms.layers["embed"]
        assert watched.errors == []

    def test_of_sparse_gradients_is_of_their_values(self) -> None:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
        watched = Watched(model)
        model(torch.tensor([1, 1, 3])).square().sum().backward()
        parts = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        expected = math.sqrt(sum(float(part.square().sum()) for part in parts))
        assert watched.norm() == pytest.approx(expected, rel=1e-5)
        assert watched.errors == []

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_is_not_finite_where_a_gradient_is_not(self, watched: Watched, value: float) -> None:
        """The forward is finite, and one layer's own gradient alone is not."""
        weight = watched.model.get_parameter("blocks.1.attn.proj.weight")
        weight.register_hook(lambda gradient: torch.full_like(gradient, value))
        loss = loss_of(watched.model)
        loss.backward()
        assert loss.isfinite()
        norms = watched.end_step()
        assert norms is not None
        assert not math.isfinite(norms.total)
        broken = {layer for layer, norm in norms.layers.items() if not math.isfinite(norm)}
        assert broken == {"blocks.1", "blocks.1.attn", "blocks.1.attn.proj"}

    def test_a_spike_of_one_layer_is_there_for_one_step(self, watched: Watched) -> None:
        layer = "blocks.1.attn.proj"
        norms = []
        for step in range(3):
            handle = watched.model.get_parameter(f"{layer}.weight").register_hook(
                lambda gradient, factor=1_500 if step == 1 else 1: gradient * factor
            )
            loss_of(watched.model).backward()
            handle.remove()
            norms.append(watched.end_step(step))
        before, spike, after = [one.layers[layer] for one in norms if one is not None]
        assert spike > 500 * before
        assert after < 3 * before


class TestBackward:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_with_checkpointing(self, reentrant: bool) -> None:
        watched = Watched(Checkpointed(reentrant))
        watched.model(torch.randn(3, 4, requires_grad=True)).square().sum().backward()
        expected = clipped(watched.model)
        assert watched.norm() == pytest.approx(expected, rel=1e-5)
        assert watched.errors == []

    def test_twice_through_one_graph(self, watched: Watched) -> None:
        loss = loss_of(watched.model)
        loss.backward(retain_graph=True)
        loss.backward()
        expected = clipped(watched.model)
        assert watched.norm() == pytest.approx(expected, rel=1e-5)

    def test_that_makes_a_graph_of_its_own(self, watched: Watched) -> None:
        with pytest.warns(UserWarning, match="create_graph"):
            loss_of(watched.model).backward(create_graph=True)
        expected = clipped(watched.model)
        assert watched.norm() == pytest.approx(expected, rel=1e-5)

    def test_that_accumulates_nothing_counts_nothing(self, watched: Watched) -> None:
        torch.autograd.grad(loss_of(watched.model), list(watched.model.parameters()))
        assert watched.norm() is None

    def test_that_failed_costs_its_step_at_most(self, watched: Watched) -> None:
        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("out of memory")

        handle = watched.model.get_parameter("embed.weight").register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(watched.model).backward()
        handle.remove()
        watched.end_step()
        loss_of(watched.model).backward()
        assert watched.norm() is not None

    def test_with_the_optimizer_in_it_leaves_nothing(self, watched: Watched) -> None:
        for parameter in watched.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: setattr(parameter, "grad", None)
            )
        loss_of(watched.model).backward()
        assert watched.norm() is None

    def test_of_a_step_that_is_not_sampled_does_nothing(
        self, watched: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched.gradients.sampling = False
        monkeypatch.setattr(Gradients, "begin", lambda self: pytest.fail("begun"))
        loss_of(watched.model).backward()
        assert watched.norm() is None


class TestModel:
    def test_has_no_hook_without_gradients(self) -> None:
        model = gpt()
        watched = Watched(model, which=False)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        loss_of(model).backward()
        assert watched.norm() is None

    def test_has_no_hook_once_closed(self, watched: Watched) -> None:
        watched.gradients.close()
        assert not any(p._post_accumulate_grad_hooks for p in watched.model.parameters())

    def test_is_not_kept_by_us(self) -> None:
        watched = Watched(gpt())
        loss_of(watched.model).backward()
        watched.norm()
        weight = weakref.ref(watched.model.get_parameter("head.weight"))
        del watched.model
        gc.collect()
        assert weight() is None

    def test_can_be_copied_and_pickled(self, watched: Watched) -> None:
        file = io.BytesIO()
        torch.save(watched.model, file)
        file.seek(0)
        for other in (copy.deepcopy(watched.model), torch.load(file, weights_only=False)):
            loss_of(other).backward()
            assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
        assert watched.norm() is None

    def test_may_get_other_parameters(self, watched: Watched) -> None:
        for step in range(3):
            # Replaced; joined; and all of them new, so that no hook is left.
            if step == 0:
                watched.model.get_submodule("blocks.0.mlp.up").weight = nn.Parameter(
                    torch.randn(64, 16)
                )
            elif step == 1:
                model = watched.model
                model.blocks[0] = nn.Sequential(model.blocks[0], nn.Linear(16, 16))  # type: ignore
                watched.gradients._taken = 99
                watched.end_step()
            else:
                for module in watched.model.modules():
                    for name, parameter in list(module._parameters.items()):
                        if parameter is not None:
                            module._parameters[name] = nn.Parameter(parameter.detach().clone())
                watched.end_step()
            loss_of(watched.model).backward()
            expected = clipped(watched.model)
            assert watched.norm() == pytest.approx(expected, rel=1e-5)


class TestErrors:
    @pytest.mark.parametrize("name", ["_queue", "_queue_last", "_end", "_read", "_scan"])
    def test_are_counted_and_training_goes_on(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ValueError("broken")

        def run(watch: bool) -> tuple[torch.Tensor | None, int]:
            model = gpt()
            watched = Watched(model) if watch else None
            if watched is not None:
                monkeypatch.setattr(watched.gradients, name, fail)
                watched.gradients._taken = 99
            torch.manual_seed(3)
            loss_of(model).backward()
            if watched is not None:
                watched.gradients.take(1)
            return model.get_parameter("embed.weight").grad, len(watched.errors) if watched else 0

        plain, _ = run(False)
        gradient, errors = run(True)
        assert errors >= 1
        assert plain is not None
        assert gradient is not None
        assert torch.equal(plain, gradient)


class TestScale:
    def test_is_taken_out(self) -> None:
        model = gpt()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        watched = Watched(model, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        expected = clipped(model)
        scaler.step(optimizer)
        scaler.update()
        norms = watched.end_step()
        assert norms is not None
        assert norms.total == pytest.approx(expected, rel=1e-5)
        assert norms.scale == 2.0**12

    def test_that_is_told_is_taken_out(self, watched: Watched) -> None:
        (loss_of(watched.model) * 64).backward()
        expected = clipped(watched.model) / 64
        watched.gradients.take(1)
        (norms,) = watched.gradients.arrived(64.0)
        assert norms.total == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("enabled", [True, False])
    def test_too_large_is_no_anomaly(self, enabled: bool) -> None:
        """A scaler skips the step; where none is at work, infinity is what it is."""
        model = gpt()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=enabled)
        watched = Watched(model, scaler=scaler)
        scaler.scale(loss_of(model) * math.inf).backward()
        norm = watched.norm()
        assert norm is None if enabled else norm is not None
        assert watched.errors == []


def in_two_processes(rank: int, run: Callable[[], None], store: str) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    run()
    dist.barrier()
    dist.destroy_process_group()
    # All was asserted. An interpreter that winds down while one of gloo's threads still runs is now
    # and then aborted ("terminate called without an active exception").
    os._exit(0)


def _ddp() -> None:
    early = Watched(gpt())
    model = nn.parallel.DistributedDataParallel(early.model)
    late = Watched(model)
    torch.manual_seed(dist.get_rank())  # other data in each rank
    for _ in range(3):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        expected = clipped(model)
        early.gradients.take(1)
        assert early.gradients.arrived(None)[0].total == pytest.approx(expected, rel=1e-5)
        assert late.norm() == pytest.approx(expected, rel=1e-5)
    assert early.errors == late.errors == []


def _fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    early = Watched(model)  # all its hooks will be gone
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    late, own = Watched(model, which="all_ranks"), Watched(model)
    torch.manual_seed(dist.get_rank())
    seen = 0
    for step in range(3):
        # Ranks need not sample the same steps.
        late.gradients.sampling = sampled = step != dist.get_rank()
        loss_of(model).backward()
        norm: object = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        expected = float(norm.full_tensor())  # type: ignore[attr-defined]
        early.gradients.take(step)
        own.gradients.take(step)
        for watched in (early, own):
            for norms in watched.gradients.arrived(None):
                seen += watched is early
                squares = torch.tensor(norms.total).square()
                dist.all_reduce(squares)
                assert float(squares.sqrt()) == pytest.approx(expected, rel=1e-5)
        assert late.norm() == (pytest.approx(expected, rel=1e-5) if sampled else None)
    assert seen == 2  # not the first: it was found out then
    assert early.errors == late.errors == own.errors == []


class TestRanks:
    @pytest.mark.parametrize("run", [_ddp, _fsdp])
    def test_share_one_norm(self, run: Callable[[], None], tmp_path: Path) -> None:
        mp.start_processes(
            in_two_processes, (run, str(tmp_path / "store")), nprocs=2, start_method="spawn"
        )
