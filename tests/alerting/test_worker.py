"""The worker: every crash between two of its steps ends in exactly one request."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from alerting.answers import LOST_AFTER_SECONDS
from alerting.control import Answer, ControlDirectory, Request
from alerting.metrics import Metrics
from alerting.notifiers.webhook import Webhook
from alerting.settings import Settings
from alerting.store import Intent, Store
from alerting.targets import Target
from alerting.worker import Worker
from deploy.demo.servers import wait_for
from tests.alerting.deliveries import RUN, alert, register, status, text
from tests.alerting.test_control import answer_to
from tests.alerting.test_store import rows

CHECKPOINT = alert("ActLayerAboveBaseline", action="checkpoint")


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """A receiver without its HTTP side, over a folder that outlives it."""

    folder: Path
    clock: Clock
    worker: Worker | None = None
    told: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)
    """More settings."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def database(self) -> Path:
        return self.folder / "receiver.sqlite"

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        store = Store(self.database, self.told, 3600)
        try:
            yield store
        finally:
            store.close()

    @contextlib.contextmanager
    def working(self, registry: CollectorRegistry | None = None) -> Iterator[Store]:
        settings = Settings(
            host="127.0.0.1",
            port=0,
            runs=self.runs,
            database=self.database,
            token="t",
            alerts=frozenset({"ActRunaway", "ActLayerAboveBaseline"}),
            backup_interval_seconds=900,
            notify=tuple(
                Target(name=name, kind="webhook", language="en", notifier=Webhook("http://[::1]/"))
                for name in self.told
            ),
            **self.keys,
        )
        with self.store() as store:
            metrics = Metrics(registry or CollectorRegistry())
            self.worker = Worker(settings, store, metrics, self.clock)
            self.worker.start()
            try:
                yield store
            finally:
                self.worker.stop()

    def deliver(self, store: Store, *alerts: dict[str, Any]) -> None:
        """Record a delivery and wait until it is handled."""
        identifier = store.add_delivery(text(*alerts), self.clock()).result()
        self.wait_until_handled(identifier)

    def wait_until_handled(self, identifier: int) -> None:
        if self.worker is not None:
            self.worker.wake()
        wait_for(
            lambda: self.rows(
                f"SELECT 1 FROM deliveries WHERE id = {identifier} AND handled_at IS NOT NULL"
            ),
            "the delivery to be handled",
        )

    def rows(self, statement: str) -> list[dict[str, Any]]:
        return rows(self.database, statement)

    def outcomes(self) -> list[str]:
        return [row["outcome"] for row in self.rows("SELECT outcome FROM decisions ORDER BY id")]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "runs").mkdir()
    return Desk(tmp_path, Clock())


def open_ids(control: ControlDirectory) -> list[str]:
    return [path.name for path in (control.path / "requests").iterdir()]


