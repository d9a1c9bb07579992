"""The loop itself: resuming, saving, ending, and leaving early."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

from alerting.control import ControlDirectory
from alerting.exceptions import CheckpointError, ConfigError, RecoveryHaltedError
from alerting.recovery import TrainingGuard
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lock import exclusive
from alerting.recovery.saver import Saver
from tests.alerting.recovery.trainer import (
    FakeDetector,
    Numbered,
    Trainer,
    read_json,
    same_as,
    uninterrupted,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("reference"))


def plain_run(total=30):
    """The trainer without any guard."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(folder)
        records, step = [], 0
        while True:
            for batch in trainer.loader:
                step += 1
                records.append(trainer.train_step(step, batch))
                if step == total:
                    return records


class TestResume:
    def test_a_guarded_run_is_bitwise_the_unguarded_one(self, reference):
        assert reference == plain_run()

    @pytest.mark.parametrize("stop", [1, 5, 7, 13, 14, 29])
    def test_a_resumed_run_is_bitwise_the_uninterrupted_one(self, tmp_path, reference, stop):
        first = Trainer(tmp_path)
        first.run(stop_after=stop)
        second = Trainer(tmp_path)
        torch.rand(100)  # the new process has drawn otherwise
        second.run()
        resumed = second.records[0][0] - 1
        # A break leaves before that step's boundary; what was begun at an earlier one is kept.
        assert resumed == (stop - 1) // 5 * 5
        assert same_as(first.records, reference)
        assert second.records == reference[resumed:]

    def test_each_sample_comes_once_an_epoch_after_a_resume(self, tmp_path):
        first = Trainer(tmp_path)
        first.run(stop_after=12)
        second = Trainer(tmp_path)
        second.run(35)
        seen = {r[0]: r[1] for r in first.records} | {r[0]: r[1] for r in second.records}
        for epoch in range(5):  # 26 samples in batches of 4: 7 steps an epoch
            ids = [i for step in range(epoch * 7 + 1, epoch * 7 + 8) for i in seen[step]]
            assert sorted(ids) == list(range(26))

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
    def test_an_optimizer_without_state_resumes_too(self, tmp_path, kind):
        whole = Trainer(tmp_path / "a", optimizer_kind=kind).run()
        Trainer(tmp_path / "b", optimizer_kind=kind).run(stop_after=3)
        assert Trainer(tmp_path / "b", optimizer_kind=kind).run() == whole
        Trainer(tmp_path / "c", optimizer_kind=kind).run(stop_after=13)
        assert Trainer(tmp_path / "c", optimizer_kind=kind).run() == whole[10:]

    def test_a_parameter_that_never_had_a_gradient_does_not_prevent_it(self, tmp_path):
        def build():
            trainer = Trainer(tmp_path)
            trainer.model.register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
            trainer.optimizer.add_param_group({"params": [trainer.model.idle]})
            return trainer

        build().run(stop_after=8)
        trainer = build()
        trainer.run(12)
        assert trainer.records[0][0] == 6
        assert trainer.model.idle not in trainer.optimizer.state

    def test_a_loader_with_workers_and_its_own_generator_resumes(self, tmp_path):
        def build(folder):
            loader = DataLoader(
                Numbered(),
                batch_size=4,
                shuffle=True,
                generator=torch.Generator().manual_seed(3),
                num_workers=1,
            )
            return Trainer(folder, settings={"loader": loader})

        whole = build(tmp_path / "a").run(18)
        build(tmp_path / "b").run(18, stop_after=12)
        assert build(tmp_path / "b").run(18) == whole[10:]

    def test_one_whose_workers_live_on_resumes_in_a_later_epoch(self, tmp_path):
        def build(folder):
            loader = DataLoader(
                Numbered(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
            )
            return Trainer(folder, settings={"loader": loader})

        whole = build(tmp_path / "a").run(18)
        build(tmp_path / "b").run(18, stop_after=12)
        assert build(tmp_path / "b").run(18) == whole[10:]
        rolled_back = build(tmp_path / "c")  # from the second epoch into the first
        for step, batch in rolled_back.guard.steps(18):
            if step == 9 and len(rolled_back.records) == 8:
                rolled_back.break_model()
                rolled_back.ask("recover")
            rolled_back.records.append(rolled_back.train_step(step, batch))
        assert rolled_back.records[9:] == whole[5:]

    def test_a_gradient_scaler_resumes(self, tmp_path):
        def scales(stop=None):
            scaler = torch.amp.GradScaler("cpu", growth_interval=3)
            trainer = Trainer(tmp_path, settings={"scaler": scaler})
            seen = {}
            for step, batch in trainer.guard.steps(20):
                trainer.train_step(step, batch)
                scaler.scale(torch.ones(()))
                scaler.unscale_(trainer.optimizer)
                scaler.update()
                seen[step] = scaler.get_scale()
                if step == stop:
                    break
            return seen

        scales(stop=11)
        assert scales() == {step: 65536.0 * 2 ** (step // 3) for step in range(11, 21)}

    def test_a_loader_with_a_state_is_asked_for_it(self, tmp_path):
        class Stream:
            def __init__(self):
                self.at = 0

            def __iter__(self):
                while True:
                    self.at += 1
                    yield self.at

            def state_dict(self):
                return {"at": self.at}

            def load_state_dict(self, state):
                self.at = state["at"]

        def batches(total, stop=None):
            trainer = Trainer(tmp_path, settings={"loader": Stream()})
            seen = []
            for step, batch in trainer.guard.steps(total):
                seen.append((step, batch))
                if step == stop:
                    break
            return seen

        batches(20, stop=8)
        assert batches(20) == [(step, step) for step in range(6, 21)]

    def test_the_sampler_is_told_the_epoch(self, tmp_path):
        class Sampler(torch.utils.data.SequentialSampler):
            def set_epoch(self, epoch):
                epochs.append(epoch)

        epochs = []
        data = Numbered()
        loader = DataLoader(data, batch_size=4, sampler=Sampler(data))
        Trainer(tmp_path, settings={"loader": loader}).run(15)
        assert epochs == [0, 1, 2]

    def test_no_loader_gives_no_batch(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"loader": None})
        assert list(trainer.guard.steps(3)) == [(1, None), (2, None), (3, None)]

    def test_the_detector_is_told_the_steps_and_paused_meanwhile(self, tmp_path):
        trainer = Trainer(tmp_path)
        capture = trainer.guard._run.saver._state._capture
        paused = []

        def watched(step):
            paused.append(trainer.detector.is_paused)
            return capture(step)

        trainer.guard._run.saver._state._capture = watched
        trainer.run(6)
        assert trainer.detector.steps == [0, 1, 2, 3, 4, 5, 6]
        assert paused == [True] * 3
        again = Trainer(tmp_path)
        again.run(8)
        assert again.detector.steps == [6, 7, 8]
        assert again.detector.resets == [0]


class TestSaving:
    def test_a_checkpoint_is_due_by_steps(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 10})
        trainer.run(17)
        assert trainer.names() == [f"step-{step:08d}-g0" for step in (0, 5, 10, 15, 17)]
        manifest = read_json(tmp_path / "checkpoints" / "step-00000015-g0" / "manifest.json")
        assert manifest["kind"] == "periodic"
        assert manifest["parent"] == "step-00000010-g0"
        assert manifest["ancestors"] == ["step-00000005-g0", "step-00000000-g0"]
        assert manifest["data"] == {"epoch": 2, "batch": 1, "taken": 15}

    def test_or_by_time(self, tmp_path):
        trainer = Trainer(
            tmp_path, settings={"save_every_steps": 1000, "save_every_seconds": 0, "keep": 50}
        )
        trainer.run(10)
        steps = [read_json(p / "manifest.json")["step"] for p in checkpoints(trainer)]
        assert len(steps) > 2
        assert steps[-1] == 10

    def test_updates_after_the_boundary_are_not_saved(self, tmp_path, monkeypatch):
        """The writing is held up until the weights have changed; the file has the old ones."""
        from alerting.recovery import save

        go = threading.Event()
        write = save._write

        def late(*args):
            assert go.wait(30)
            return write(*args)

        trainer = Trainer(tmp_path, patient=False)
        weights = {}
        for step, batch in trainer.guard.steps(9):
            if step == 5:
                monkeypatch.setattr(save, "_write", late)
            trainer.train_step(step, batch)
            if step == 5:
                weights[5] = trainer.model[0].weight.detach().clone()
                moments = trainer.optimizer.state[trainer.model[0].weight]["exp_avg"].clone()
                updates = trainer.average.updates
            if step == 8:
                go.set()
                break
        again = Trainer(tmp_path)
        iterator = iter(again.guard.steps(9))
        assert next(iterator)[0] == 6
        assert torch.equal(again.model[0].weight, weights[5])
        assert torch.equal(again.optimizer.state[again.model[0].weight]["exp_avg"], moments)
        assert again.average.updates == updates
        iterator.close()

    def test_a_failing_disk_does_not_stop_training(self, tmp_path, monkeypatch, reference):
        trainer = Trainer(tmp_path)
        save = torch.save

        def full(*args, **kwargs):
            if 5 <= trainer.records[-1][0] < 15:
                raise OSError(28, "No space left on device")
            save(*args, **kwargs)

        for step, batch in trainer.guard.steps(30):
            trainer.records.append(trainer.train_step(step, batch))
            if step == 4:
                monkeypatch.setattr(torch, "save", full)
        assert trainer.records == reference
        assert trainer.guard._run.saver.failures >= 1
        assert trainer.names()[-1] == "step-00000030-g0"
        assert not list((tmp_path / "checkpoints").glob(".saving-*"))

    def test_each_failure_is_counted_at_the_next_boundary(self, tmp_path, monkeypatch):
        trainer = Trainer(tmp_path)
        own = {"run": "toy", "rank": "0"}
        registry, save, counts = trainer.detector.registry, torch.save, {}

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        for step, batch in trainer.guard.steps(12):
            counts[step] = registry.get_sample_value("act_checkpoint_failures_total", own)
            monkeypatch.setattr(torch, "save", full if step < 12 else save)
            trainer.train_step(step, batch)
        # Begun at the boundary after step 5, found failed at the one after step 6.
        assert [counts[step] for step in (1, 6, 7, 12)] == [0, 0, 1, 2]

    def test_a_failure_is_one_sentence_with_its_cause(self, tmp_path, monkeypatch, caplog):
        def full(*args, **kwargs):
            try:
                raise OSError(28, "No space left on device")
            finally:
                # So it comes out of torch.save: its archive cannot be ended any more either.
                raise RuntimeError("[enforce fail at inline_container.cc:672] .\n unexpected pos")

        monkeypatch.setattr(FileSystemWriter, "write_data", full)
        sentence = (
            "checkpoint step-00000000-g0 could not be saved: OSError: [Errno 28] No space left on "
            "device"
        )
        with pytest.raises(CheckpointError) as raised:
            Trainer(tmp_path).run()
        assert str(raised.value) == sentence
        own = [r for r in caplog.records if r.name.startswith("alerting.")]
        assert [r.getMessage() for r in own] == [f"step 0: {sentence}"]

    def test_what_cannot_be_loaded_again_is_refused_at_the_start(self, tmp_path):
        class Odd:
            def state_dict(self):
                return {"x": object()}

            def load_state_dict(self, state):
                raise NotImplementedError

        trainer = Trainer(tmp_path, settings={"state": {"odd": Odd()}})
        with pytest.raises(CheckpointError, match=r"state\['odd'\]\['x'\] is a builtins.object"):
            trainer.run(3)

    def test_saves_never_pile_up(self, tmp_path, monkeypatch):
        from alerting.recovery import save

        running, most = 0, 0
        write = save._write

        def counted(*args):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return write(*args)
            finally:
                running -= 1

        monkeypatch.setattr(save, "_write", counted)
        Trainer(tmp_path, patient=False, settings={"save_every_steps": 1}).run(20)
        assert most == 1


class TestEnd:
    def test_a_finished_run_yields_nothing(self, tmp_path, reference):
        first = Trainer(tmp_path)
        first.run()
        assert first.control.status().state == "finished"
        second = Trainer(tmp_path)
        assert second.run() == []
        assert torch.equal(second.model[0].weight, first.model[0].weight)
        assert second.control.status().state == "finished"

    def test_it_goes_on_when_more_steps_are_asked_for(self, tmp_path, reference):
        Trainer(tmp_path).run(12)
        second = Trainer(tmp_path)
        assert second.run(30) == reference[12:]

    def test_an_error_in_the_body_is_not_masked_and_the_save_is_published(self, tmp_path):
        trainer = Trainer(tmp_path, patient=False)
        with pytest.raises(ZeroDivisionError):
            fail_at(trainer, 6)
        assert "step-00000005-g0" in trainer.names()
        assert not list((tmp_path / "checkpoints").glob(".saving-*"))

    def test_a_failing_save_does_not_mask_it_either(self, tmp_path, monkeypatch):
        trainer = Trainer(tmp_path)

        def full(*args):
            raise OSError(28, "No space left on device")

        with pytest.raises(ZeroDivisionError):
            fail_at(trainer, 6, lambda: monkeypatch.setattr(torch, "save", full))
        assert trainer.guard._run.saver.failures == 1

    def test_the_status_registers_the_run(self, tmp_path):
        trainer = Trainer(tmp_path / "runs" / "a")
        iterator = iter(trainer.guard.steps(5))
        next(iterator)
        found = ControlDirectory.find(tmp_path / "runs", "toy")
        assert found is not None
        status = found.status()
        assert (status.generation, status.state, status.rollbacks_left) == (0, "running", 2)
        iterator.close()


class TestRetention:
    def test_the_newest_are_kept_and_deletions_are_logged(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 2})
        trainer.run(30)
        # Beside the newest two the newest confirmed one.
        assert trainer.names() == [f"step-{step:08d}-g0" for step in (20, 25, 30)]
        log = (tmp_path / "checkpoints" / "deletions.log").read_text()
        assert "step-00000000-g0" in log
        assert not list((tmp_path / "checkpoints").glob(".deleting-*"))

    def test_bad_checkpoints_do_not_push_out_good_ones(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 2})
        for step, batch in trainer.guard.steps(40):
            trainer.train_step(step, batch)
            if step == 14:
                trainer.detector.see_bad()
        healthy = [n for n in trainer.names() if trainer.health(n) != "suspect"]
        assert len(healthy) == 3
        assert all(int(n.split("-")[1]) < 12 for n in healthy)


