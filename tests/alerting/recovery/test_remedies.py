"""What a rollback changes: applied on every rank, ended by step, and the same after a crash."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from alerting.exceptions import ConfigError, RecoveryHaltedError
from alerting.recovery import Callback, ClipGradients, LowerLearningRate, SkipBatches
from alerting.recovery.position import Nowhere
from alerting.recovery.remedies import Applied
from alerting.recovery.torch_steps import TorchSteps
from alerting.recovery.treatment import Treatment
from tests.alerting.recovery.ranked import last_of, run, steps_of
from tests.alerting.recovery.trainer import Trainer, read_json, same_as, uninterrupted

FAULT, BACK = 18, 15
KEEP = {"keep": 9}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("reference"))


def rolled_back(folder, remedies, *, faults=1, stop=None, total=40, **settings):
    """A run whose step 18 is bad so many times; it is left after step `stop` of what follows."""
    chosen = {} if remedies is None else {"remedies": remedies}
    trainer = Trainer(folder, settings={**KEEP, **chosen, **settings})
    for step, batch in trainer.guard.steps(total):
        generation = trainer.control.status().generation
        if step == FAULT and generation < faults:
            trainer.break_model()
            trainer.ask("recover", generation)
        trainer.records.append(trainer.train_step(step, batch))
        if generation == faults and step == stop:
            break
    return trainer


def ids(records, step):
    """The samples of the step at its last time."""
    return [record[1] for record in records if record[0] == step][-1]


def answers(folder):
    found = [read_json(path) for path in (folder / "control" / "answers").glob("*.json")]
    return sorted(found, key=lambda answer: answer["id"])


def recorded(folder, name):
    return read_json(folder / "checkpoints" / name / "manifest.json")["remedies"]


class TestSkipBatches:
    def test_the_next_batches_are_passed_over_and_recorded(self, tmp_path, reference):
        trainer = rolled_back(tmp_path, {1: [SkipBatches(3)]})
        assert [ids(trainer.records, s) for s in (16, 17)] == [ids(reference, s) for s in (19, 20)]
        [answer] = answers(tmp_path)
        assert answer["detail"] == (
            "rolled back from step 18 to step-00000015-g0; skipping 3 batches (16 to 18)"
        )
        [skip] = recorded(tmp_path, "step-00000020-g1")
        assert skip["kind"] == "skip"
        assert skip["parameters"] == {"first_batch": 16, "last_batch": 18, "ranks": 1}
        data = read_json(tmp_path / "checkpoints" / "step-00000020-g1" / "manifest.json")["data"]
        assert data["taken"] == 23

    @pytest.mark.parametrize("count", [3, 30])
    @pytest.mark.parametrize("stop", [17, 23])
    def test_a_crash_before_or_after_the_next_save_changes_nothing(self, tmp_path, count, stop):
        """30 go over into later epochs, of 7 batches each."""
        remedies = {1: [SkipBatches(count)]}
        whole = rolled_back(tmp_path / "whole", remedies).records[FAULT:]
        rolled_back(tmp_path / "run", remedies, stop=stop)
        again = Trainer(tmp_path / "run", settings={**KEEP, "remedies": remedies})
        assert same_as(again.run(40), whole)

    def test_by_default_the_second_rollback_passes_the_place_by(self, tmp_path):
        trainer = rolled_back(tmp_path, None, faults=2, total=30)
        first, second = (answer["detail"] for answer in answers(tmp_path))
        assert first.endswith("to step-00000015-g0")
        # The first bad step had the 18th batch; 100 steps follow it.
        assert second.endswith("to step-00000010-g0; skipping 108 batches (11 to 118)")
        assert trainer.guard._position.taken == 118 + 20

    def test_a_place_that_comes_after_skipped_data_is_found_by_its_batches(self, tmp_path):
        remedies = {1: [SkipBatches(7)], 2: [SkipBatches()]}
        rolled_back(tmp_path, remedies, faults=2, total=20)
        # At its second time step 18 had batch 25.
        assert answers(tmp_path)[1]["detail"].endswith("(11 to 125)")

    def test_a_loader_with_a_state_is_drawn_from_too(self, tmp_path):
        class Stream:
            at = 0

            def __iter__(self):
                while True:
                    self.at += 1
                    yield torch.tensor([self.at]), torch.full((2, 4), self.at / 100)

            def state_dict(self):
                return {"at": self.at}

            def load_state_dict(self, state):
                self.at = state["at"]

        for stop in (16, 26):
            trainer = rolled_back(
                tmp_path, {1: [SkipBatches(5)]}, stop=stop, total=30, loader=Stream()
            )
            assert trainer.records[-1][:2] == (stop, (stop + 5,))

    def test_micro_batches_are_batches_of_the_loader(self, tmp_path):
        trainer = Trainer(tmp_path, settings={**KEEP, "remedies": {1: [SkipBatches()]}})
        for step, batches in trainer.guard.steps(20, micro_batches=2):
            if step == 8 and not trainer.control.status().generation:
                trainer.break_model()
                trainer.ask("recover")
            trainer.train_step(step, batches[0])
        assert answers(tmp_path)[0]["detail"].endswith("(11 to 216)")


class TestStretch:
    REMEDIES: ClassVar = {1: [LowerLearningRate(0.5, steps=12), ClipGradients(0.01, steps=7)]}

    @pytest.mark.parametrize("stop", [17, 23, 29])
    def test_a_crash_in_it_changes_nothing(self, tmp_path, stop):
        whole = rolled_back(tmp_path / "whole", self.REMEDIES).records[FAULT:]
        rolled_back(tmp_path / "run", self.REMEDIES, stop=stop)
        again = Trainer(tmp_path / "run", settings={**KEEP, "remedies": self.REMEDIES})
        assert same_as(again.run(40), whole)

    def test_the_scheduler_goes_on_as_ever_and_the_steps_are_other_ones(self, tmp_path, reference):
        after = rolled_back(tmp_path, self.REMEDIES, total=30).records[FAULT:]
        for now, then in zip(after, reference[BACK:], strict=True):
            assert now[3] == then[3]
        assert after[0][2] == reference[BACK][2]
        assert after[1][2] != reference[BACK + 1][2]
        assert answers(tmp_path)[0]["detail"].endswith(
            "; learning rate times 0.5 until step 27; gradients clipped to 0.01 until step 22"
        )
        kinds = [
            (r["kind"], r["since"], r["until"]) for r in recorded(tmp_path, "step-00000020-g1")
        ]
        assert kinds == [("learning-rate", 15, 27), ("clip", 15, 22)]

    def test_without_guard_json_it_is_known_from_the_manifests(self, tmp_path):
        whole = rolled_back(tmp_path / "whole", self.REMEDIES).records[FAULT:]
        rolled_back(tmp_path / "run", self.REMEDIES, stop=23)
        (tmp_path / "run" / "guard.json").unlink()
        again = Trainer(tmp_path / "run", settings={**KEEP, "remedies": self.REMEDIES})
        assert same_as(again.run(40), whole)

    def test_one_in_force_when_a_checkpoint_was_saved_outlives_a_rollback_to_it(self, tmp_path):
        remedies = {1: [LowerLearningRate(0.5, steps=30)], 2: [ClipGradients(1.0, steps=2)]}
        trainer = Trainer(tmp_path, settings={**KEEP, "remedies": remedies})
        for step, batch in trainer.guard.steps(30):
            generation = trainer.control.status().generation
            if (step, generation) in ((18, 0), (28, 1)):
                trainer.break_model()
                trainer.ask("recover", generation)
            trainer.train_step(step, batch)
        assert answers(tmp_path)[1]["detail"].endswith(
            "to step-00000025-g1; gradients clipped to 1.0 until step 27; "
            "learning rate times 0.5 until step 45"
        )

    def test_a_callback_is_switched_on_and_off_and_on_again_after_a_crash(self, tmp_path):
        calls = []

        def note(in_force):
            calls.append(in_force)

        remedies = {1: [Callback(note, steps=10, name="less dropout")]}
        rolled_back(tmp_path, remedies, stop=20)
        assert calls == [True, False]
        again = Trainer(tmp_path, settings={**KEEP, "remedies": remedies})
        seen = {}
        for step, batch in again.guard.steps(30):
            seen[step] = calls[-1]
            again.train_step(step, batch)
        assert [step for step, on in seen.items() if on] == list(range(min(seen), 26))
        assert calls == [True, False, True, False]


class TestOptimizer:
    """On the optimizer's own steps."""

    def treatment(self, optimizer, *remedies):
        treatment = Treatment(TorchSteps(optimizer), Nowhere(), {}, 1)
        treatment.begin(remedies, 0)
        return treatment

    def test_each_group_is_slowed_down_and_keeps_its_rate(self):
        slow, fast = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        rate = torch.tensor(0.25)
        optimizer = torch.optim.SGD([{"params": [slow], "lr": 1.0}, {"params": [fast], "lr": rate}])
        remedy = Applied(kind="learning-rate", parameters={"factor": 0.5}, since=0, until=1)
        treatment = self.treatment(optimizer, remedy)
        for step in (1, 2):
            slow.grad, fast.grad = torch.ones(()), torch.ones(())
            optimizer.step()
            treatment.step(step)
        assert optimizer.param_groups[1]["lr"] is rate
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25]
        assert (slow.item(), fast.item()) == (-1.5, -0.375)

    def test_a_step_that_raised_does_not_lower_it_twice(self):
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        remedy = Applied(kind="learning-rate", parameters={"factor": 0.5}, since=0, until=9)
        self.treatment(optimizer, remedy)

        def fails():
            raise ValueError("no loss")

        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fails)
        weight.grad = torch.ones(())
        optimizer.step()
        assert (weight.item(), optimizer.param_groups[0]["lr"]) == (-0.5, 1.0)

    @pytest.mark.parametrize("fused", [False, True])
    def test_gradients_are_clipped_without_the_loss_scale(self, fused):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        remedy = Applied(kind="clip", parameters={"max_norm": 0.5}, since=0, until=9)
        self.treatment(optimizer, remedy)
        scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        scaler.step(optimizer)
        assert weight.tolist() == pytest.approx([-0.3, -0.4], rel=1e-4)


