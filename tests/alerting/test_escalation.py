"""A request that the trainer does not take up: told once, and handed to a command once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from alerting.control import ControlDirectory, Request
from alerting.escalation import environment, run
from alerting.message import of_overdue
from alerting.settings import DEFAULT_REQUEST_DEADLINE_SECONDS as DEADLINE
from deploy.demo.servers import wait_for
from tests.alerting.bots import FeishuBot
from tests.alerting.deliveries import alert, register, text
from tests.alerting.test_control import answer_to
from tests.alerting.test_messages import receiving, wait_for_messages
from tests.alerting.test_worker import Clock, Desk

REQUEST = Request(
    id="1-a", run="gpt", generation=0, action="recover", alert="ActRunaway", created_at=1.0
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "runs").mkdir()
    return Desk(tmp_path, Clock(), told=("oncall",))


def writes_down(folder: Path) -> list[str]:
    """A command that writes its arguments and what it was told into a new file."""
    code = (
        "import json, os, pathlib, sys; pathlib.Path(sys.argv[1], str(os.getpid())).write_text("
        "json.dumps([sys.argv[2:], {n: os.environ[n] for n in "
        "('ACT_RUN', 'ACT_ACTION', 'ACT_REQUEST')}]))"
    )
    folder.mkdir()
    return [sys.executable, "-c", code, str(folder), "a b", "$(id)"]


def overdue(desk: Desk) -> list[dict[str, Any]]:
    return desk.rows("SELECT * FROM messages WHERE kind = 'overdue'")


def ask(desk: Desk, store: Any, run: str = "gpt") -> tuple[ControlDirectory, Request]:
    control = register(desk.runs, folder=run.replace("/", "-"), run=run)
    desk.deliver(store, alert(run=run))
    request = control.open_request("recover")
    assert request is not None
    return control, request


class TestTold:
    def test_once_at_the_deadline_and_not_before(self, desk: Desk) -> None:
        with desk.working() as store:
            _, asked = ask(desk, store)
            desk.clock.now = asked.created_at + DEADLINE - 1
            desk.deliver(
                store, alert("Other")
            )  # the worker has looked once more when it is handled
            desk.deliver(store, alert("Other"))
            assert overdue(desk) == []
            desk.clock.now += 1
            (message,) = wait_for(lambda: overdue(desk), "the message")
            assert json.loads(message["content"])["request"]["id"] == asked.id
            desk.clock.now += 86_400
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
        with desk.working() as store:
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
        assert len(overdue(desk)) == 1

    def test_a_drill_is_told_to_nobody_and_blocks_nothing(self, desk: Desk) -> None:
        """Neither that it stays open nor what came of it; whoever began it says so."""
        with desk.working() as store:
            control = register(desk.runs)
            desk.deliver(store, alert("ActDrill"))
            asked = control.open_request("drill")
            assert asked is not None
            desk.clock.now += 10 * DEADLINE
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert())
            assert control.open_request("recover") is not None
            assert [r["action"] for r in desk.rows("SELECT action FROM requests")] == [
                "drill",
                "recover",
            ]
            control.answer(answer_to(asked))
            wait_for(
                lambda: desk.rows(
                    "SELECT 1 FROM requests WHERE action = 'drill' AND result IS NOT NULL"
                ),
                "the answer",
            )
        assert desk.rows("SELECT * FROM messages") == []

    def test_an_answer_in_time_is_all_that_is_told(self, desk: Desk) -> None:
        with desk.working() as store:
            control, asked = ask(desk, store)
            control.answer(answer_to(asked))
            wait_for(lambda: desk.rows("SELECT 1 FROM requests WHERE result = 'done'"), "it")
            desk.clock.now += 2 * DEADLINE
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
        assert overdue(desk) == []

    def test_a_late_answer_is_told_too(self, desk: Desk) -> None:
        with desk.working() as store:
            control, asked = ask(desk, store)
            desk.clock.now += DEADLINE
            wait_for(lambda: overdue(desk), "the message")
            control.answer(answer_to(asked))
            wait_for(lambda: desk.rows("SELECT 1 FROM messages WHERE kind = 'outcome'"), "it")

    @pytest.mark.parametrize("action", ["recover", "checkpoint"])
    def test_in_both_languages(self, action: Any) -> None:
        request = Request(
            id="1-a", run="gpt\n2", generation=0, action=action, alert="ActX", created_at=1.0
        )
        english, chinese = (of_overdue(request, 601, language) for language in ("en", "zh"))
        assert english.title.startswith("run gpt 2 was asked ")
        assert "10 min ago" in english.title
        assert "Asked for by ActX." in english.summary
        assert "gpt 2" in chinese.title
        assert "10 分钟前" in chinese.title
        assert not any(word in "".join(chinese.lines()) for word in ("trainer", "request"))


class TestCommand:
    def test_is_run_once_with_the_request_in_its_environment(self, desk: Desk) -> None:
        name = 'team/a "b"; rm -rf $HOME'
        folder = desk.folder / "calls"
        desk.keys["escalate"] = tuple(writes_down(folder))
        with desk.working() as store:
            _, asked = ask(desk, store, name)
            desk.clock.now += DEADLINE
            wait_for(lambda: desk.rows("SELECT 1 FROM requests WHERE escalation != ''"), "it")
            desk.clock.now += DEADLINE
            desk.deliver(store, alert("Other"))
        with desk.working() as store:
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
        (call,) = folder.iterdir()
        arguments, told = json.loads(call.read_text())
        assert arguments == ["a b", "$(id)"]
        assert told == {"ACT_RUN": name, "ACT_ACTION": "recover", "ACT_REQUEST": asked.id}
        (row,) = desk.rows("SELECT * FROM requests")
        assert row["escalation"] == f"{sys.executable} ended with 0"
        assert row["escalated_at"] >= row["overdue_at"]

    def test_begun_before_a_crash_it_is_not_run_again(self, desk: Desk) -> None:
        with desk.working() as store:
            _, asked = ask(desk, store)
            desk.clock.now += DEADLINE
            wait_for(lambda: overdue(desk), "the message")
            store.begin_escalation(asked.id, desk.clock())
        folder = desk.folder / "calls"
        desk.keys["escalate"] = tuple(writes_down(folder))
        with desk.working() as store:
            desk.deliver(store, alert("Other"))
            desk.deliver(store, alert("Other"))
        assert list(folder.iterdir()) == []

    def test_told_before_a_crash_it_is_run_by_the_next_process(self, desk: Desk) -> None:
        with desk.working() as store:
            ask(desk, store)
            desk.clock.now += DEADLINE
            wait_for(lambda: overdue(desk), "the message")
        folder = desk.folder / "calls"
        desk.keys["escalate"] = tuple(writes_down(folder))
        with desk.working():
            wait_for(lambda: list(folder.iterdir()), "the call")
        assert len(overdue(desk)) == 1

    def test_one_that_hangs_delays_no_other_runs_rollback(self, desk: Desk) -> None:
        desk.keys["escalate"] = ("sleep", "120")  # `ask` does not wait for so long
        with desk.working() as store:
            ask(desk, store, "first")
            desk.clock.now += DEADLINE
            wait_for(lambda: desk.rows("SELECT 1 FROM requests WHERE escalated_at > 0"), "it")
            ask(desk, store, "second")


class TestRun:
    def test_a_failure_is_said_with_its_words(self) -> None:
        command = ("sh", "-c", "echo 'no such' >&2; echo job >&2; exit 3")
        assert run(command, {}, 10) == "sh ended with 3: no such job"

    def test_a_program_that_is_not_there(self) -> None:
        assert "none-such could not be started: [Errno 2]" in run(("/none-such",), {}, 10)

    def test_over_its_limit_it_is_killed_with_its_children(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        script = f"sleep 300 & echo $! > {pids}; wait"
        assert "did not end within 0.5 s and was killed" in run(("sh", "-c", script), {}, 0.5)

        def is_gone() -> bool:
            # One that is killed may still be a zombie of whoever adopts it.
            stat = Path(f"/proc/{int(pids.read_text())}/stat")
            return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

        wait_for(is_gone, "the child's end")

    def test_what_it_leaves_running_is_neither_waited_for_nor_killed(self, tmp_path: Path) -> None:
        """A script that starts the trainer again in the background."""
        pids = tmp_path / "pids"
        script = f"sleep 300 & echo $! > {pids}"
        assert run(("sh", "-c", script), {}, 30) == "sh ended with 0"
        os.kill(int(pids.read_text()), 9)  # raises where it is gone

    def test_no_name_breaks_the_environment(self) -> None:
        odd = Request(**{**{f: getattr(REQUEST, f) for f in REQUEST.__slots__}, "run": "a\0=b\n"})
        assert environment(odd)["ACT_RUN"] == "a=b\n"
        assert run(("true",), environment(odd), 10) == "true ended with 0"


def test_through_the_real_receiver(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    register(tmp_path / "runs")
    keys = {"request_deadline_seconds": 0.2, "escalate": writes_down(folder)}
    with (
        FeishuBot().serving() as bot,
        receiving(tmp_path, keys=keys, feishu=bot) as receiver,
    ):
        assert receiver.post(text(alert())).status_code == 202
        wait_for_messages(bot, 1)
        assert "does not do it" in bot.texts()[0]
        (call,) = wait_for(lambda: list(folder.iterdir()), "the call")
        wait_for(call.read_text, "its content")
        wait_for(lambda: "was escalated: " in receiver.server.log.read_text(), "the log")