class TestBadInput:
    def test_a_checkpoint_folder_of_something_else_is_refused(self, tmp_path):
        other = tmp_path / "checkpoints" / "epoch-3"
        other.mkdir(parents=True)
        (other / "model.bin").write_text("weights")
        with pytest.raises(CheckpointError, match="epoch-3, which this guard did not write"):
            Trainer(tmp_path).run()
        assert (other / "model.bin").read_text() == "weights"
        assert not (tmp_path / "guard.json").exists()

    def test_beside_ours_it_is_left_alone(self, tmp_path):
        Trainer(tmp_path).run(6)
        other = tmp_path / "checkpoints" / "step-00000900-g0"
        other.mkdir()
        (other / "model.bin").write_text("weights")
        trainer = Trainer(tmp_path, settings={"keep": 2})
        trainer.run(20)
        assert trainer.records[0][0] == 7
        assert (other / "model.bin").read_text() == "weights"

    @pytest.mark.parametrize(
        "manifest", ['{"format": "other", "version": 1}', '{"format": "act-checkpoint"}', "{}"]
    )
    def test_a_manifest_of_another_format_or_version(self, tmp_path, manifest):
        other = tmp_path / "checkpoints" / "step-1"
        other.mkdir(parents=True)
        (other / "manifest.json").write_text(manifest)
        with pytest.raises(CheckpointError, match="this guard reads only 'act-checkpoint'"):
            Trainer(tmp_path).run()

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "act-guard", "version": 1}'])
    def test_a_mangled_ledger(self, tmp_path, content):
        Trainer(tmp_path).run(6)
        (tmp_path / "guard.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"guard\.json"):
            Trainer(tmp_path).run()

    def test_the_folder_of_another_run(self, tmp_path):
        Trainer(tmp_path).run(6)
        with pytest.raises(CheckpointError, match="belongs to run 'toy'"):
            Trainer(tmp_path, settings={"run": "other"}, watched=False).run()

    def test_a_lost_ledger_costs_the_count_only(self, tmp_path, reference):
        Trainer(tmp_path).run(12)
        (tmp_path / "guard.json").unlink()
        assert Trainer(tmp_path).run() == reference[12:]

    def test_another_model_is_an_error_that_costs_no_checkpoint(self, tmp_path):
        Trainer(tmp_path).run(6)
        trainer = Trainer(tmp_path)
        trainer.model[0] = torch.nn.Linear(4, 9)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            trainer.run()
        assert {trainer.health(n) for n in trainer.names()} <= {"pending", "confirmed"}

    def test_a_smaller_model_does_not_silently_drop_weights(self, tmp_path):
        def build(model):
            optimizer = torch.optim.Adam(model.parameters())
            return TrainingGuard(tmp_path, model=model, optimizer=optimizer)

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        list(build(model).steps(2))
        with pytest.raises(CheckpointError, match=r"model or optimizer lacks: 1\.bias, 1\.weight"):
            list(build(model[:1]).steps(4))

    def test_a_missing_scheduler_is_an_error(self, tmp_path):
        Trainer(tmp_path).run(6)
        with pytest.raises(CheckpointError, match="this run has no scheduler"):
            Trainer(tmp_path, settings={"scheduler": None}).run()

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"loader": []}, "empty"),
            ({"loader": iter([1])}, "iterator"),
            ({"keep": 1}, "keep is 1"),
            ({"save_every_steps": 0}, "save_every_steps"),
            ({"max_rollbacks": -1}, "max_rollbacks"),
            ({"state": {"x": 3}}, r"state\['x'\] has no state_dict"),
            ({"save_every_seconds": float("nan")}, "save_every_seconds is nan"),
            ({"save_every_seconds": "900"}, "save_every_seconds is '900'"),
            ({"save_every_steps": "500"}, "save_every_steps is '500'"),
            ({"save_every_steps": True}, "save_every_steps is True"),
            ({"keep": 3.0}, r"keep is 3\.0, must be a whole number"),
            ({"max_rollbacks": None}, "max_rollbacks is None"),
            ({"run": "other"}, "run is 'other' and the exporter's is 'toy'"),
        ],
    )
    def test_settings_that_make_no_sense(self, tmp_path, settings, words):
        with pytest.raises(ConfigError, match=words):
            Trainer(tmp_path, settings=settings)
        assert not list(tmp_path.iterdir())

    def test_a_loader_that_gives_nothing(self, tmp_path):
        class Nothing:
            def __iter__(self):
                return iter(())

        with pytest.raises(ConfigError, match="gave no batch"):
            Trainer(tmp_path, settings={"loader": Nothing()}).run()

    @pytest.mark.parametrize("total", [0, "30", True, 1.5])
    def test_no_number_of_steps(self, tmp_path, total):
        with pytest.raises(ConfigError, match="total_steps"):
            Trainer(tmp_path).guard.steps(total)

    def test_ranks_that_come_after_the_guard_was_made_are_refused(self, tmp_path, monkeypatch):
        trainer = Trainer(tmp_path)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with pytest.raises(ConfigError, match="init_process_group"):
            trainer.guard.steps(3)


