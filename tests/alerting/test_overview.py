"""What people see of each run: `act-alerting status`, and `GET /runs/{run}` of a real receiver."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from alerting.control import ControlDirectory
from alerting.overview import Overview
from alerting.table import COLUMNS, ago, print_runs
from deploy.demo.servers import wait_for
from tests.alerting.bots import FeishuBot
from tests.alerting.deliveries import alert, register, status, text
from tests.alerting.test_cli import COMMAND, run
from tests.alerting.test_control import answer_to
from tests.alerting.test_messages import receiving as telling
from tests.alerting.test_messages import tell
from tests.alerting.test_receiver import TIMEOUT, TOKEN, Receiver, receiving


def get(receiver: Receiver, name: str, token: str = TOKEN) -> requests.Response:
    return requests.get(
        f"{receiver.address}/runs/{name}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=TIMEOUT,
    )


def printed(receiver: Receiver) -> list[dict[str, str]]:
    """The rows of `act-alerting status`, by column."""
    answer = run("status", "--runs", receiver.runs, "--database", receiver.database)
    assert answer.returncode == 0, answer.stderr
    header, *lines = answer.stdout.splitlines()
    assert header.split("\t") == list(COLUMNS)
    return [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]


class TestBoth:
    def test_a_run_from_request_to_answer(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs", step=1200, rollbacks_left=3)
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            (row,) = printed(receiver)
            assert row["run"] == "gpt"
            assert row["state"].startswith("running, ")
            assert (row["step"], row["generation"], row["rollbacks left"]) == ("1200", "0", "3")
            assert {row["open request"], row["last decision"], row["last answer"]} == {"-"}
            assert get(receiver, "gpt").json()["last_decision"] is None

            receiver.decisions(receiver.deliver(alert()))
            (row,) = printed(receiver)
            assert row["open request"].startswith("recover, ")
            assert row["last decision"].startswith("recover requested, ")
            content = get(receiver, "gpt").json()
            assert content["state"] == "running"
            (asked,) = content["open_requests"]
            assert (asked["action"], asked["alert"]) == ("recover", "ActRunaway")
            assert content["last_decision"]["request_id"] == asked["id"]
            assert content["messages"] == {"waiting": 0, "failed": 0}

            request = control.open_request("recover")
            assert request is not None
            control.publish(status(generation=1, step=1000, rollbacks_left=2))
            control.answer(answer_to(request))
            wait_for(lambda: get(receiver, "gpt").json()["last_answer"], "the answer")
            (row,) = printed(receiver)
            assert row["open request"] == "-"
            assert row["last answer"].startswith("recover done at step 1300, ")
            assert (row["generation"], row["rollbacks left"]) == ("1", "2")

    def test_messages_are_counted_by_run(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        register(tmp_path / "runs", folder="other", run="other")
        with (
            FeishuBot(answers=[(503, {}, b"")] * 50).serving() as bot,
            telling(tmp_path, feishu=bot) as receiver,
        ):
            tell(receiver, "other")
            wait_for(lambda: bot.posts, "the first attempt")
            assert [row["messages"] for row in printed(receiver)] == ["-", "1 waiting, 0 failed"]
            assert get(receiver, "other").json()["messages"] == {"waiting": 1, "failed": 0}
            assert get(receiver, "gpt").json()["messages"] == {"waiting": 0, "failed": 0}

    def test_messages_that_were_given_up_are_counted(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        with (
            FeishuBot(secret="SECother").serving() as bot,
            telling(tmp_path, feishu=bot) as receiver,
        ):
            tell(receiver)
            wait_for(
                lambda: [row["messages"] for row in printed(receiver)] == ["0 waiting, 1 failed"],
                "the failure to be shown",
            )

    def test_messages_of_no_run_have_a_line_of_their_own(self, tmp_path: Path) -> None:
        with (
            FeishuBot(answers=[(503, {}, b"")] * 50).serving() as bot,
            telling(tmp_path, feishu=bot) as receiver,
        ):
            group = text(alert("ActExporterDown", run=None), groupLabels={}, commonLabels={})
            headers = {"Authorization": f"Bearer {TOKEN}"}
            url = f"{receiver.address}/messages"
            assert requests.post(url, group, headers=headers, timeout=TIMEOUT).status_code == 202
            answer = run("status", "--config", tmp_path / "receiver.yml")
            assert answer.stdout.splitlines()[1:] == ["messages of no run: 1 waiting, 0 failed"]


class TestGet:
    def test_needs_the_token(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            for name in ("gpt", "unknown"):
                response = get(receiver, name, f"{TOKEN}x")
                assert response.status_code == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"

    @pytest.mark.parametrize(
        "name",
        ["unknown", "..", "../runs/gpt-2026", "gpt-2026", "/etc/passwd", "gpt\0", "*", "", "名"],
    )
    def test_a_name_is_compared_and_never_a_path(self, tmp_path: Path, name: str) -> None:
        register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            assert get(receiver, quote(name, safe="")).status_code == 404

    def test_any_name_that_a_guard_published_is_found(self, tmp_path: Path) -> None:
        name = "team/a 名?#%2F"
        register(tmp_path / "runs", run=name)
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            assert get(receiver, quote(name, safe="")).json()["run"] == name

    def test_two_live_folders_of_one_name_are_said(self, tmp_path: Path) -> None:
        for folder in ("one", "two"):
            register(tmp_path / "runs", folder=folder)
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            response = get(receiver, "gpt")
            assert response.status_code == 409
            assert "both say that they are the live run" in response.json()["detail"]


class TestCommand:
    def test_works_while_no_receiver_runs(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            receiver.decisions(receiver.deliver(alert()))
        (row,) = printed(receiver)
        assert row["last decision"].startswith("recover requested, ")

    def test_what_is_wrong_with_a_run_is_a_line_and_hides_no_other(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        broken = register(tmp_path / "runs", folder="broken", run="broken")
        (broken.path / "status.json").write_text("{")
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            pass
        answer = run("status", "--runs", receiver.runs, "--database", receiver.database)
        assert answer.returncode == 0
        _, row, problem = answer.stdout.splitlines()
        assert row.startswith("gpt\t")
        assert f"{broken.path / 'status.json'} cannot be read" in problem

    def test_before_the_first_start_it_says_so(self, tmp_path: Path) -> None:
        answer = run("status", "--runs", tmp_path, "--database", tmp_path / "none.sqlite")
        assert answer.returncode == 1
        assert "No receiver has run yet: there is no database" in answer.stderr
        assert not (tmp_path / "none.sqlite").exists()

    def test_a_file_that_is_no_such_database(self, tmp_path: Path) -> None:
        (tmp_path / "some").write_text("no database\n" * 100)
        answer = run("status", "--runs", tmp_path, "--database", tmp_path / "some")
        assert answer.returncode == 1
        assert "Could not read" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_needs_neither_token_nor_bots(self, tmp_path: Path) -> None:
        run("init", tmp_path, "--bot", "feishu")
        (tmp_path / "receiver-token").unlink()
        answer = run("status", "--config", tmp_path / "receiver.yml")
        assert "No receiver has run yet" in answer.stderr

    def test_in_a_terminal_it_is_a_table(self, tmp_path: Path) -> None:
        register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as receiver:
            pass
        master, slave = pty.openpty()
        argv = [COMMAND, "status", "--runs", receiver.runs, "--database", receiver.database]
        environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "TERM": "xterm"}
        subprocess.run(argv, stdout=slave, env=environment, timeout=60, check=True)
        os.close(slave)
        shown = os.read(master, 65_536).decode()
        os.close(master)
        shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
        assert "┃ run" in shown
        assert "│ gpt" in shown


class TestTable:
    def test_a_hostile_name_steers_nothing(self) -> None:
        name = "gpt\x1b[2J\n[red]x\tgone"
        overview = Overview(
            status=status(run=name),
            requests=(),
            decision=None,
            answer=None,
            waiting=0,
            failed=0,
        )
        out = io.StringIO()
        print_runs([overview], time.time(), out)
        _, row = out.getvalue().splitlines()
        assert row.split("\t")[0] == "gpt [2J [red]x gone"

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(-5, "now"), (0.4, "now"), (59, "59 s ago"), (150, "2 min ago"), (7200, "2 h ago")],
    )
    def test_ages(self, seconds: float, words: str) -> None:
        assert ago(seconds) == words


def test_a_mangled_request_is_said_and_not_hidden(tmp_path: Path) -> None:
    control: ControlDirectory = register(tmp_path / "runs")
    (control.path / "requests" / "recover.json").write_text("{")
    with receiving(tmp_path, tmp_path / "runs") as receiver:
        assert get(receiver, "gpt").status_code == 409
