"""Two processes on this machine, as torchrun starts them, with models that are spread over them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from act_exporter import start_exporter
from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter
from act_exporter.history import Layers
from act_exporter.records import Reader
from deploy.demo.servers import REPOSITORY, free_port, wait_for
from tests.act_exporter.models import gpt, train

RANKS = 2
SECONDS = 150  # a collective that one rank waits for alone must end the test, not hang it


def calls(exporter: Exporter) -> set[float]:
    assert exporter._training.layers is not None
    return set(exporter._training.layers.calls.tolist())


def errors(exporter: Exporter) -> int:
    return sum(exporter._errors.values())


def ddp(rank: int, when: str) -> None:
    """Each rank has its own page, with the model's own names, one call a step."""
    model = gpt()
    base = int(os.environ["ACT_PORT"])
    wrapped = DistributedDataParallel(model)
    with start_exporter(model if when == "before" else wrapped) as exporter:
        train(wrapped, 3)
        assert calls(exporter) == {3}
        assert errors(exporter) == 0
        assert exporter.port == base + rank
        body, _ = exporter._render("")
        assert f'layer="blocks.0.attn.proj",rank="{rank}"'.encode() in body or (
            f'rank="{rank}",layer="blocks.0.attn.proj"'.encode() in body
        )
        assert b'layer="module.' not in body
        assert exporter._training.step == 3


def ddp_before(rank: int) -> None:
    ddp(rank, "before")


def ddp_after(rank: int) -> None:
    ddp(rank, "after")


def fsdp(rank: int) -> None:
    """fully_shard changes no name, no call and no number of what a layer makes."""
    plain = gpt()
    sharded = gpt()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    with start_exporter(plain, 0) as expected, start_exporter(sharded, 0) as exporter:
        for model in (plain, sharded):
            torch.manual_seed(7)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            train(model, 2, optimizer)
        assert calls(exporter) == {2}
        assert errors(exporter) == 0
        found, wanted = exporter._training.layers, expected._training.layers
        assert found is not None
        assert wanted is not None
        assert found.statistics.absmax == pytest.approx(wanted.statistics.absmax, rel=1e-4)


def fsdp_norm(rank: int) -> None:
    """The norm that clipping returns is taken; what is spread over ranks is refused, not joined."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model, mesh=mesh)
    with start_exporter(model, 0) as exporter:
        model(torch.ones(2, 4)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        whole = float(norm.full_tensor())
        if rank == 0:  # alone: a collective in it would hang here
            exporter.record(grad_norm=norm)
            exporter.record(loss=DTensor.from_local(torch.tensor(2.5), mesh, [Partial()]))
            assert exporter._errors["record"] == 1
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if rank == 0:
            assert exporter._training.values["grad_norm"] == pytest.approx(whole)
            assert "loss" not in exporter._training.values


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def tensor_parallel(rank: int) -> None:
    """A rank counts its own shard of an output that is a DTensor."""
    torch.manual_seed(0)
    model = nn.Sequential(Feed())
    plan: dict[str, Any] = {
        "0.up": ColwiseParallel(use_local_output=False),
        "0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    seen: list[Any] = []
    model[0].up.register_forward_hook(lambda *args: seen.append(args[-1]))
    with start_exporter(model, 0, watch=["*.up", "*.down"]) as exporter:
        model(torch.ones(3, 4)).to_local().sum().backward()
        exporter.step(1)
        exporter.step(2)
        assert calls(exporter) == {1}
        assert errors(exporter) == 0
        assert isinstance(seen[0], DTensor)
        assert seen[0].to_local().shape == (3, 4)
        assert exporter._training.layers is not None
        found = exporter._training.layers.statistics.absmax[0]
        assert found == pytest.approx(float(seen[0].to_local().abs().max()))


def empty_shard(rank: int) -> None:
    """A rank that holds nothing of a tensor has been called, and has no number of it."""
    mesh = init_device_mesh("cpu", (RANKS,))

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> DTensor:
            return DTensor.from_local(x[: 1 - rank], mesh, [Shard(0)])

    model = nn.Sequential(nn.Linear(4, 4), Spread())
    with start_exporter(model, 0, watch="1") as exporter:
        model(torch.ones(3, 4))
        exporter.step(1)
        exporter.step(2)
        assert calls(exporter) == {1}
        assert errors(exporter) == 0
        assert exporter._training.layers is not None
        assert bool(exporter._training.layers.statistics.absmax[0] > 0) == (rank == 0)


def joined(exporter: Exporter, step: int) -> Layers:
    """What has become of `step` once the other rank's part is there."""

    def there() -> bool:
        exporter._take_in()
        return exporter._judged >= step

    wait_for(there, "the other rank's part", timeout=SECONDS, interval=0.001)
    assert exporter._judged == step
    assert exporter._training.layers is not None
    return exporter._training.layers


def train_step(model: nn.Module, x: torch.Tensor, exporter: Exporter, step: int) -> None:
    model(x).sum().backward()
    exporter.step(step)


