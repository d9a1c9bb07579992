"""What the page is looked at with: real exporters on small models that went through something."""

from __future__ import annotations

import contextlib
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from act_exporter import Exporter, Thresholds, start_exporter
from alerting.control import Action, ControlDirectory, Request, new_request_id
from alerting.recovery import TrainingGuard
from deploy.demo.text import read_text
from deploy.demo.train import GPT, Windows
from tests.act_exporter.models import train
from tests.alerting.recovery.trainer import wait_for_save

CONTEXT = 16
FAULT_LAYER = "blocks.5.mlp.down"
FAULT_FACTOR = 3000.0
FAULT_STEP = 141
DEEP_FAULT_LAYER = "blocks.700.mlp.down"
DEEP_FAULT_STEP = 10

# Windows and baselines that are there after some hundred steps of a second.
QUICK = Thresholds(window=100, window_minimum=40, baseline_steps=25)


class Guarded:
    """A GPT of twelve blocks in training under a guard; one layer goes bad at `FAULT_STEP`.

    Attributes:
        exporter: whose page is looked at.
    """

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        model = GPT(layers=12, width=16, heads=2, context=CONTEXT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1, (done + 1) / 30))
        text = read_text(Path(sysconfig.get_path("stdlib")), limit=200_000)
        loader = DataLoader(Windows(text, CONTEXT), 4, shuffle=True, drop_last=True)
        self.exporter = start_exporter(
            model, 0, run="gpt", rank=0, thresholds=QUICK, max_overhead=None
        )
        self.exporter.inject_fault(FAULT_LAYER, FAULT_FACTOR, FAULT_STEP)
        guard = TrainingGuard(
            folder,
            model=model,
            optimizer=optimizer,
            scheduler=rates,
            loader=loader,
            exporter=self.exporter,
            save_every_steps=40,
            confirm_after_steps=40,
        )
        self._control = ControlDirectory(folder / "control")
        self._steps = self._train(model, optimizer, rates, guard)

    def _train(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        rates: torch.optim.lr_scheduler.LRScheduler,
        guard: TrainingGuard,
    ) -> Iterator[int]:
        with contextlib.closing(guard.steps(100_000)) as steps:
            for step, (inputs, targets) in steps:
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.exporter.record(loss=loss, grad_norm=norm)
                optimizer.step()
                rates.step()
                optimizer.zero_grad(set_to_none=True)
                wait_for_save(guard._run)
                yield step

    def go(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            next(self._steps)

    def ask(self, action: Action, alert: str) -> None:
        """Ask as the receiver does, and train until the guard has acted."""
        request = Request(
            id=new_request_id(),
            run="gpt",
            generation=0,
            action=action,
            alert=alert,
            created_at=time.time(),
        )
        assert self._control.claim(request)
        done = {"checkpoint": "checkpoint", "recover": "rollback"}[action]
        deadline = time.monotonic() + 60
        while not any(
            event.kind == done and "to" not in event.fields for event in self.exporter._trail.events
        ):
            assert time.monotonic() < deadline, f"no {done}"
            self.go(1)

    def close(self) -> None:
        """End the training, and the page."""
        self._steps.close()
        self.exporter.close()


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """The run up to its anomaly, for which an emergency checkpoint was saved."""
    run = Guarded(folder)
    try:
        run.go(FAULT_STEP + 5)
        run.ask("checkpoint", "ActLayerAboveBaseline")
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def deep() -> Iterator[Exporter]:
    """A GPT of 1,200 blocks, 7,203 tensors: one of them a fault, and no guard."""
    torch.manual_seed(1)
    model = GPT(layers=1200, width=4, heads=1, context=8)
    thresholds = Thresholds(window=20, window_minimum=5, baseline_steps=3)
    with start_exporter(model, 0, run="deep", thresholds=thresholds, max_overhead=None) as exporter:
        train(model, DEEP_FAULT_STEP - 1)
        exporter.inject_fault(DEEP_FAULT_LAYER, FAULT_FACTOR, DEEP_FAULT_STEP)
        train(model, 4)
        yield exporter
