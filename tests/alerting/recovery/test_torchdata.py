"""A loader that keeps its own place: torchdata's, with workers and a shuffle of its own."""

from __future__ import annotations

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.alerting.recovery.trainer import Numbered, Trainer

# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def loader(workers: int, seed: int = 1) -> StatefulDataLoader:
    torch.manual_seed(seed)  # it draws the seed of its shuffle when it is made
    return StatefulDataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, workers):
    reference = Trainer(tmp_path / "reference", settings={"loader": loader(workers)}).run(24)
    first = Trainer(tmp_path / "run", settings={"loader": loader(workers)})
    first.run(24, stop_after=13)
    second = Trainer(tmp_path / "run", settings={"loader": loader(workers, seed=2)})
    # From step 10 on: in the second epoch of seven batches, three of which are behind it.
    assert second.run(24) == reference[10:]


def test_a_rollback_repeats_the_same_batches(tmp_path):
    reference = Trainer(tmp_path / "reference", settings={"loader": loader(0)}).run(24)
    trainer = Trainer(tmp_path / "run", settings={"loader": loader(0), "keep": 5})
    for step, batch in trainer.guard.steps(24):
        if step == 13 and not trainer.detector.resets[1:]:
            trainer.break_model()
            trainer.ask("recover")
        trainer.records.append(trainer.train_step(step, batch))
    last = {record[0]: record for record in trainer.records}
    assert list(last.values()) == reference