class TestDamage:
    """Altered, truncated, missing, half-written: the next older one is taken."""

    def test_a_step_that_is_saved_again_gets_another_name(self, tmp_path, reference):
        first = Trainer(tmp_path, settings={"keep": 9})
        first.run(12)
        (first.folder / "checkpoints" / "step-00000012-g0" / "rank-00000.pt").unlink()
        second = Trainer(tmp_path, settings={"keep": 9})
        second.run(12)
        assert "step-00000012-g0-2" in second.names()
        third = Trainer(tmp_path, settings={"keep": 9})
        assert third.run() == reference[12:]

    @pytest.mark.parametrize("content", ["", "{}", '{"health": "fine"}', None])
    def test_a_mangled_health_is_not_trusted(self, tmp_path, reference, content):
        first = Trainer(tmp_path, settings={"keep": 9})
        first.run(12)
        path = tmp_path / "checkpoints" / "step-00000012-g0" / "health.json"
        path.unlink()
        if content is not None:
            path.write_text(content)
        second = Trainer(tmp_path)
        second.run()
        assert second.records[0][0] == 11

    @pytest.mark.parametrize("file", ["manifest.json", "health.json"])
    def test_what_is_mangled_is_said_once(self, tmp_path, caplog, file):
        Trainer(tmp_path, settings={"keep": 9}).run(12)
        path = tmp_path / "checkpoints" / "step-00000012-g0" / file
        path.write_text("{")
        caplog.clear()
        Trainer(tmp_path, settings={"keep": 9}).run()
        assert len([r for r in caplog.records if str(path) in r.getMessage()]) == 1

    def test_unfinished_saves_and_deletions_are_cleared_away(self, tmp_path, reference):
        Trainer(tmp_path).run(12)
        checkpoints = tmp_path / "checkpoints"
        shutil.copytree(checkpoints / "step-00000012-g0", checkpoints / ".saving-step-00000015-g0")
        (checkpoints / ".deleting-step-00000001-g0").mkdir()
        assert Trainer(tmp_path).run() == reference[12:]
        assert not [p for p in checkpoints.iterdir() if p.name.startswith(".")]

    def test_nothing_healthy_halts_rather_than_starting_anew(self, tmp_path):
        first = Trainer(tmp_path)
        first.run(12)
        for name in first.names():
            (tmp_path / "checkpoints" / name / "rank-00000.pt").unlink()
        with pytest.raises(RecoveryHaltedError, match="healthy"):
            Trainer(tmp_path).run()
        assert first.control.status().state == "halted"

    def test_a_run_whose_checkpoints_vanished_never_starts_anew(self, tmp_path):
        Trainer(tmp_path).run(6)
        shutil.rmtree(tmp_path / "checkpoints")
        before = (tmp_path / "guard.json").read_text()
        trainer = Trainer(tmp_path)
        with pytest.raises(CheckpointError, match="no checkpoint, although this run has begun"):
            trainer.run()
        assert trainer.records == []
        assert (tmp_path / "guard.json").read_text() == before

    @pytest.mark.parametrize("file", ["guard.json", "nothing"])
    def test_nor_does_one_whose_manifests_are_all_mangled(self, tmp_path, file):
        first = Trainer(tmp_path)
        first.run(6)
        for name in first.names():
            (tmp_path / "checkpoints" / name / "manifest.json").write_text("{")
        (tmp_path / file).unlink(missing_ok=True)
        trainer = Trainer(tmp_path)
        with pytest.raises(CheckpointError, match="none of them has a manifest that can be read"):
            trainer.run()
        assert trainer.records == []
        assert trainer.names() == first.names()

    def test_what_a_former_process_left_half_done_is_kept_then(self, tmp_path):
        Trainer(tmp_path).run(6)
        checkpoints = tmp_path / "checkpoints"
        (checkpoints / "step-00000006-g0").rename(checkpoints / ".saving-step-00000006-g0")
        for name in ("step-00000000-g0", "step-00000005-g0"):
            shutil.rmtree(checkpoints / name)
        with pytest.raises(CheckpointError, match="although this run has begun"):
            Trainer(tmp_path).run()
        assert (checkpoints / ".saving-step-00000006-g0" / "manifest.json").exists()

    @pytest.mark.parametrize(
        ("owner", "method"),
        [(Saver, "save_now"), (CheckpointStore, "publish"), (LedgerFile, "update")],
        ids=lambda v: getattr(v, "__name__", v),
    )
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_crash_in_the_first_start_prevents_no_second_one(
        self, tmp_path, monkeypatch, reference, owner, method, when
    ):
        original = getattr(owner, method)

        def dying(self, *args, **kwargs):
            if when == "after":
                original(self, *args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, dying)
            patch.setattr(Saver, "close", lambda self: None)  # the dead clean up nothing
            with pytest.raises(KeyboardInterrupt):
                Trainer(tmp_path).run()
        assert Trainer(tmp_path).run() == reference

    def test_nor_does_a_first_checkpoint_that_cannot_be_written(self, tmp_path, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                Trainer(tmp_path).run()
        assert len(Trainer(tmp_path).run()) == 30

    def test_a_detector_that_cannot_take_its_state_learns_anew(self, tmp_path, caplog, reference):
        class Changed(FakeDetector):
            def load_state_dict(self, state):
                raise ValueError("taps.0: unknown")

        Trainer(tmp_path).run(12)
        trainer = Trainer(tmp_path, settings={"exporter": Changed()})
        assert trainer.run() == reference[12:]
        assert "the exporter's state is not taken over, it learns anew: taps.0" in caplog.text


class TestMetrics:
    def test_the_families_are_exposed_while_the_run_goes_on(self, tmp_path):
        trainer = Trainer(tmp_path)
        registry = trainer.detector.registry
        own = {"run": "toy", "rank": "0"}
        for step, batch in trainer.guard.steps(20):
            trainer.train_step(step, batch)
            if step == 1:
                assert registry.get_sample_value("act_checkpoint_last_step", own) == 0
                assert registry.get_sample_value("act_checkpoint_failures_total", own) == 0
                assert registry.get_sample_value("act_rollbacks_total", own) == 0
                assert registry.get_sample_value("act_rollback_budget_remaining", own) == 2
                assert (
                    registry.get_sample_value("act_checkpoints", {**own, "health": "pending"}) == 1
                )
                at = registry.get_sample_value("act_checkpoint_last_success_timestamp_seconds", own)
                assert time.time() - at < 60
                assert registry.get_sample_value("act_checkpoint_save_seconds", own) > 0
                assert not [
                    s.name for f in registry.collect() for s in f.samples if "_created" in s.name
                ]
        again = Trainer(tmp_path)
        again.guard._run._detector.registry = registry  # the former guard has left it
        again.run(21)

    def test_the_budget_is_unknown_until_the_run_has_begun(self, tmp_path, monkeypatch):
        """A first checkpoint of 100 GB takes minutes, and 0 would look like a spent budget."""
        trainer = Trainer(tmp_path)
        own = {"run": "toy", "rank": "0"}
        seen = []

        def capture(step, folder):
            value = trainer.detector.registry.get_sample_value("act_rollback_budget_remaining", own)
            seen.append(value)
            return original(step, folder)

        original = trainer.guard._run.saver._state.capture
        monkeypatch.setattr(trainer.guard._run.saver._state, "capture", capture)
        trainer.run(6)
        assert seen == [None, 2, 2]


class TestLock:
    def test_two_trainers_never_share_a_folder(self, tmp_path):
        trainer = Trainer(tmp_path)
        iterator = iter(trainer.guard.steps(5))
        next(iterator)
        for spelling in (tmp_path, tmp_path / "checkpoints" / ".."):
            with pytest.raises(CheckpointError, match="another guard is training in"):
                Trainer(spelling).run(5)
        # Those two have not let go of what the first one holds.
        script = (
            "import sys; from tests.alerting.recovery.trainer import Trainer\n"
            "from pathlib import Path; Trainer(Path(sys.argv[1])).run(5)"
        )
        second = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1
        assert "another guard is training in" in second.stderr
        iterator.close()
        assert len(Trainer(tmp_path).run(5)) == 5

    def test_of_many_threads_one_gets_it(self, tmp_path):
        start, end, held = threading.Barrier(20), threading.Barrier(20), []

        def hold():
            start.wait()
            try:
                with exclusive(tmp_path / "lock"):
                    held.append(1)
                    end.wait()
            except CheckpointError:
                end.wait()

        threads = [threading.Thread(target=hold) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held == [1]

    def test_a_forked_child_holds_nothing_and_may_take_it_later(self, tmp_path):
        def can_lock():
            try:
                with exclusive(tmp_path / "lock"):
                    return True
            except CheckpointError:
                return False

        tried, try_ = os.pipe()
        released, release = os.pipe()
        with exclusive(tmp_path / "lock"):
            child = os.fork()
            if child == 0:
                early = can_lock()
                os.write(try_, b".")
                os.read(released, 1)
                os._exit(10 * early + can_lock())
            os.read(tried, 1)
        os.write(release, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def fail_at(trainer, last, at_first=lambda: None):
    """Train until the body of step `last` raises."""
    for step, batch in trainer.guard.steps(30):
        if step == 1:
            at_first()
        trainer.train_step(step, batch)
        if step == last:
            raise ZeroDivisionError


def checkpoints(trainer):
    return sorted(
        (p.parent for p in (trainer.folder / "checkpoints").glob("*/manifest.json")),
        key=lambda p: read_json(p / "manifest.json")["number"],
    )


def test_the_default_name_is_the_folders(tmp_path):
    model = torch.nn.Linear(1, 1)
    guard = TrainingGuard(
        tmp_path / "gpt", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    list(guard.steps(1))
    assert read_json(tmp_path / "gpt" / "control" / "status.json")["run"] == "gpt"
