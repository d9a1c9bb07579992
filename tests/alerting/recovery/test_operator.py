"""A person and the guard at the same moment: no pin and no verdict is lost."""

from __future__ import annotations

import pytest

from alerting.recovery import checkpoints, pins
from alerting.recovery.checkpoints import DELETING, DELETIONS, CheckpointStore, difference
from alerting.recovery.health import read_health, verdict
from alerting.recovery.run_folder import overrule, read_run_folder
from tests.alerting.recovery.trainer import Trainer


@pytest.fixture
def store(tmp_path):
    """The checkpoints 0, 5 and 8 of a run that ended."""
    Trainer(tmp_path).run(8)
    return trainer_store(tmp_path)


def trainer_store(folder):
    return CheckpointStore(folder / "checkpoints")


def log(store):
    return (store.path / DELETIONS).read_text().splitlines()


class TestPinAndDeletion:
    def test_a_pin_since_the_guard_looked_means_that_it_stays(self, store):
        oldest = store.all()[0]
        pins.pin(oldest.folder, "mine")
        store.delete(oldest, "test")
        assert store.all()[0].name == oldest.name
        assert store.all()[0].pinned
        assert difference(store.all()[0]) is None
        assert log(store)[-1].endswith(f"{oldest.name} not deleted: it was pinned meanwhile")

    def test_a_pin_that_comes_too_late_fails(self, store):
        oldest = store.all()[0]
        oldest.folder.rename(store.path / f"{DELETING}{oldest.name}")
        with pytest.raises(FileNotFoundError):
            pins.pin(oldest.folder, "mine")

    def test_one_whose_deletion_was_cut_short_is_brought_back(self, store):
        oldest = store.all()[0]
        pins.pin(oldest.folder, "mine")
        oldest.folder.rename(store.path / f"{DELETING}{oldest.name}")
        Trainer(store.path.parent).run(8)
        assert store.all()[0].name == oldest.name
        assert difference(store.all()[0]) is None

    def test_a_mangled_pin_holds_too(self, store):
        (store.all()[0].folder / pins.FILE).write_text("{")
        assert store.all()[0].pinned


class TestDeletion:
    def test_half_a_deletion_is_never_seen_and_is_ended_by_the_next_start(self, store, monkeypatch):
        oldest = store.all()[0]

        def dying(folder):
            (folder / "rank-00000.pt").unlink()
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.shutil, "rmtree", dying)
            with pytest.raises(OSError, match="Input/output"):
                store.delete(oldest, "test")
        assert oldest.name not in [c.name for c in store.all()]
        assert log(store)[-1].endswith(f"{oldest.name} {oldest.health.health} test")
        Trainer(store.path.parent).run(8)
        assert not list(store.path.glob(f"{DELETING}*"))

    def test_nothing_is_deleted_that_cannot_be_logged(self, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / DELETIONS).mkdir()
        trainer = Trainer(tmp_path, settings={"keep": 2})
        trainer.run(20)
        assert len(trainer.names()) == 5

    def test_one_that_is_stuck_does_not_keep_the_others(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 2})
        for step, batch in trainer.guard.steps(40):
            trainer.train_step(step, batch)
            if step == 3:
                # The first of them cannot be renamed to there.
                stuck = tmp_path / "checkpoints" / f"{DELETING}step-00000000-g0"
                (stuck / "busy").mkdir(parents=True)
        assert trainer.names() == [f"step-{step:08d}-g0" for step in (0, 30, 35, 40)]

    def test_a_pinned_one_is_kept_by_a_running_guard(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 2})
        for step, batch in trainer.guard.steps(30):
            trainer.train_step(step, batch)
            if step == 7:
                pins.pin(tmp_path / "checkpoints" / "step-00000005-g0", "mine")
        assert trainer.names() == [f"step-{step:08d}-g0" for step in (5, 20, 25, 30)]


class TestVerdicts:
    @pytest.mark.parametrize(
        ("operator", "guard", "holds"),
        [
            ("suspect", "confirmed", "suspect"),
            ("confirmed", "suspect", "suspect"),
            ("confirmed", "corrupt", "corrupt"),
            ("suspect", "corrupt", "corrupt"),
        ],
    )
    def test_of_two_at_the_same_moment_the_worse_holds(self, store, operator, guard, holds):
        """Whichever is written last: the guard had read the health before the operator spoke."""
        newest = store.all()[-1]
        overrule(newest, operator, "operator")
        verdict(guard, "guard").write(newest.folder)
        assert read_health(newest.folder).health == holds

    def test_the_guard_confirms_nothing_that_a_person_suspects(self, store):
        newest = store.all()[-1]
        overrule(newest, "suspect", "operator")
        store.mark(newest, verdict("confirmed", "guard"))
        assert read_health(newest.folder).reason == "operator"

    def test_nor_is_the_budget_given_back_for_it(self, tmp_path):
        trainer = Trainer(tmp_path, settings={"keep": 9})
        for step, batch in trainer.guard.steps(31):
            fresh = trainer.control.status().generation == 0
            if step == 18 and fresh:
                trainer.break_model()
                trainer.ask("recover")
            trainer.train_step(step, batch)
            if step == 22 and not fresh:
                [after] = [c for c in trainer_store(tmp_path).all() if c.step == 20]
                overrule(after, "suspect", "the loss looks odd")
        assert trainer.control.status().rollbacks_left == 1

    def test_what_the_guard_finds_later_counts(self, store):
        newest = store.all()[-1]
        store.mark(newest, verdict("suspect", "guard"))
        overrule(newest, "confirmed", "operator")
        assert read_health(newest.folder).health == "confirmed"
        store.mark(newest, verdict("suspect", "seen again"))
        assert read_health(newest.folder).reason == "seen again"

    @pytest.mark.parametrize("content", [None, "{"])
    def test_a_lost_verdict_can_be_given_by_a_person(self, store, content):
        newest = store.all()[-1]
        path = newest.folder / "health.json"
        path.unlink()
        if content is not None:
            path.write_text(content)
        assert store.all()[-1].health.health == "suspect"
        overrule(newest, "confirmed", "operator")
        assert read_run_folder(store.path.parent).next_start == store.all()[-1]

    def test_a_mangled_one_of_a_person_is_not_trusted(self, store):
        newest = store.all()[-1]
        (newest.folder / "health-operator.json").write_text("{")
        assert store.all()[-1].health.health == "suspect"
