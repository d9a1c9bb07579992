"""Notify-only: nobody is asked, people are told what would have been, and it is switched live."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import requests

from alerting.message import of_alerts, of_notify_only
from alerting.mode import switch, switched_to
from alerting.payload import parse
from alerting.store import StoreError
from deploy.demo.servers import wait_for
from tests.alerting.bots import FeishuBot
from tests.alerting.deliveries import alert, register, status, text
from tests.alerting.test_cli import run
from tests.alerting.test_messages import receiving, tell, wait_for_messages
from tests.alerting.test_receiver import TIMEOUT, TOKEN, Receiver
from tests.alerting.test_worker import CHECKPOINT, Clock, Desk, open_ids


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "runs").mkdir()
    return Desk(tmp_path, Clock(), told=("oncall",), keys={"mode": "notify-only"})


class TestDecisions:
    def test_nothing_is_asked_and_the_decision_says_so(self, desk: Desk) -> None:
        control = register(desk.runs, generation=2)
        with desk.working() as store:
            desk.deliver(store, alert())
            desk.deliver(store, CHECKPOINT)
        assert open_ids(control) == []
        assert desk.rows("SELECT * FROM requests") == []
        decisions = desk.rows("SELECT * FROM decisions ORDER BY id")
        assert [row["outcome"] for row in decisions] == ["notify-only", "notify-only"]
        assert {row["generation"] for row in decisions} == {2}
        assert {row["request_id"] for row in decisions} == {None}

    def test_what_would_be_refused_is_refused(self, desk: Desk) -> None:
        register(desk.runs, state="halted")
        with desk.working() as store:
            desk.deliver(store, alert())
            desk.deliver(store, alert(run="unknown"))
        assert desk.outcomes() == ["refused", "refused"]
        assert desk.rows("SELECT * FROM messages") == []

    def test_people_are_told_once_an_hour_and_once_an_incident(self, desk: Desk) -> None:
        control = register(desk.runs)

        def messages() -> list[dict[str, Any]]:
            return desk.rows("SELECT * FROM messages WHERE kind = 'notify-only' ORDER BY id")

        with desk.working() as store:
            for _ in range(12):  # Alertmanager repeats it every 5 minutes
                desk.deliver(store, alert())
                desk.clock.now += 250
            assert len(messages()) == 1
            desk.clock.now += 600
            desk.deliver(store, alert())
            assert len(messages()) == 2
            control.publish(status(generation=1))
            desk.deliver(store, alert())
            assert len(messages()) == 3
        assert json.loads(messages()[0]["content"]) == {
            "run": "gpt",
            "action": "recover",
            "alert": "ActRunaway",
        }

    def test_switched_while_it_runs_and_kept_over_a_restart(self, desk: Desk) -> None:
        control = register(desk.runs)
        with desk.working() as store:
            switch(desk.database, "act", 1.0)
            desk.deliver(store, alert())
            assert open_ids(control) == ["recover.json"]
            switch(desk.database, "notify-only", 2.0)
            desk.deliver(store, CHECKPOINT)
        desk.keys["mode"] = "act"
        with desk.working() as store:
            desk.deliver(store, CHECKPOINT)
            switch(desk.database, "act", 3.0)
            desk.deliver(store, CHECKPOINT)
        assert desk.outcomes() == ["requested", "notify-only", "notify-only", "requested"]

    def test_a_drill_is_asked_for_all_the_same(self, desk: Desk) -> None:
        """It does nothing, and says of a run in its first weeks what would have been done."""
        control = register(desk.runs)
        with desk.working() as store:
            switch(desk.database, "notify-only", 1.0)
            desk.deliver(store, alert("ActDrill"), alert())
        assert open_ids(control) == ["drill.json"]
        assert sorted(desk.outcomes()) == ["notify-only", "requested"]

    def test_an_open_request_is_still_answered(self, desk: Desk) -> None:
        desk.keys["mode"] = "act"
        control = register(desk.runs)
        with desk.working() as store:
            desk.deliver(store, alert())
            switch(desk.database, "notify-only", 1.0)
            assert control.open_request("recover") is not None
            assert len(store.unanswered()) == 1


class TestWords:
    @pytest.mark.parametrize("action", ["recover", "checkpoint"])
    def test_of_what_was_not_asked(self, action: Any) -> None:
        english = of_notify_only("gpt\n", action, "ActRunaway", "en")
        assert english.title.startswith("run gpt was not asked ")
        assert "Asked for by ActRunaway." in english.summary
        chinese = of_notify_only("gpt", action, "ActRunaway", "zh")
        assert "仅通知模式" in chinese.title
        assert "act-alerting mode act" in "".join(chinese.summary)

    def test_of_alerts_that_ask_for_something(self) -> None:
        """They must not say that the trainer is asked where it is not."""
        group = parse(text(alert()))
        acting = " ".join(of_alerts(group, "en").summary)
        only = " ".join(of_alerts(group, "en", acts=False).summary)
        assert "roll back" in acting
        assert "roll back" not in only
        assert "mode notify-only" in only
        harmless = parse(text(alert("ActLossSpike", action=None)))
        assert of_alerts(harmless, "zh", acts=False) == of_alerts(harmless, "zh")


def switched(receiver: Receiver, *arguments: str) -> str:
    answer = run("mode", *arguments, "--config", receiver.runs.parent / "receiver.yml")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


class TestCommand:
    def test_a_real_receiver_is_switched_and_switched_back(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            assert switched(receiver) == "act (of the config)"
            assert switched(receiver, "notify-only") == "notify-only (switched to)"
            (decision,) = receiver.decisions(receiver.deliver(alert()))
            assert decision["outcome"] == "notify-only"
            wait_for_messages(bot, 1)
            assert "run gpt was not asked to roll back" in bot.texts()[0]
            tell(receiver)
            wait_for_messages(bot, 2)
            assert "in mode notify-only" in bot.texts()[1]
            assert open_ids(control) == []
            labels = {"action": "recover", "outcome": "notify-only"}
            wait_for(
                lambda: receiver.metric("act_recovery_requests_total", **labels) == 1, "the count"
            )
            shown = run("status", "--config", tmp_path / "receiver.yml").stdout
            assert shown.splitlines()[-1].startswith("mode notify-only: ")
            one = requests.get(
                f"{receiver.address}/runs/gpt",
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=TIMEOUT,
            )
            assert one.json()["mode"] == "notify-only"
            assert one.json()["last_decision"]["outcome"] == "notify-only"

        with receiving(tmp_path) as receiver:
            assert "Mode notify-only." in receiver.server.log.read_text()
            assert switched(receiver, "act") == "act (switched to)"
            (decision,) = receiver.decisions(receiver.deliver(alert()))
            assert decision["outcome"] == "requested"
        assert open_ids(control) == ["recover.json"]

    def test_mistakes(self, tmp_path: Path) -> None:
        run("init", tmp_path)
        config = tmp_path / "receiver.yml"
        answer = run("mode", "act", "--config", config)
        assert answer.returncode == 1
        assert "No receiver has run yet" in answer.stderr
        (tmp_path / "receiver.sqlite").write_text("another program's\n" * 100)
        before = (tmp_path / "receiver.sqlite").read_bytes()
        assert run("mode", "act", "--config", config).returncode == 1
        assert (tmp_path / "receiver.sqlite").read_bytes() == before
        answer = run("mode", "dry-run", "--config", config)
        assert answer.returncode == 2
        assert answer.stderr == (
            "act-alerting: The mode must be one of act, notify-only, not 'dry-run'.\n"
        )

    def test_a_locked_database_is_an_error_and_changes_nothing(self, desk: Desk) -> None:
        with desk.store() as store:
            lock = sqlite3.connect(desk.database, isolation_level=None)
            try:
                lock.execute("BEGIN IMMEDIATE")
                with pytest.raises(StoreError, match="locked"):
                    switch(desk.database, "act", 1.0)
                lock.execute("ROLLBACK")
            finally:
                lock.close()
            assert switched_to(store.read) is None
