"""Backups and rollbacks on request, and what a crash in the middle of one leads to."""

from __future__ import annotations

import pytest
import torch

from alerting.exceptions import RecoveryHaltedError
from alerting.recovery.saver import Saver
from tests.alerting.recovery.trainer import Trainer, read_json, same_as, uninterrupted

FAULT = 18
KEEP = {"keep": 9}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("reference"))


def run_with_fault(trainer, *, faults=(FAULT,), total=30, actions=("recover",), on_fault=None):
    """Train; at each step of `faults`, at its first time, the fault and the requests."""
    ids, left = [], list(faults)
    for step, batch in trainer.guard.steps(total):
        if left and step == left[0]:
            left.pop(0)
            trainer.break_model()
            if on_fault is not None:
                on_fault()
            ids += [trainer.ask(action, generation(trainer)) for action in actions]
        trainer.records.append(trainer.train_step(step, batch))
    return ids


def generation(trainer):
    return trainer.control.status().generation


class TestDrill:
    def test_a_healthy_run_goes_on_bit_for_bit(self, tmp_path, reference):
        trainer = Trainer(tmp_path, settings=KEEP)
        for step, batch in trainer.guard.steps(30):
            if step == FAULT:
                request = trainer.ask("drill")
            trainer.records.append(trainer.train_step(step, batch))
        answer = trainer.control.read_answer(request)
        assert (answer.result, answer.step, answer.generation) == ("done", FAULT, 0)
        assert answer.resumed_from is None
        assert "to step-00000015-g0, which is pending" in answer.detail
        assert answer.detail.endswith("since no bad step was seen")
        assert trainer.records == reference
        assert trainer.names() == [f"step-{n:08d}-g0" for n in range(0, 31, 5)]
        status = trainer.control.status()
        assert (status.rollbacks_left, status.last_backup_at) == (2, None)

    def test_with_a_real_request_beside_it_the_run_is_rolled_back_as_ever(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        drill, real = run_with_fault(trainer, actions=("drill", "recover"))
        assert trainer.control.read_answer(real).resumed_from == "step-00000015-g0"
        answer = trainer.control.read_answer(drill)
        # It is about the generation before the rollback, which went first.
        assert (answer.result, answer.detail[:5]) == ("refused", "stale")
        assert trainer.control.status().generation == 1

    def test_it_says_where_the_rollback_goes_that_comes_next(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        drill = real = None
        for step, batch in trainer.guard.steps(30):
            if step == FAULT and drill is None:
                trainer.break_model()
                drill = trainer.ask("drill")
            elif step == FAULT + 1 and real is None:
                real = trainer.ask("recover")
            trainer.train_step(step, batch)
        said, done = (trainer.control.read_answer(request) for request in (drill, real))
        assert (said.onset, said.result) == (FAULT, "done")
        assert f" to {done.resumed_from}, " in said.detail
        assert "refused" not in said.detail

    def test_a_spent_budget_is_a_broken_hop(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"max_rollbacks": 0})
        for step, batch in trainer.guard.steps(12):
            if step == 11:
                request = trainer.ask("drill")
            trainer.train_step(step, batch)
        answer = trainer.control.read_answer(request)
        assert answer.result == "failed"
        assert "the rollback budget is spent" in answer.detail
        assert trainer.control.status().state == "finished"


class TestRollback:
    def test_it_is_bitwise_the_run_whose_fault_never_happened(self, tmp_path, reference):
        trainer = Trainer(tmp_path, settings=KEEP)
        (request,) = run_with_fault(trainer)
        steps = [record[0] for record in trainer.records]
        assert steps == [*range(1, FAULT + 1), *range(16, 31)]
        assert trainer.records[: FAULT - 1] == reference[: FAULT - 1]
        assert trainer.records[FAULT:] == reference[15:]
        answer = trainer.control.read_answer(request)
        assert (answer.result, answer.step, answer.onset) == ("done", FAULT, FAULT)
        assert (answer.resumed_from, answer.resumed_step) == ("step-00000015-g0", 15)
        assert (answer.checkpoint, answer.generation) == ("step-00000018-g0-emergency", 1)
        assert trainer.health(answer.checkpoint) == "suspect"
        assert trainer.detector.resets == [0, 1]
        assert trainer.detector.steps[FAULT : FAULT + 3] == [FAULT, 15, 16]

    def test_gradients_and_optimizer_of_the_fault_are_gone(self, tmp_path):
        trainer = Trainer(tmp_path)
        for step, batch in trainer.guard.steps(20):
            if step == 16 and len(trainer.records) > 16:
                assert all(p.grad is None for p in trainer.model.parameters())
                assert trainer.optimizer.state[trainer.model[0].weight]["step"] == 15
            trainer.records.append(trainer.train_step(step, batch))
            if step == FAULT and len(trainer.records) == FAULT:
                trainer.break_model()
                trainer.ask("recover")
        assert len(trainer.records) == 18 + 5

    def test_a_checkpoint_within_the_margin_is_not_trusted(self, tmp_path):
        trainer = Trainer(tmp_path, settings={**KEEP, "onset_margin_steps": 3})
        run_with_fault(trainer)
        assert trainer.health("step-00000015-g0") == "suspect"
        assert read_json(tmp_path / "guard.json")["base"][0] == "step-00000010-g0"

    def test_what_was_saved_before_anyone_noticed_is_suspect_across_restarts(self, tmp_path):
        """The bad step is 8; checkpoints 10 and 15 are saved before the request comes at 18."""
        trainer = Trainer(tmp_path, settings=KEEP)
        for step, batch in trainer.guard.steps(18):
            if step == 8:
                trainer.break_model()
            trainer.train_step(step, batch)
            if step == 17:
                break
        assert trainer.health("step-00000010-g0") == "suspect"
        assert trainer.health("step-00000015-g0") == "suspect"
        again = Trainer(tmp_path, settings=KEEP)
        again.run(20)
        assert again.records[0][0] == 6

    def test_the_initial_weights_are_trusted_unless_the_first_step_was_bad(self, tmp_path):
        trainer = Trainer(tmp_path / "a")
        run_with_fault(trainer, faults=(2,), total=5)
        assert [r[0] for r in trainer.records] == [1, 2, 1, 2, 3, 4, 5]
        with pytest.raises(RecoveryHaltedError, match="no healthy checkpoint"):
            run_with_fault(Trainer(tmp_path / "b"), faults=(1,), total=5)

    def test_one_that_fails_half_way_is_passed_over(self, tmp_path, monkeypatch, reference):
        trainer = Trainer(tmp_path, settings=KEEP)
        from alerting.recovery import rng

        rng_restore = rng.restore
        calls = []

        def failing(state):
            calls.append(state)
            if len(calls) == 2:  # the loader's is the first, the end of the load the second
                raise RuntimeError("torn")
            rng_restore(state)

        (request,) = run_with_fault(
            trainer, on_fault=lambda: monkeypatch.setattr(rng, "restore", failing)
        )
        assert trainer.control.read_answer(request).resumed_step == 10
        assert trainer.health("step-00000015-g0") == "corrupt"
        assert trainer.records[FAULT:] == reference[10:]

    def test_an_emergency_checkpoint_that_fails_does_not_prevent_it(
        self, tmp_path, monkeypatch, reference
    ):
        trainer = Trainer(tmp_path, settings=KEEP)
        save_now = Saver.save_now

        def full(self, step, kind):
            if kind == "emergency":
                monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28)))
            try:
                return save_now(self, step, kind)
            finally:
                monkeypatch.undo()

        def break_the_disk():
            monkeypatch.setattr(Saver, "save_now", full)

        ids = run_with_fault(trainer, on_fault=break_the_disk, actions=("recover", "checkpoint"))
        recover, checkpoint = (trainer.control.read_answer(i) for i in ids)
        assert (recover.result, recover.checkpoint) == ("done", None)
        assert checkpoint.result == "failed"
        assert trainer.records[FAULT:] == reference[15:]

    def test_the_save_in_flight_is_finished_first(self, tmp_path, reference):
        trainer = Trainer(tmp_path, settings=KEEP, patient=False)
        run_with_fault(trainer, faults=(6,))
        assert trainer.health("step-00000005-g0") == "suspect"
        assert trainer.records[6:] == reference

    def test_without_a_detector_the_request_is_honoured(self, tmp_path, reference):
        trainer = Trainer(tmp_path, settings=KEEP, watched=False)
        (request,) = run_with_fault(trainer)
        answer = trainer.control.read_answer(request)
        assert (answer.result, answer.onset, answer.resumed_step) == ("done", None, 15)
        assert trainer.records[FAULT:] == reference[15:]