class TestRanks:
    PLAN: ClassVar = {
        "total": 40,
        "troubles": [
            {"rank": 1, "step": 13, "what": "bad", "once": True},
            {"rank": 0, "step": 13, "what": "ask", "action": "recover", "once": True},
        ],
        "remedies": True,
    }

    @pytest.mark.parametrize("kind", ["ddp", "fsdp"])
    def test_all_do_the_same_also_after_a_crash(self, tmp_path, kind):
        whole = run(tmp_path / "whole", tmp_path / "a", 2, kind, **self.PLAN)
        assert whole.codes == [0, 0], whole.logs
        kill = {"rank": 1, "step": 27, "what": "signal", "name": "SIGKILL"}
        plan = {**self.PLAN, "troubles": [*self.PLAN["troubles"], kill]}
        assert run(tmp_path / "run", tmp_path / "b", 2, kind, **plan).codes[1] == -9
        again = run(tmp_path / "run", tmp_path / "b", 2, kind, **self.PLAN)
        assert again.codes == [0, 0], again.logs
        [answer] = answers(tmp_path / "whole")
        at = answer["resumed_step"]
        assert f"skipping 20 batches ({at + 1} to {at + 20})" in answer["detail"]
        for rank in range(2):
            assert last_of(tmp_path / "b", rank) == last_of(tmp_path / "a", rank)
            records = steps_of(tmp_path / "a", rank)
            first, second = (record[1] for record in records if record[0] == at + 1)
            assert first != second


