"""Lightning's Trainer, guarded: rolled back and told to end, it is bitwise the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from alerting.control import ControlDirectory
from alerting.exceptions import ConfigError
from alerting.exit_codes import RESTART
from alerting.recovery.lightning import LightningGuard
from tests.alerting.recovery.trainer import FakeDetector, Numbered, open_request

# Lightning and torchdata use what torch is about to drop, and give advice for large models.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

GUARDED: dict[str, Any] = {"save_every_steps": 5, "onset_margin_steps": 2}


class Module(lightning.LightningModule):
    """Dropout, a scheduler, and a record of each batch; what happens is told by step."""

    def __init__(self, happens: dict[int, Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.happens = happens or {}
        self.records: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        step = self.trainer.global_step + 1
        # Once: after a rollback it goes well.
        self.happens.pop(step, lambda module: None)(self)
        ids, inputs = batch
        loss = (self.net(inputs) - 1).square().mean()
        self.records.append([step, ids.tolist(), loss.item()])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(folder: Path | None, happens: dict[int, Any] | None = None, **arguments: Any) -> Module:
    """Train, under a guard where a folder is given; seven steps are an epoch."""
    torch.manual_seed(0)
    module = Module(happens)
    exporter = arguments.pop("exporter", None)
    loader = arguments.pop("loader", StatefulDataLoader)(Numbered(), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        **{
            "max_steps": 20,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **arguments,
        }
    )
    validated = DataLoader(Numbered(4))
    if folder is None:
        trainer.fit(module, loader, validated)
    else:
        guard = LightningGuard(folder, run="toy", exporter=exporter, **GUARDED)
        guard.run(trainer, module, loader, validated)
    return module


@pytest.fixture(scope="module")
def reference() -> Module:
    return fit(None)


def same_weights(one: Module, other: Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def last_of(records: list[list[Any]]) -> list[list[Any]]:
    return list({record[0]: record for record in records}.values())


class TestRollback:
    @pytest.mark.parametrize("step", [4, 13, 15])
    def test_it_is_bitwise_as_if_nothing_had_happened(self, tmp_path, reference, step):
        detector = FakeDetector()

        def fault(module: Module) -> None:
            with torch.no_grad():
                module.net[0].weight.mul_(100)
            detector.see_bad()
            open_request(tmp_path, "recover")

        module = fit(tmp_path, {step: fault}, exporter=detector)
        steps = [record[0] for record in module.records]
        assert steps.count(step) == 2
        assert last_of(module.records) == reference.records
        assert same_weights(module, reference)
        status = ControlDirectory(tmp_path / "control").status()
        assert (status.state, status.generation) == ("finished", 1)

    def test_with_validation_within_the_epoch(self, tmp_path):
        plain = fit(None, val_check_interval=3, max_steps=-1, max_epochs=3)
        detector = FakeDetector()

        def fault(module: Module) -> None:
            detector.see_bad()
            open_request(tmp_path, "recover")

        settings = {"val_check_interval": 3, "max_steps": -1, "max_epochs": 3}
        module = fit(tmp_path, {11: fault}, exporter=detector, **settings)
        assert len(module.records) > len(plain.records) == 21
        assert last_of(module.records) == plain.records
        assert same_weights(module, plain)


class TestEnd:
    @pytest.mark.parametrize("step", [6, 14])
    def test_told_to_end_it_saves_and_goes_on_from_there(self, tmp_path, reference, step):
        def end(module: Module) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(SystemExit) as ended:
            fit(tmp_path, {step: end})
        assert ended.value.code == RESTART
        second = fit(tmp_path)
        begun = second.records[0][0]
        # The last batch of an epoch has its boundary together with the next one's.
        assert begun == (step + 1 if step % 7 else step + 2)
        assert second.records == reference.records[begun - 1 :]
        assert same_weights(second, reference)

    def test_a_run_that_has_finished_trains_no_step_more(self, tmp_path):
        fit(tmp_path, max_steps=6)
        assert fit(tmp_path, max_steps=6).records == []


class TestRefused:
    def test_a_loader_without_a_state(self, tmp_path):
        with pytest.raises(ConfigError, match="DataLoader has no state_dict"):
            fit(tmp_path, loader=DataLoader)

    def test_a_least_number_of_epochs(self, tmp_path):
        with pytest.raises(ConfigError, match="min_epochs"):
            fit(tmp_path, min_epochs=2)
