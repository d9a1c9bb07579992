"""The batch of the first bad step: saved for its owner alone, and never at training's cost."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from alerting.exceptions import ConfigError
from alerting.recovery import TrainingGuard
from alerting.recovery.batches import Batches
from tests.alerting.recovery.trainer import FakeDetector, Trainer, uninterrupted

LIMIT = 1 << 20


def trained(folder: Path, bad: int = 12, **settings: Any) -> Trainer:
    """A run of 20 steps, one of which is bad."""
    trainer = Trainer(folder, settings={"save_batch_bytes": LIMIT, **settings})
    for step, batch in trainer.guard.steps(20):
        if step == bad:
            trainer.detector.see_bad()
        trainer.records.append(trainer.train_step(step, batch))
    return trainer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "batches").glob("*"))


class TestSaved:
    def test_is_the_one_of_the_first_bad_step(self, tmp_path: Path) -> None:
        trainer = trained(tmp_path)
        assert files(tmp_path) == ["step-00000012-rank-00000.pt"]
        file = tmp_path / "batches" / "step-00000012-rank-00000.pt"
        ids, inputs = torch.load(file, weights_only=True)
        assert tuple(ids.tolist()) == trainer.records[11][1]
        assert inputs.shape == (len(ids), 4)

    def test_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            trained(tmp_path)
        finally:
            os.umask(before)
        folder = tmp_path / "batches"
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_micro_batches_have_a_file_each(self, tmp_path: Path) -> None:
        trainer = Trainer(tmp_path, settings={"save_batch_bytes": LIMIT})
        taken = {}
        for step, batches in trainer.guard.steps(8, micro_batches=2):
            taken[step] = batches
            if step == 5:
                trainer.detector.see_bad()
            trainer.train_step(step, batches[0])
        names = [f"step-00000005-rank-00000-micro-{number}.pt" for number in (1, 2)]
        assert files(tmp_path) == names
        for name, (ids, _) in zip(names, taken[5], strict=True):
            assert torch.equal(torch.load(tmp_path / "batches" / name)[0], ids)

    def test_it_is_there_when_the_loop_raises(self, tmp_path: Path) -> None:
        trainer = Trainer(tmp_path, settings={"save_batch_bytes": LIMIT})

        def train() -> None:
            for step, batch in trainer.guard.steps(20):
                if step == 9:
                    trainer.detector.see_bad()
                if step == 10:
                    raise ArithmeticError("the loss is NaN")
                trainer.train_step(step, batch)

        with pytest.raises(ArithmeticError):
            train()
        assert files(tmp_path) == ["step-00000009-rank-00000.pt"]

    def test_a_recovery_has_it_saved_before(self, tmp_path: Path) -> None:
        trainer = Trainer(tmp_path, settings={"save_batch_bytes": LIMIT})
        broken = False
        for step, batch in trainer.guard.steps(20):
            if step == 12 and not broken:
                broken = True
                trainer.ask("recover")
                trainer.break_model()
            trainer.train_step(step, batch)
        assert trainer.detector.resets[-1] == 1
        assert files(tmp_path) == ["step-00000012-rank-00000.pt"]

    def test_of_many_anomalies_the_last_three_stay(self, tmp_path: Path) -> None:
        detector = FakeDetector()
        batches = Batches(tmp_path / "batches", LIMIT, detector, 0)
        for step in range(1, 7):
            batches.hold(step, [torch.tensor([step]), torch.tensor([-step])])
            detector.reset(0)
            detector.see_bad()
            detector.step(step)
            batches.look()
        other = Batches(tmp_path / "batches", LIMIT, detector, 1)
        other.hold(6, [torch.tensor([6])])
        other.look()
        batches.close()
        other.close()
        kept = [f"step-0000000{s}-rank-00000-micro-{n}.pt" for s in (4, 5, 6) for n in (1, 2)]
        assert files(tmp_path) == sorted([*kept, "step-00000006-rank-00001.pt"])

    def test_what_a_tokenizer_returns_is_read_without_its_classes(self, tmp_path: Path) -> None:
        (tmp_path / "batches").mkdir()
        batch = UserDict({"input_ids": torch.arange(6).view(2, 3), "text": ("a", "b")})
        saved_of(tmp_path, batch)
        read = torch.load(tmp_path / "batches" / "step-00000001-rank-00000.pt", weights_only=True)
        assert torch.equal(read["input_ids"], batch["input_ids"])
        assert read["text"] == ("a", "b")

    def test_arrays_are_saved_as_tensors_and_count(self, tmp_path: Path, caplog) -> None:
        (tmp_path / "batches").mkdir()
        saved_of(tmp_path, {"pixels": numpy.arange(6.0)})
        read = torch.load(tmp_path / "batches" / "step-00000001-rank-00000.pt", weights_only=True)
        assert read["pixels"].tolist() == [0, 1, 2, 3, 4, 5]
        saved_of(tmp_path, numpy.zeros(LIMIT, dtype=numpy.float64))
        assert f"{8 * LIMIT} bytes are more than save_batch_bytes" in caplog.text


def saved_of(folder: Path, batch: Any, limit: int = LIMIT) -> None:
    """Have the batch of a bad step 1 saved."""
    detector = FakeDetector()
    batches = Batches(folder / "batches", limit, detector, 0)
    batches.hold(1, [batch])
    detector.see_bad()
    detector.step(1)
    batches.look()
    batches.close()


class TestOff:
    def test_is_the_default(self, tmp_path: Path) -> None:
        trained(tmp_path, save_batch_bytes=0)
        assert not (tmp_path / "batches").exists()

    @pytest.mark.parametrize("missing", ["exporter", "loader"])
    def test_what_it_needs_is_said(self, tmp_path: Path, missing: str) -> None:
        model = torch.nn.Linear(1, 1)
        settings = {"exporter": FakeDetector(), "loader": [1], missing: None}
        with pytest.raises(ConfigError, match=r"needs an exporter, .* and a loader"):
            TrainingGuard(
                tmp_path,
                model=model,
                optimizer=torch.optim.SGD(model.parameters()),
                save_batch_bytes=1,
                **settings,
            )


class Thing:
    """Of no kind that a checkpoint holds."""


class Hostile:
    """Fails whoever looks at it."""

    @property
    def __class__(self) -> type:
        raise ArithmeticError("do not look")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return uninterrupted(tmp_path_factory.mktemp("reference"), 20)


class TestTrainingGoesOn:
    """Whatever happens to the file: the same steps, bit for bit, and one line in the log."""

    def test_where_it_is_saved(self, tmp_path: Path, reference: list[Any]) -> None:
        assert trained(tmp_path).records == reference

    def test_where_it_is_too_large(self, tmp_path, reference, caplog) -> None:
        assert trained(tmp_path, save_batch_bytes=20).records == reference
        assert "its batch is not saved: 96 bytes are more than save_batch_bytes, 20" in caplog.text
        assert not (tmp_path / "batches").exists()

    def test_where_there_is_no_room_for_it(self, tmp_path, caplog) -> None:
        """By a limit on the size of files, for which no disk need be filled."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            saved_of(tmp_path, torch.ones(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said = f"its batch is not saved: OSError: [Errno {errno.EFBIG}] File too large"
        assert said in caplog.text
        assert files(tmp_path) == []
        saved_of(tmp_path, torch.ones(100_000))
        assert files(tmp_path) == ["step-00000001-rank-00000.pt"]

    def test_where_the_folder_cannot_be_made(self, tmp_path, reference, caplog) -> None:
        (tmp_path / "batches").write_text("a file of somebody else's")
        assert trained(tmp_path).records == reference
        assert "step 12 was bad, and its batch is not saved: " in caplog.text

    def test_where_it_is_of_a_class_that_no_checkpoint_holds(self, tmp_path, caplog) -> None:
        saved_of(tmp_path, [Thing()])
        assert "test_batches.Thing; a checkpoint holds tensors" in caplog.text
        assert not (tmp_path / "batches").exists()

    def test_where_it_cannot_even_be_looked_at(self, tmp_path, caplog) -> None:
        saved_of(tmp_path, Hostile())
        assert "its batch is not held: ArithmeticError: do not look" in caplog.text

    def test_that_it_cannot_be_looked_at_is_said_once(self, tmp_path, caplog) -> None:
        batches = Batches(tmp_path / "batches", LIMIT, FakeDetector(), 0)
        for step in range(1, 10):
            batches.hold(step, [numpy.array(["a", "b"])])
        assert caplog.text.count("its batch is not held") == 1

    def test_where_it_is_no_longer_at_hand(self, tmp_path, caplog) -> None:
        detector = FakeDetector()
        batches = Batches(tmp_path / "batches", LIMIT, detector, 0)
        detector.see_bad()
        for step in range(1, 7):
            batches.hold(step, [torch.ones(1)])
            detector.step(step)
        batches.look()
        batches.close()
        assert "step 1 was bad, and its batch is no longer at hand" in caplog.text

    def test_where_the_detector_fails(self, tmp_path, caplog, monkeypatch) -> None:
        detector = FakeDetector()
        batches = Batches(tmp_path / "batches", LIMIT, detector, 0)
        monkeypatch.setattr(detector, "onset", lambda: 1 / 0)
        batches.hold(1, [torch.ones(1)])
        batches.look()
        assert "not saved: ZeroDivisionError" in caplog.text
