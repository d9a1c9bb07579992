"""A small trainer with everything that must come back bit for bit, and a detector that is told."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import nn
from torch.utils.data import DataLoader, Dataset

from alerting.control import Action, ControlDirectory, Request, new_request_id
from alerting.recovery import TrainingGuard
from alerting.recovery.run import GuardedRun
from deploy.demo.servers import wait_for

torch.set_num_threads(1)


class Numbered(Dataset):
    """Samples that can be told apart: their number, and a vector drawn from it."""

    def __init__(self, length: int = 26) -> None:
        self._inputs = torch.randn(length, 4, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._inputs[index]


class Average:
    """An exponential moving average of the first weight, as extra state."""

    def __init__(self) -> None:
        self.value = torch.zeros(())
        self.updates = 0

    def update(self, weight: torch.Tensor) -> None:
        self.value = 0.9 * self.value + 0.1 * weight.detach().mean()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()
        self.updates = state["updates"]


class FakeDetector:
    """Sees a bad step when the test says so; keeps a record of what the guard told it."""

    def __init__(self, run: str = "toy") -> None:
        self.run = run
        self.registry = CollectorRegistry()
        self.steps: list[int] = []
        self.resets: list[int] = []
        self.is_paused = False
        self._bad = False
        self._onset: int | None = None

    def see_bad(self) -> None:
        self._bad = True

    def step(self, step: int) -> None:
        self.steps.append(step)
        if self._bad and self._onset is None:
            self._onset = step
        self._bad = False

    def onset(self) -> int | None:
        return self._onset

    def reset(self, generation: int) -> None:
        self.resets.append(generation)
        self._onset = None
        self._bad = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False

    def state_dict(self) -> dict[str, Any]:
        return {"window": torch.tensor([1.0, 2.0]), "count": len(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["window"], torch.tensor([1.0, 2.0]))


Record = tuple[Any, ...]


@dataclass
class Trainer:
    """Model, optimizer, scheduler, loader, average and detector of one process."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    watched: bool = True
    patient: bool = True
    optimizer_kind: type[torch.optim.Optimizer] = torch.optim.AdamW

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.optimizer = self.optimizer_kind(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
        self.average = Average()
        self.detector = FakeDetector()
        self.records: list[Record] = []
        self.guard = TrainingGuard(
            self.folder,
            **{
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "loader": self.loader,
                "state": {"average": self.average},
                "exporter": self.detector if self.watched else None,
                "run": "toy",
                "save_every_steps": 5,
                "onset_margin_steps": 2,
                "confirm_after_steps": 10,
                **self.settings,
            },
        )

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory(self.folder / "control")

    def train_step(self, step: int, batch: Any) -> Record:
        """One step; everything about it that must be the same after a resume."""
        self.optimizer.zero_grad()
        ids, inputs = batch
        loss = (self.model(inputs) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update(self.model[0].weight)
        if self.patient:
            wait_for_save(self.guard._run)
        return (
            step,
            tuple(ids.tolist()),
            loss.item(),
            self.optimizer.param_groups[0]["lr"],
            self.average.value.item(),
            self.average.updates,
            torch.rand(()).item(),
            random.random(),
            np.random.normal(),
        )

    def run(self, total: int = 30, stop_after: int | None = None) -> list[Record]:
        """Train; a stop is a break out of the loop, after the step and before its boundary."""
        for step, batch in self.guard.steps(total):
            self.records.append(self.train_step(step, batch))
            if step == stop_after:
                break
        return self.records

    def ask(
        self,
        action: Action,
        generation: int = 0,
        run: str = "toy",
        created_at: float | None = None,
    ) -> str:
        """Open a request, as the receiver does."""
        return open_request(self.folder, action, generation, run, created_at)

    def break_model(self) -> None:
        """The fault: a weight a hundredfold, which the detector sees in this step."""
        with torch.no_grad():
            self.model[0].weight.mul_(100)
        self.detector.see_bad()

    def names(self) -> list[str]:
        """Names of the published checkpoints."""
        folder = self.folder / "checkpoints"
        return sorted(p.name for p in folder.iterdir() if (p / "manifest.json").exists())

    def health(self, name: str) -> str:
        return read_json(self.folder / "checkpoints" / name / "health.json")["health"]


def wait_for_save(run: GuardedRun) -> None:
    """Until the files of the save in flight are there, so that the next boundary publishes it.

    The steps of tests take a millisecond: the disk's speed would say which of them are saved.
    """
    wait_for(lambda: not run.saver.writing, "the files of a save", timeout=60, interval=0.001)


def request_of(
    action: Action,
    generation: int = 0,
    run: str = "toy",
    created_at: float | None = None,
) -> Request:
    """A request as the receiver makes it: now, or at another time."""
    return Request(
        id=new_request_id(),
        run=run,
        generation=generation,
        action=action,
        alert="Test",
        created_at=time.time() if created_at is None else created_at,
    )


def open_request(
    folder: Path,
    action: Action,
    generation: int = 0,
    run: str = "toy",
    created_at: float | None = None,
) -> str:
    """Ask the guard of the run folder, as the receiver does."""
    request = request_of(action, generation, run, created_at)
    assert ControlDirectory(folder / "control").claim(request)
    return request.id


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def uninterrupted(folder: Path, total: int = 30, **settings: Any) -> list[Record]:
    """What the same run gives when nothing happens to it."""
    return Trainer(folder, settings=settings).run(total)


def same_as(records: list[Record], reference: list[Record]) -> bool:
    """Whether each step was, at its last time, what it is in the reference, bit for bit."""
    last = {record[0]: record for record in records}
    return list(last.values()) == [r for r in reference if r[0] in last]