class TestLineage:
    def test_an_abandoned_branch_is_never_chosen(self, tmp_path, reference):
        """Rolled back from 28 to 5: the suspects 10 to 25 have higher steps than what follows."""
        first = Trainer(tmp_path, settings=KEEP)
        for step, batch in first.guard.steps(40):
            fresh = generation(first) == 0
            if step == 8 and fresh:
                first.break_model()
            if step == 28 and fresh:
                first.ask("recover")
            first.records.append(first.train_step(step, batch))
            if step == 13 and not fresh:
                break
        assert read_json(tmp_path / "guard.json")["base"][0] == "step-00000005-g0"
        # As if a person had judged them healthy again: they are not of this line all the same.
        for step in (15, 20, 25):
            health = tmp_path / "checkpoints" / f"step-{step:08d}-g0" / "health.json"
            health.write_text('{"health": "confirmed", "reason": "by hand", "at": 1}')
        second = Trainer(tmp_path, settings=KEEP)
        second.run()
        assert second.records == reference[10:]
        assert generation(second) == 1

    def test_a_restart_before_the_first_save_of_a_generation(self, tmp_path, reference):
        first = Trainer(tmp_path, settings=KEEP)
        for step, batch in first.guard.steps(30):
            if step == FAULT and generation(first) == 0:
                first.break_model()
                first.ask("recover")
            first.train_step(step, batch)
            if step == 17 and generation(first) == 1:
                break
        second = Trainer(tmp_path, settings=KEEP)
        assert second.run() == reference[15:]
        assert generation(second) == 1

    def test_the_same_place_twice_goes_one_further_back(self, tmp_path, reference):
        trainer = Trainer(tmp_path, settings={**KEEP, "remedies": {}})
        ids = run_with_fault(trainer, faults=(FAULT, FAULT))
        answers = [trainer.control.read_answer(i) for i in ids]
        assert [a.resumed_step for a in answers] == [15, 10]
        assert [a.generation for a in answers] == [1, 2]
        assert same_as(trainer.records, reference)

    def test_backups_are_never_gone_back_to(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        for step, batch in trainer.guard.steps(20):
            trainer.train_step(step, batch)
            if step == 13:
                trainer.ask("checkpoint")
            if step == 14:
                break
        assert "step-00000013-g0-backup" in trainer.names()
        again = Trainer(tmp_path, settings=KEEP)
        again.run(20)
        assert again.records[0][0] == 11


class TestRequests:
    def test_refused_where_the_detector_saw_nothing(self, tmp_path, reference):
        trainer = Trainer(tmp_path)
        for step, batch in trainer.guard.steps(30):
            trainer.records.append(trainer.train_step(step, batch))
            if step == 12:
                request = trainer.ask("recover")
        answer = trainer.control.read_answer(request)
        assert answer.result == "refused"
        assert "seen no bad step" in answer.detail
        assert trainer.records == reference
        assert generation(trainer) == 0

    def test_a_repeat_after_the_rollback_is_refused(self, tmp_path):
        trainer = Trainer(tmp_path)
        repeats = []
        for step, batch in trainer.guard.steps(30):
            if step == FAULT and generation(trainer) == 0:
                trainer.break_model()
                trainer.ask("recover")
            if step in (20, 22) and generation(trainer) == 1:
                repeats.append(trainer.ask("recover", generation=int(step == 22)))
            trainer.train_step(step, batch)
        stale, again = (trainer.control.read_answer(i) for i in repeats)
        assert (stale.result, again.result) == ("refused", "refused")
        assert "stale" in stale.detail
        assert "seen no bad step" in again.detail
        assert generation(trainer) == 1

    def test_a_backup_on_request(self, tmp_path, reference):
        trainer = Trainer(tmp_path)
        for step, batch in trainer.guard.steps(30):
            trainer.records.append(trainer.train_step(step, batch))
            if step == 12:
                request = trainer.ask("checkpoint")
            if step == 13:
                answer = trainer.control.read_answer(request)
                backed_up = trainer.control.status().last_backup_at
        assert (answer.result, answer.checkpoint) == ("done", "step-00000012-g0-backup")
        assert trainer.health(answer.checkpoint) == "pending"
        assert 0 < backed_up <= answer.answered_at
        assert trainer.records == reference

    def test_a_backup_after_the_onset_is_suspect_at_once(self, tmp_path):
        trainer = Trainer(tmp_path)
        (request,) = run_with_fault(trainer, actions=("checkpoint",), total=20)
        assert trainer.health(trainer.control.read_answer(request).checkpoint) == "suspect"

    def test_recover_comes_first_and_its_emergency_checkpoint_is_the_backup(self, tmp_path):
        trainer = Trainer(tmp_path)
        ids = run_with_fault(trainer, actions=("checkpoint", "recover"))
        checkpoint, recover = (trainer.control.read_answer(i) for i in ids)
        assert (recover.result, checkpoint.result) == ("done", "done")
        assert recover.checkpoint == checkpoint.checkpoint == "step-00000018-g0-emergency"
        assert trainer.control.status().last_backup_at is not None
        assert not [n for n in trainer.names() if "backup" in n]

    def test_a_backup_that_fails_is_answered(self, tmp_path, monkeypatch, reference):
        trainer = Trainer(tmp_path)
        for step, batch in trainer.guard.steps(30):
            trainer.records.append(trainer.train_step(step, batch))
            if step == 12:
                request = trainer.ask("checkpoint")
                monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28)))
            if step == 13:
                monkeypatch.undo()
        assert trainer.control.read_answer(request).result == "failed"
        assert trainer.records == reference

    def test_an_answer_that_the_disk_refused_is_sent_later(self, tmp_path, monkeypatch):
        from alerting.control import ControlDirectory

        trainer = Trainer(tmp_path)
        answer = ControlDirectory.answer
        for step, batch in trainer.guard.steps(20):
            trainer.train_step(step, batch)
            if step == 12:
                request = trainer.ask("checkpoint")
                monkeypatch.setattr(
                    ControlDirectory, "answer", lambda *a: (_ for _ in ()).throw(OSError(28))
                )
            if step == 15:
                assert trainer.control.read_answer(request) is None
                monkeypatch.setattr(ControlDirectory, "answer", answer)
        assert trainer.control.read_answer(request).step == 12
        assert len([n for n in trainer.names() if "backup" in n]) == 1


