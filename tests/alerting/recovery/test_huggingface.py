"""Hugging Face's Trainer, guarded: rolled back, killed and told to end, it is bitwise the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from act_exporter import start_exporter
from alerting.control import ControlDirectory
from alerting.exceptions import CheckpointError, ConfigError
from alerting.exit_codes import RESTART
from alerting.recovery.huggingface import HuggingFaceGuard
from deploy.demo.servers import REPOSITORY, free_port
from tests.alerting.recovery.hugged import GUARDED, Fault, Signalled, trainer
from tests.alerting.recovery.trainer import FakeDetector, Trainer, open_request, read_json

SECONDS = 120


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    unguarded = trainer(tmp_path_factory.mktemp("output"))
    unguarded.train()
    return unguarded


def last_of(records: list[list[Any]]) -> list[list[Any]]:
    """Each step as it was at its last time."""
    return list({record[0]: record for record in records}.values())


def same_weights(one: Any, other: Any) -> bool:
    states = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))


class TestRollback:
    def test_it_is_bitwise_as_if_nothing_had_happened(self, tmp_path, reference):
        detector = FakeDetector()
        guarded = trainer(tmp_path / "output", Fault(13, detector, tmp_path))
        output = HuggingFaceGuard(tmp_path, exporter=detector, **GUARDED).run(guarded)
        assert output.global_step == 20
        steps = [record[0] for record in guarded.records]
        assert steps.count(13) == 2
        assert last_of(guarded.records) == reference.records
        assert same_weights(guarded, reference)
        assert detector.resets == [0, 1]
        status = ControlDirectory(tmp_path / "control").status()
        assert (status.state, status.generation) == ("finished", 1)
        # The checkpoint of the end is that of a model which from_pretrained can read.
        assert (tmp_path / f"checkpoints/{names(tmp_path)[-1]}/checkpoint-20/config.json").exists()

    def test_across_epochs_with_an_evaluation_at_each_end(self, tmp_path):
        plain = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch"}
        plain |= {"gradient_accumulation_steps": 2}
        unguarded = trainer(tmp_path / "plain", **plain)
        unguarded.train()
        detector, folder = FakeDetector(), tmp_path / "run"
        guarded = trainer(tmp_path / "output", Fault(11, detector, folder), **plain)
        settings = {**GUARDED, "save_every_steps": 4}  # an epoch has four
        HuggingFaceGuard(folder, exporter=detector, **settings).run(guarded)
        begun = [record[0] for record in guarded.records].index(11) + 2
        again = guarded.records[begun:]
        # The first pass until the fault, then the way from the epoch's end.
        assert again[0][0] in (5, 9)
        assert again == [r for r in unguarded.records if r[0] >= again[0][0]]
        assert same_weights(guarded, unguarded)

    def test_a_run_that_has_finished_trains_no_step_more(self, tmp_path):
        HuggingFaceGuard(tmp_path, **GUARDED).run(trainer(tmp_path / "output", max_steps=6))
        again = trainer(tmp_path / "output", max_steps=6)
        assert HuggingFaceGuard(tmp_path, **GUARDED).run(again) is None
        assert again.records == []

    def test_a_backup_is_made_when_asked_for(self, tmp_path):
        detector = FakeDetector()
        ControlDirectory(tmp_path / "control").create()
        ask = open_request(tmp_path, "checkpoint")
        HuggingFaceGuard(tmp_path, exporter=detector, **GUARDED).run(
            trainer(tmp_path / "output", max_steps=4)
        )
        answer = ControlDirectory(tmp_path / "control").read_answer(ask)
        assert (answer.result, "step-00000001-g0-backup" in names(tmp_path)) == ("done", True)

    def test_the_exporter_sees_the_steps_and_goes_back_with_them(self, tmp_path):
        guarded = trainer(tmp_path / "output", max_steps=7)
        with start_exporter(guarded.model, 0, run="hf") as exporter:
            HuggingFaceGuard(tmp_path, exporter=exporter, **GUARDED).run(guarded)
            labels = {"run": "hf", "rank": "0"}
            assert exporter.registry.get_sample_value("act_step", labels) == 7
        again = trainer(tmp_path / "output", max_steps=9)
        with start_exporter(again.model, 0, run="hf") as exporter:
            HuggingFaceGuard(tmp_path, exporter=exporter, **GUARDED).run(again)
            assert exporter.registry.get_sample_value("act_step", labels) == 9
        assert [record[0] for record in again.records] == [8, 9]


class TestEnd:
    def test_told_to_end_it_saves_and_goes_on_from_there(self, tmp_path, reference):
        first = trainer(tmp_path / "output", Signalled(signal.SIGTERM, 8))
        with pytest.raises(SystemExit) as ended:
            HuggingFaceGuard(tmp_path, **GUARDED).run(first)
        assert ended.value.code == RESTART
        second = trainer(tmp_path / "output")
        torch.rand(100)  # the new process has drawn otherwise
        HuggingFaceGuard(tmp_path, **GUARDED).run(second)
        assert first.records + second.records == reference.records
        assert same_weights(second, reference)

    def test_killed_it_goes_on_from_its_newest_checkpoint(self, tmp_path, reference):
        killed = start(tmp_path, 1, "SIGKILL", "14")
        assert killed == [-signal.SIGKILL]
        second = trainer(tmp_path / "output")
        HuggingFaceGuard(tmp_path, exporter=FakeDetector(), **GUARDED).run(second)
        begun = second.records[0][0]
        assert begun == 11
        assert second.records == reference.records[begun - 1 :]
        assert same_weights(second, reference)


class TestRanks:
    def test_two_ranks_are_rolled_back_together(self, tmp_path):
        assert start(tmp_path, 2, "fault", "13") == [0, 0]
        both = [read_json(tmp_path / f"rank-{rank}.json") for rank in (0, 1)]
        assert [r[0] for r in both[0]] == [r[0] for r in both[1]]
        assert [r[1] for r in both[0]] != [r[1] for r in both[1]]  # each has data of its own
        for records in both:
            assert last_of(records)[-1][0] == 20
            first = {record[0]: record for record in reversed(records)}
            last = {record[0]: record for record in records}
            again = [step for step in range(1, 13) if first[step] is not last[step]]
            assert again
            assert [first[step] for step in again] == [last[step] for step in again]


class TestRefused:
    @pytest.mark.parametrize(
        "arguments",
        [{"save_strategy": "steps"}, {"ignore_data_skip": True}, {"auto_find_batch_size": True}],
    )
    def test_arguments_that_do_not_go_together_with_a_guard(self, tmp_path, arguments):
        refused = trainer(tmp_path / "output", **arguments)
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            HuggingFaceGuard(tmp_path / "run").run(refused)
        assert not (tmp_path / "run").exists()

    def test_the_run_folder_of_a_loop_of_ones_own(self, tmp_path):
        Trainer(tmp_path).run(6)
        with pytest.raises(CheckpointError, match="was not saved by Hugging Face"):
            HuggingFaceGuard(tmp_path, run="toy").run(trainer(tmp_path / "output"))

    def test_settings_default_to_those_of_the_training_guard(self):
        import inspect

        from alerting.recovery import TrainingGuard
        from alerting.recovery.settings import Settings

        parameters = inspect.signature(TrainingGuard).parameters
        for name, value in inspect.getmembers(Settings()):
            if name in Settings.__dataclass_fields__:
                assert parameters[name].default == value


def start(folder: Path, ranks: int, *what: str) -> list[int]:
    """Train in processes of their own; their exit codes."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        own = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "tests.alerting.recovery.hugged", folder, *what]
        processes.append(
            subprocess.Popen(command, cwd=REPOSITORY, env=environment | (own if ranks > 1 else {}))
        )
    try:
        return [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
