"""Accelerate's prepared objects in the guard's loop: rolled back, it is bitwise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from alerting.exceptions import ConfigError
from alerting.recovery import TrainingGuard
from tests.alerting.recovery.trainer import FakeDetector, Numbered, open_request


def train(folder: Path, *, fault: int | None = None, stop: int | None = None) -> list[list[Any]]:
    """A record of each step taken; a fault happens once, a stop leaves the loop."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
    plain = DataLoader(Numbered(), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, adam, cosine, plain)
    detector = FakeDetector()
    guard = TrainingGuard(
        folder,
        model=model,
        optimizer=optimizer.optimizer,
        scheduler=scheduler,
        loader=loader,
        exporter=detector,
        save_every_steps=5,
        onset_margin_steps=2,
    )
    records = []
    for step, (ids, inputs) in guard.steps(20):
        if step == fault and detector.resets[-1] == 0:
            with torch.no_grad():
                model[0].weight.mul_(100)
            detector.see_bad()
            open_request(folder, "recover")
        loss = (model(inputs) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        weight = model[0].weight.detach().double().abs().sum().item()
        records.append([step, ids.tolist(), loss.item(), rate, weight])
        if step == stop:
            break
    return records


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return train(tmp_path_factory.mktemp("reference"))


def test_a_rollback_is_bitwise_as_if_nothing_had_happened(tmp_path, reference):
    records = train(tmp_path, fault=13)
    assert len(records) > len(reference) == 20
    assert list({record[0]: record for record in records}.values()) == reference


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, reference):
    train(tmp_path, stop=14)
    records = train(tmp_path)
    assert records[0][0] > 1
    assert records == reference[records[0][0] - 1 :]


# torchdata calls it whenever a loader is made.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_its_own_way_to_a_place_in_the_data_is_refused(tmp_path):
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader = accelerator.prepare(DataLoader(Numbered(), batch_size=4, shuffle=True))
    with pytest.raises(ConfigError, match="use_stateful_dataloader"):
        TrainingGuard(tmp_path, model=model, optimizer=optimizer, loader=loader)
