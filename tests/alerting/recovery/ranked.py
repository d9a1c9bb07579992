"""A trainer of several ranks, one process each, as torchrun starts them; a record of every step.

    python -m tests.alerting.recovery.ranked FOLDER RECORDS JSON

JSON: kind ("ddp" or "fsdp"), total, and what happens (see `Ranked.trouble`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from alerting.recovery import ClipGradients, LowerLearningRate, SkipBatches, TrainingGuard
from deploy.demo.servers import REPOSITORY, free_port
from tests.alerting.recovery.trainer import (
    FakeDetector,
    Numbered,
    open_request,
    wait_for_save,
)

SECONDS = 90
"""A test that hangs must end; starting four processes with torch takes ten of them."""


REMEDIES = {1: [SkipBatches(20), LowerLearningRate(0.5, steps=25), ClipGradients(0.01, steps=25)]}
"""Of the plans that ask for them: more batches than are left of an epoch."""


class Note:
    """Extra state of one rank; it cannot be saved at the step that it was told."""

    def __init__(self) -> None:
        self.broken = False
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        if self.broken:
            raise ValueError("the note is lost")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Ranked:
    """One rank."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.plan = plan
        self.folder = folder
        torch.manual_seed(0)
        # Seven rows and one: neither can be dealt out evenly.
        plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 1))
        self.model: nn.Module
        if plan["kind"] == "ddp":
            self.model = DistributedDataParallel(plain)
        else:
            fully_shard(plain, mesh=init_device_mesh("cpu", (self.size,)))
            self.model = plain
        self.plain = plain
        # Each rank draws otherwise from here, and must go on so after a resume.
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + self.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        data = Numbered(64)
        self.loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
        self.detector = FakeDetector()
        self.note = Note()
        self.guard = TrainingGuard(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40),
            loader=self.loader,
            state={"note": self.note},
            exporter=self.detector,
            save_every_steps=5,
            onset_margin_steps=2,
            **({"remedies": REMEDIES} if plan.get("remedies") else {}),
            **plan.get("settings", {}),
        )

    def weight(self) -> float:
        """One number of all weights and AdamW's moments, the same on every rank."""
        total = 0.0
        for parameter in self.plain.parameters():
            moments = self.optimizer.state.get(parameter, {})
            for held in (parameter, moments.get("exp_avg"), moments.get("exp_avg_sq")):
                if held is not None:
                    whole = held.full_tensor() if isinstance(held, DTensor) else held
                    total += whole.detach().double().abs().sum().item()
        return total

    def train_step(self, step: int, batch: Any) -> list[Any]:
        self.trouble(step)
        ids, inputs = batch
        stood = self.weight()
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.note.value = step + 1000 * self.rank
        wait_for_save(self.guard._run)
        draws = torch.rand(()).item(), random.random(), float(np.random.normal())
        return [step, ids.tolist(), loss.item(), self.weight(), self.note.value, *draws, stood]

    def trouble(self, step: int) -> None:
        """What the plan has for this rank at this step: {"rank": R, "step": S, "what": ...}."""
        for trouble in self.plan.get("troubles", []):
            if (trouble["rank"], trouble["step"]) != (self.rank, step):
                continue
            if trouble.get("once") and self.detector.resets[-1] > 0:
                continue
            what = trouble["what"]
            if what == "bad":
                self.detector.see_bad()
            elif what == "ask":
                open_request(self.folder, trouble["action"], trouble.get("generation", 0))
            elif what == "signal":
                os.kill(os.getpid(), getattr(signal, trouble["name"]))
            elif what == "raise":
                raise RuntimeError("the user's own")
            elif what == "detector":
                self.detector.step = self.fail  # type: ignore[method-assign, assignment]
            elif what == "note":
                self.note.broken = trouble["broken"]

    def fail(self, step: int) -> None:
        raise ValueError("the detector is at its wits' end")


def main(folder: Path, records: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranked = Ranked(folder, plan)
    with (records / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
        for step, batch in ranked.guard.steps(plan["total"]):
            print(json.dumps(ranked.train_step(step, batch)), file=file, flush=True)
            if step == plan.get("break"):
                break
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Job:
    """All ranks of one start.

    Attributes:
        codes: exit codes by rank.
        logs: what each wrote on standard error.
    """

    processes: list[subprocess.Popen[bytes]]
    paths: list[Path]
    codes: list[int] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    def wait(self) -> Job:
        deadline = time.monotonic() + SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.wait()
        self.codes = [process.returncode for process in self.processes]
        self.logs = [path.read_text() for path in self.paths]
        return self


def start(folder: Path, records: Path, ranks: int, kind: str = "ddp", **plan: Any) -> Job:
    """Start the ranks."""
    records.mkdir(parents=True, exist_ok=True)
    arguments = [str(folder), str(records), json.dumps({"kind": kind, **plan})]
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes, paths = [], []
    for rank in range(ranks):
        path = records / f"rank-{rank}.log"
        with path.open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.alerting.recovery.ranked", *arguments],
                    cwd=REPOSITORY,
                    env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
            )
        paths.append(path)
    return Job(processes, paths)


def run(folder: Path, records: Path, ranks: int, kind: str = "ddp", **plan: Any) -> Job:
    """Start the ranks and wait for all of them."""
    return start(folder, records, ranks, kind, **plan).wait()


def steps_of(records: Path, rank: int) -> list[list[Any]]:
    """What the rank did so far, in order."""
    path = records / f"rank-{rank}.jsonl"
    # The last line may have been cut short.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_of(records: Path, rank: int) -> dict[int, list[Any]]:
    """What each step was at its last time."""
    return {record[0]: record for record in steps_of(records, rank)}


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