class TestDecisions:
    def test_a_recovery_is_requested_of_the_generation_that_is_running(self, desk: Desk) -> None:
        control = register(desk.runs, generation=2)
        with desk.working() as store:
            desk.deliver(store, alert())
        asked = control.open_request("recover")
        assert asked is not None
        assert (asked.run, asked.generation, asked.alert) == (RUN, 2, "ActRunaway")
        (row,) = desk.rows("SELECT * FROM requests")
        assert (row["id"], row["generation"], row["result"]) == (asked.id, 2, None)
        (decision,) = desk.rows("SELECT * FROM decisions")
        assert (decision["outcome"], decision["request_id"]) == ("requested", asked.id)

    def test_while_it_is_open_a_repeat_makes_no_second(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            desk.deliver(store, alert())
            asked = control.open_request("recover")
            assert asked is not None
            desk.deliver(store, alert())
        assert open_ids(control) == ["recover.json"]
        assert control.open_request("recover") == asked
        assert desk.outcomes() == ["requested", "open"]
        (decision,) = desk.rows("SELECT * FROM decisions WHERE outcome = 'open'")
        assert decision["request_id"] == asked.id
        assert len(desk.rows("SELECT * FROM requests")) == 1

    def test_after_a_refusal_a_later_delivery_is_judged_again(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            desk.deliver(store, alert())
            first = control.open_request("recover")
            assert first is not None
            control.answer(answer_to(first, result="refused", detail="No bad step.", generation=0))
            desk.deliver(store, alert())
        second = control.open_request("recover")
        assert second is not None
        assert second.id != first.id
        assert desk.outcomes() == ["requested", "requested"]

    def test_one_delivery_for_several_runs_asks_each_of_them(self, desk: Desk) -> None:
        first = register(desk.runs, folder="a", run="a")
        second = register(desk.runs, folder="b", run="b")
        with desk.working() as store:
            desk.deliver(
                store,
                alert(run="a"),
                alert("ActLayerAboveBaseline", run="a", action="checkpoint"),
                alert("ActLayerAboveBaseline", run="b", action="checkpoint"),
                alert(run="nobody"),
            )
        assert open_ids(first) == ["recover.json"]
        assert open_ids(second) == ["checkpoint.json"]
        assert sorted(desk.outcomes()) == ["covered", "refused", "requested", "requested"]

    def test_an_unknown_run_is_refused_aloud_and_touches_no_file(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        register(desk.runs)
        before = sorted(desk.runs.rglob("*"))
        with caplog.at_level(logging.WARNING), desk.working() as store:
            desk.deliver(store, alert(run="../../etc"), alert(run="x\nERROR forged"))
        assert sorted(desk.runs.rglob("*")) == before
        assert desk.outcomes() == ["refused", "refused"]
        assert "no run '../../etc' is registered" in caplog.text
        assert "\nERROR forged" not in caplog.text

    def test_a_mangled_status_fails_and_is_judged_again_at_the_next_delivery(
        self, desk: Desk
    ) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            (control.path / "status.json").write_text('{"run": "gp')
            desk.deliver(store, alert())
            control.publish(status())
            desk.deliver(store, alert())
        assert desk.outcomes() == ["failed", "requested"]
        (failed,) = desk.rows("SELECT reason FROM decisions WHERE outcome = 'failed'")
        assert "status.json cannot be read" in failed["reason"]

    def test_two_live_folders_of_one_name_fail_until_one_is_gone(self, desk: Desk) -> None:
        first = register(desk.runs, folder="seed-1")
        second = register(desk.runs, folder="seed-2")
        with desk.working() as store:
            desk.deliver(store, alert())
            assert open_ids(first) == open_ids(second) == []
            first.publish(status(state="finished"))
            desk.deliver(store, alert())
        assert open_ids(first) == []
        assert open_ids(second) == ["recover.json"]
        assert desk.outcomes() == ["failed", "requested"]
        (failed,) = desk.rows("SELECT reason FROM decisions WHERE outcome = 'failed'")
        assert "seed-1" in failed["reason"]
        assert "seed-2" in failed["reason"]

    def test_a_folder_that_cannot_be_written_fails_and_is_judged_again(self, desk: Desk) -> None:
        control = register(desk.runs)
        requests = control.path / "requests"
        with desk.working() as store:
            # A file in the folder's place fails for root too.
            requests.rmdir()
            requests.touch()
            desk.deliver(store, alert())
            requests.unlink()
            requests.mkdir()
            desk.deliver(store, alert())
        assert desk.outcomes() == ["failed", "requested"]
        assert len(desk.rows("SELECT * FROM requests")) == 1

    def test_a_mangled_request_blocks_nobody(self, desk: Desk) -> None:
        control = register(desk.runs)
        (control.path / "requests" / "recover.json").write_text("{")
        with desk.working() as store:
            desk.deliver(store, alert())
            assert control.take_up("recover") is None  # the guard sets it aside
            desk.deliver(store, alert())
        assert control.open_request("recover") is not None
        assert desk.outcomes() == ["failed", "requested"]

    def test_a_delivery_that_no_longer_parses_holds_up_nothing(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            desk.wait_until_handled(store.add_delivery('{"version": "3"}', 1.0).result())
            desk.deliver(store, alert())
        assert control.open_request("recover") is not None
        assert desk.outcomes() == ["failed", "requested"]

    def test_decisions_are_counted(self, desk: Desk) -> None:
        register(desk.runs)
        registry = CollectorRegistry()
        with desk.working(registry) as store:
            desk.deliver(store, alert())
            desk.deliver(store, alert())
            desk.deliver(store, alert(action="DROP TABLE"))

        def count(action: str, outcome: str) -> float | None:
            return registry.get_sample_value(
                "act_recovery_requests_total", {"action": action, "outcome": outcome}
            )

        assert count("recover", "requested") == 1
        assert count("recover", "open") == 1
        assert count("none", "refused") == 1
        assert count("checkpoint", "requested") == 0


class TestBackups:
    def test_one_in_fifteen_minutes_by_the_guards_own_word(self, desk: Desk) -> None:
        control = register(desk.runs, last_backup_at=desk.clock.now - 60)
        with desk.working() as store:
            desk.deliver(store, CHECKPOINT)
            assert open_ids(control) == []
            desk.clock.now += 900
            desk.deliver(store, CHECKPOINT)
        assert open_ids(control) == ["checkpoint.json"]
        assert desk.outcomes() == ["limited", "requested"]

    def test_the_limit_holds_after_a_restart_with_an_empty_database(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            desk.deliver(store, CHECKPOINT)
            asked = control.open_request("checkpoint")
            assert asked is not None
            control.publish(status(last_backup_at=desk.clock.now))
            control.answer(answer_to(asked))
        desk.database.unlink()
        with desk.working() as store:
            desk.deliver(store, CHECKPOINT)
            # A recovery is not limited by it.
            desk.deliver(store, alert())
        assert open_ids(control) == ["recover.json"]
        assert desk.outcomes() == ["limited", "requested"]


class TestCrashes:
    """What a SIGKILL between two steps leaves behind is taken up by the next start."""

    def interrupted(self, desk: Desk, store: Store) -> tuple[int, Intent, ControlDirectory]:
        """Everything up to the intended request, as the worker records it."""
        control = ControlDirectory.find(desk.runs, RUN)
        assert control is not None
        delivery = store.add_delivery(text(alert()), 1.0).result()
        asked = Request(
            id="1-before",
            run=RUN,
            generation=0,
            action="recover",
            alert="ActRunaway",
            created_at=1.0,
        )
        intent = Intent(request=asked, delivery_id=delivery, control=control.path)
        store.intend(intent)
        return delivery, intent, control

    def restart(self, desk: Desk, delivery: int) -> None:
        with desk.working():
            desk.wait_until_handled(delivery)

    def test_after_recording(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.store() as store:
            delivery = store.add_delivery(text(alert()), 1.0).result()
        self.restart(desk, delivery)
        assert open_ids(control) == ["recover.json"]
        assert desk.outcomes() == ["requested"]

    def test_before_the_claim(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.store() as store:
            delivery, _, control = self.interrupted(desk, store)
        self.restart(desk, delivery)
        asked = control.open_request("recover")
        assert asked is not None
        assert [row["id"] for row in desk.rows("SELECT id FROM requests")] == [asked.id]
        assert desk.outcomes() == ["requested"]

    def test_after_the_claim(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.store() as store:
            delivery, intent, control = self.interrupted(desk, store)
            assert control.claim(intent.request)
        self.restart(desk, delivery)
        assert control.open_request("recover") == intent.request
        (row,) = desk.rows("SELECT id, claimed_at FROM requests")
        assert row["id"] == "1-before"
        assert row["claimed_at"] is not None
        assert desk.outcomes() == ["requested"]

    def test_after_the_guards_answer(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.store() as store:
            _, intent, control = self.interrupted(desk, store)
            control.claim(intent.request)
            control.answer(answer_to(intent.request))
        with desk.working():
            wait_for(
                lambda: desk.rows("SELECT 1 FROM requests WHERE result = 'done'"),
                "the answer in the database",
            )
        assert open_ids(control) == []
        assert desk.outcomes() == ["requested"]

    def test_between_two_runs_of_one_delivery(self, desk: Desk) -> None:
        """The first run's decision stands already: its request is not made a second time."""
        first = register(desk.runs, folder="a", run="a")
        second = register(desk.runs, folder="b", run="b")
        with desk.working() as store:
            desk.deliver(store, alert(run="a"))
        asked = first.open_request("recover")
        assert asked is not None
        first.answer(answer_to(asked))
        with desk.store() as store:
            delivery = store.add_delivery(text(alert(run="a"), alert(run="b")), 1.0).result()
            (made,) = desk.rows("SELECT * FROM decisions")
            assert made["run"] == "a"
        connection = sqlite3.connect(desk.database)
        connection.execute("UPDATE decisions SET delivery_id = ?", (delivery,))
        connection.commit()
        connection.close()
        self.restart(desk, delivery)
        assert open_ids(first) == []
        assert open_ids(second) == ["recover.json"]

    def test_two_receivers_over_one_runs_folder_make_one_request(
        self, desk: Desk, tmp_path: Path
    ) -> None:
        control = register(desk.runs)
        other = Desk(tmp_path / "other", desk.clock)
        other.folder.mkdir()
        other.runs.symlink_to(desk.runs)
        with desk.working() as store, other.working() as second:
            mine = store.add_delivery(text(alert()), 1.0).result()
            theirs = second.add_delivery(text(alert()), 1.0).result()
            desk.wait_until_handled(mine)
            other.wait_until_handled(theirs)
        assert open_ids(control) == ["recover.json"]
        assert sorted(desk.outcomes() + other.outcomes()) == ["open", "requested"]


class TestAnswers:
    def ask(self, desk: Desk, store: Store) -> tuple[ControlDirectory, Request]:
        control = ControlDirectory.find(desk.runs, RUN)
        assert control is not None
        desk.deliver(store, alert())
        asked = control.open_request("recover")
        assert asked is not None
        return control, asked

    def wait_for_result(self, desk: Desk) -> dict[str, Any]:
        statement = "SELECT * FROM requests WHERE answered_at IS NOT NULL"
        row: dict[str, Any] = wait_for(lambda: desk.rows(statement), "a recorded answer")[0]
        return row

    def test_an_answer_is_recorded_with_all_it_says(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            given: Answer = answer_to(asked)
            control.answer(given)
            row = self.wait_for_result(desk)
        assert (row["result"], row["detail"], row["step"]) == ("done", "Rolled back.", 1300)
        assert (row["onset"], row["checkpoint"]) == (1290, "step-1300-emergency")
        assert (row["resumed_from"], row["resumed_step"]) == ("step-1000", 1000)
        assert (row["new_generation"], row["answered_at"]) == (1, given.answered_at)

    def test_an_answer_given_while_the_receiver_was_down_is_recorded(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
        control.answer(answer_to(asked, result="failed", detail="No checkpoint is healthy."))
        with desk.working():
            assert self.wait_for_result(desk)["result"] == "failed"

    def test_an_unreadable_status_hides_no_answer(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            (control.path / "status.json").write_text("{")
            control.answer(answer_to(asked))
            assert self.wait_for_result(desk)["result"] == "done"

    def test_a_request_that_vanished_is_lost_after_a_while_and_can_be_made_again(
        self, desk: Desk
    ) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            (control.path / "requests" / "recover.json").unlink()
            before = desk.clock.now

            # The wait begins at the worker's first look, so time has to pass until it ends.
            def passes() -> list[dict[str, Any]]:
                desk.clock.now += LOST_AFTER_SECONDS / 4
                return desk.rows("SELECT * FROM requests WHERE answered_at IS NOT NULL")

            (row,) = wait_for(passes, "the loss to be noticed", interval=0.2)
            assert row["result"] == "lost"
            assert row["id"] == asked.id
            assert row["answered_at"] - before >= LOST_AFTER_SECONDS
            desk.deliver(store, alert())
        assert desk.outcomes() == ["requested", "requested"]

    def test_a_loss_is_told_and_recorded_in_one_write(self, desk: Desk) -> None:
        register(desk.runs)
        desk.told = ("oncall",)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            (control.path / "requests" / "recover.json").unlink()

            def passes() -> list[dict[str, Any]]:
                desk.clock.now += LOST_AFTER_SECONDS / 4
                return desk.rows("SELECT * FROM messages")

            (message,) = wait_for(passes, "the message about it", interval=0.2)
        content = json.loads(message["content"])
        assert content["request"]["id"] == asked.id
        assert content["answer"] is None
        assert "has no answer" in content["detail"]
        assert [row["result"] for row in desk.rows("SELECT result FROM requests")] == ["lost"]
        assert [row["target"] for row in desk.rows("SELECT target FROM sendings")] == ["oncall"]

    def test_an_answer_is_told_though_the_status_cannot_be_read(self, desk: Desk) -> None:
        register(desk.runs)
        desk.told = ("oncall",)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            (control.path / "status.json").write_text("{")
            control.answer(answer_to(asked))
            self.wait_for_result(desk)
        (message,) = desk.rows("SELECT * FROM messages")
        content = json.loads(message["content"])
        assert content["answer"]["resumed_from"] == "step-1000"
        assert content["rollbacks_left"] is None

    def test_where_nobody_is_told_there_is_no_message(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            control.answer(answer_to(asked))
            self.wait_for_result(desk)
        assert desk.rows("SELECT * FROM messages") == []

    def test_an_open_request_is_never_lost(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            _, asked = self.ask(desk, store)
            desk.clock.now += 1e6
            desk.deliver(store, alert())
            assert [intent.request for intent in store.unanswered()] == [asked]

    def test_an_answer_under_another_id_inside_does_not_block(self, desk: Desk) -> None:
        register(desk.runs)
        with desk.working() as store:
            control, asked = self.ask(desk, store)
            wrong = replace(answer_to(asked), id="1-other")
            control.answer(wrong)
            path = control.path / "answers"
            (path / "1-other.json").rename(path / f"{asked.id}.json")
            assert self.wait_for_result(desk)["id"] == asked.id