def global_page(rank: int) -> None:
    """Rank 0 alone serves what all ranks have seen, and says whose the largest value is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with torch.no_grad():
        both = torch.stack([model(x), model(5 * x)])
    with start_exporter(model, 0, watch="1", reduce="global") as exporter:
        exporter.record(loss=2.0 + rank, grad_norm=torch.tensor(7.0))
        train_step(model, x * (5 if rank else 1), exporter, 1)
        layers = joined(exporter, 1)
        found = layers.statistics
        assert found.absmax[0] == pytest.approx(float(both.abs().max()))
        assert found.min[0] == pytest.approx(float(both.min()))
        assert found.mean[0] == pytest.approx(float(both.mean()), rel=1e-5)
        assert found.std[0] == pytest.approx(float(both.std(unbiased=False)), rel=1e-5)
        assert layers.holder.tolist() == [1]
        assert layers.calls.tolist() == [RANKS]
        assert exporter._training.values["loss"] == 2.5
        assert (exporter.port is None) == (rank > 0)
        page = exporter._render("")[0].decode()
        assert 'act_layer_absmax_rank{run="ranks",rank="all",layer="1",tensor="output"} 1.0' in page
        # NaN is no number, and the rank that has it is what one wants to know.
        train_step(model, x if rank else x * torch.nan, exporter, 2)
        layers = joined(exporter, 2)
        assert layers.nonfinite.sum() == x.numel()
        assert layers.holder.tolist() == [0]
        assert exporter.onset() == 2
        assert errors(exporter) == 0


def global_journal(rank: int) -> None:
    """One for all ranks, which rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Linear(4, 4)
        with start_exporter(model, 0, reduce="global", journal=folder) as exporter:
            train_step(model, torch.ones(1, 4), exporter, 1)
            joined(exporter, 1)
        if rank == 0:
            assert [record.step for record in Reader(Path(folder)).records()] == [1]
            (file,) = Path(folder).iterdir()
            # The same input in both, so the first of them.
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            assert [line["absmax_rank"] for line in lines if "note" not in line] == [0]
        else:
            assert list(Path(folder).iterdir()) == []


def global_lost(rank: int) -> None:
    """A sample that one rank loses is the other's alone, and the next is of both again."""
    model = nn.Linear(4, 4)
    with start_exporter(model, 0, reduce="global") as exporter:
        if rank:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("act_exporter.probe._PENDING_LIMIT", 0)
                train_step(model, torch.ones(1, 4), exporter, 1)
            assert errors(exporter) == 1
        else:
            train_step(model, torch.ones(1, 4), exporter, 1)
            assert joined(exporter, 1).calls.tolist() == [1]
        train_step(model, torch.ones(1, 4), exporter, 2)
        assert joined(exporter, 2).calls.tolist() == [2 if rank else 3]


def global_rollback(rank: int) -> None:
    """What was under way when a run was rolled back is not judged in the new generation."""
    model = nn.Linear(4, 4)
    with start_exporter(model, 0, reduce="global") as exporter:
        if rank:
            dist.barrier()  # it answers only when the first has rolled back
        train_step(model, torch.ones(1, 4), exporter, 9)
        exporter.reset(generation=1)
        assert exporter._training.layers is None
        if not rank:
            dist.barrier()
        train_step(model, torch.ones(1, 4), exporter, 5)
        layers = joined(exporter, 5)
        # The other may have had all of step 9 before it rolled back, and calls are counted on.
        assert layers.calls.tolist() == [RANKS] or rank
        assert errors(exporter) == 0


def global_out_of_step(rank: int) -> None:
    """Ranks at different steps are joined no more: each goes on with what it sees, and says so."""
    model = nn.Linear(4, 4)
    with start_exporter(model, 0, reduce="global") as exporter:
        for step in (1 + rank, 3, 4):
            train_step(model, torch.ones(1, 4), exporter, step)
            assert joined(exporter, step).holder.tolist() != [1]
        assert exporter._errors["ranks"] == 1
        assert calls(exporter) == {3}


def global_alone(rank: int) -> None:
    """A rank that hangs holds up nobody's step; that it does not answer is counted."""
    model = nn.Linear(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("act_exporter.ranks._WAITING", 3)
        with start_exporter(model, 0, reduce="global") as exporter:
            if rank == 0:
                for step in range(1, 6):
                    train_step(model, torch.ones(1, 4), exporter, step)
                assert exporter._errors["ranks"] == 1
                assert exporter._training.step == 5
                assert joined(exporter, 5).calls.tolist() == [5]
            dist.barrier()
            if rank == 1:  # or rank 0 would wait at its close for collectives nobody enters
                for step in range(1, 4):
                    train_step(model, torch.ones(1, 4), exporter, step)


def global_differs(rank: int) -> None:
    """Ranks with other layers than the first are refused, by all of them alike."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(SettingError, match="ranks 0 and 1 watch different tensors"):
        start_exporter(model, 0, watch=str(rank), reduce="global")


SCENES = {
    scene.__name__: scene
    for scene in (
        ddp_before,
        ddp_after,
        fsdp,
        fsdp_norm,
        tensor_parallel,
        empty_shard,
        global_page,
        global_journal,
        global_lost,
        global_rollback,
        global_out_of_step,
        global_alone,
        global_differs,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, scene in SCENES.items():
        scene(rank)
        dist.barrier()
        if rank == 0:
            sys.stdout.write(f"{name} done\n")
            sys.stdout.flush()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the two processes wrote; all scenes in one start, which is what takes the time."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "ACT_PORT": str(two_free_ports()),
        "ACT_RUN": "ranks",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        ranked = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tests.act_exporter.test_distributed"]
            processes.append(
                subprocess.Popen(command, cwd=REPOSITORY, env=ranked, stdout=out, stderr=out)
            )
    try:
        for process in processes:
            process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pass  # the logs say how far it came
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return "\n".join(f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs))


def two_free_ports() -> int:
    """The lower of two neighbours."""
    while True:
        port = free_port()
        try:
            with socket.socket() as other:
                other.bind(("127.0.0.1", port + 1))
        except (OSError, OverflowError):
            continue
        return port


@pytest.mark.parametrize("name", SCENES)
def test_two_ranks(name: str, outcome: str) -> None:
    """What it holds stands with the scene."""
    assert f"{name} done" in outcome, outcome


if __name__ == "__main__":
    main()