class TestBudget:
    def test_spent_it_halts_and_says_so(self, tmp_path):
        trainer = Trainer(tmp_path, settings={**KEEP, "max_rollbacks": 2})
        with pytest.raises(RecoveryHaltedError, match="budget is spent"):
            run_with_fault(trainer, faults=(FAULT,) * 3)
        status = trainer.control.status()
        assert (status.state, status.rollbacks_left, status.generation) == ("halted", 0, 2)
        answers = list((tmp_path / "control" / "answers").glob("*.json"))
        assert sorted(read_json(p)["result"] for p in answers) == ["done", "done", "failed"]
        assert "step-00000018-g2-emergency" in trainer.names()

    def test_a_halted_run_stays_halted_until_a_person_raises_the_budget(self, tmp_path, reference):
        settings = {**KEEP, "max_rollbacks": 0}
        with pytest.raises(RecoveryHaltedError):
            run_with_fault(Trainer(tmp_path, settings=settings))
        again = Trainer(tmp_path, settings=settings)
        with pytest.raises(RecoveryHaltedError, match="raise max_rollbacks"):
            again.run()
        assert again.control.status().state == "halted"
        allowed = Trainer(tmp_path, settings={**KEEP, "max_rollbacks": 1})
        assert allowed.run() == reference[15:]
        assert generation(allowed) == 1

    def test_it_survives_a_restart(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        run_with_fault(trainer, total=20)
        again = Trainer(tmp_path, settings=KEEP)
        again.run(22)
        assert again.control.status().rollbacks_left == 1

    def test_it_is_given_back_once_the_place_is_passed(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        run_with_fault(trainer, total=29)
        assert trainer.control.status().rollbacks_left == 1
        again = Trainer(tmp_path, settings=KEEP)
        again.run(40)
        # Checkpoint 20 is the first after step 18, and confirmed 10 steps later.
        assert again.control.status().rollbacks_left == 2
        assert again.health("step-00000020-g1") == "confirmed"


class TestHealth:
    def test_pending_until_the_clean_stretch_is_over(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        for step, batch in trainer.guard.steps(30):
            trainer.train_step(step, batch)
            if step == 15:
                assert trainer.health("step-00000005-g0") == "pending"
            if step == 16:
                assert trainer.health("step-00000005-g0") == "confirmed"
                break

    def test_not_while_an_anomaly_lasts(self, tmp_path):
        trainer = Trainer(tmp_path, settings=KEEP)
        run_with_fault(trainer, actions=(), total=30)
        assert trainer.health("step-00000010-g0") == "pending"