class TestHalt:
    def test_it_says_what_was_tried(self, tmp_path):
        with pytest.raises(RecoveryHaltedError, match="budget is spent") as halted:
            rolled_back(tmp_path, {1: [SkipBatches(2)], 2: [LowerLearningRate(0.5, 9)]}, faults=3)
        assert "skipping 2 batches (16 to 17)" in str(halted.value)
        assert "learning rate times 0.5 until step 19" in str(halted.value)


class TestSettings:
    @pytest.mark.parametrize(
        ("remedies", "settings", "words"),
        [
            ({0: []}, {}, "number of a rollback"),
            ({1: [LowerLearningRate(0.5, 3), LowerLearningRate(0.1, 9)]}, {}, "two of a kind"),
            ({1: [SkipBatches(3)]}, {"loader": None}, "no loader"),
        ],
    )
    def test_what_makes_no_sense_together(self, tmp_path, remedies, settings, words):
        with pytest.raises(ConfigError, match=words):
            Trainer(tmp_path, settings={"remedies": remedies, **settings})

    @pytest.mark.parametrize(
        "make",
        [
            lambda: SkipBatches(0),
            lambda: LowerLearningRate(2.0, 3),
            lambda: LowerLearningRate(0.5, 0),
            lambda: ClipGradients(float("nan"), 3),
        ],
    )
    def test_what_makes_none_alone(self, make):
        with pytest.raises(ConfigError):
            make()

    def test_a_manifest_of_before_them_has_none(self, tmp_path):
        Trainer(tmp_path).run(10)
        for path in (tmp_path / "checkpoints").glob("*/manifest.json"):
            text = path.read_text()
            assert text.count('"remedies": []') == 1
            path.write_text(text.replace(',\n "remedies": []', ""))
        trainer = Trainer(tmp_path)
        trainer.run(12)
        assert [record[0] for record in trainer.records] == [11, 12]
