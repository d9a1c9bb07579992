"""The receiver under faults: one open request an incident, nothing acknowledged lost, people told.

Where each fault is shown:

| fault | test |
|---|---|
| killed before the commit, before the answer, before, at and after the request | TestKilled, here |
| the same of a message to people | TestKilled, here |
| killed right after its answer, and under load | test_receiver: TestCrashes |
| killed while a message is sent, between two attempts, under load | test_messages: TestKilled |
| what each crash leaves behind, by hand, two runs in one delivery | test_worker: TestCrashes |
| killed while the guard acts; Alertmanager killed | tests/integration/test_servers_restarted |
| the trainer killed | tests/integration/test_trainer_crash, tests/alerting/recovery/test_kill |
| the receiver down for 50 attempts of Alertmanager | TestAway, here |
| a slow receiver, cut and called again | TestAway, here |
| two Alertmanagers, one receiver: the trainer | TestTwo, here |
| two Alertmanagers, one receiver: people | test_messages: TestAlertmanager |
| two receivers over one runs folder, each told once | test_receiver: TestCrashes |
| two receivers, each with an Alertmanager, until the guard's answer | TestTwo, here |
| two receivers with a folder in common: killed at each step of a claim, it away | test_claims |
| two of each server, any of them killed, with a real trainer | tests/integration/test_two_of_each |
| of many who claim at once one wins | test_control: TestClaim |
| database locked: the answer is 503 | test_receiver: TestItsOwnState; test_messages |
| database locked: Alertmanager goes on until it is taken; between request and record | TestDisk |
| database locked when a message was sent | test_messenger |
| disk full: SQLite's own limit | test_store |
| disk full: no file of the process grows (RLIMIT_FSIZE), before the answer and after | TestDisk |
| control directory closed: a file in its place, for root too, so no mount is needed | TestDisk |
| the same, without processes | test_worker: TestDecisions |
| clock set back: backups, requests, messages | TestClock, here |
| clock set back: a message that was put off, copies | test_messenger |
| 1,000 alerts in one group, posted | test_receiver, test_messages |
| 1,000 alerts in one group, by Alertmanager, whole | TestStorm, here |

A disk is full here for the receiver's process alone: the kernel refuses to let any of its files
grow, with EFBIG where a full disk has ENOSPC. A real one would need a mount.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from alerting.control import ControlDirectory, Request
from alerting.files import write_atomically
from deploy.demo.servers import Server, binary, free_port, running, wait_for
from deploy.demo.stack import render_alertmanager
from tests.alerting.bots import Bot, FeishuBot
from tests.alerting.deliveries import RUN, alert, register, status
from tests.alerting.faulty import DEATHS, LOCK, SLOW_SECONDS
from tests.alerting.test_alertmanager import alert as shipped
from tests.alerting.test_alertmanager import shipped_routes
from tests.alerting.test_control import answer_to
from tests.alerting.test_messages import receiving, tell, wait_for_messages
from tests.alerting.test_receiver import CHECKPOINT, TIMEOUT, Receiver, open_ids

FAULTY = "tests.alerting.faulty"
UNANSWERED = ("before-commit", "after-commit", "message-before-commit", "message-after-commit")
"""Deaths that leave Alertmanager without an answer; it sends the same again."""


@dataclass
class Alertmanager:
    """A real one that delivers to a receiver by the shipped configuration, with shorter times."""

    server: Server
    url: str

    def fire(self, *alerts: dict[str, Any]) -> None:
        starts = datetime.now(UTC).isoformat()
        requests.post(
            f"{self.url}/api/v2/alerts",
            json=[{"startsAt": starts} | content for content in alerts],
            timeout=TIMEOUT,
        ).raise_for_status()

    def attempts(self, *, failed: bool = False) -> float:
        """How often it has called the receiver, or has called it in vain."""
        name = f"alertmanager_notification_requests_{'failed_' if failed else ''}total"
        page = requests.get(f"{self.url}/metrics", timeout=TIMEOUT).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and sample.labels["integration"] == "webhook"
        )


@contextlib.contextmanager
def alertmanager(
    folder: Path, port: int, name: str = "alertmanager", **changes: Any
) -> Iterator[Alertmanager]:
    """One that posts to the receiver at `port`, for the trainer and for people.

    Args:
        folder: has the receiver's token.
        port: the receiver's.
        name: of the server.
        changes: to both routes where they have such a key, else to both webhooks.
    """
    config = render_alertmanager({"receiver": port}, folder / "token", folder / "chat", bots=True)
    parent, trainer = shipped_routes(config)
    parent |= {"group_wait": "300ms", "group_interval": "1s", "repeat_interval": "1h"}
    trainer |= {"group_interval": "1s", "repeat_interval": "1h"}
    for route in (parent, trainer):
        route |= {key: value for key, value in changes.items() if key in route}
    for receiver in config["receivers"]:
        receiver.pop("slack_configs", None)
        for webhook in receiver.get("webhook_configs", []):
            webhook |= {key: value for key, value in changes.items() if key not in trainer}
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(config))
    own = free_port()
    argv: list[str | Path] = [
        binary("alertmanager"),
        f"--config.file={path}",
        f"--storage.path={folder / f'{name}-data'}",
        f"--web.listen-address=127.0.0.1:{own}",
        "--cluster.listen-address=",
    ]
    with running(name, argv, folder) as server:
        url = f"http://127.0.0.1:{own}"
        server.wait_for(lambda: requests.get(f"{url}/-/ready", timeout=30).ok, "readiness")
        yield Alertmanager(server, url)


def port_of(receiver: Receiver) -> int:
    return int(receiver.address.rpartition(":")[2])


def wait_for_request(control: ControlDirectory) -> Request:
    asked = wait_for(lambda: control.open_request("recover"), "a request")
    assert asked is not None
    return asked


def wait_until_handled(receiver: Receiver, count: int) -> None:
    """Until at least so many deliveries are recorded, and all of them are handled."""
    wait_for(
        lambda: (
            (found := receiver.rows("SELECT handled_at FROM deliveries"))
            and len(found) >= count
            and all(row["handled_at"] for row in found)
        ),
        f"{count} handled deliveries",
    )


def is_about(bot: Bot, part: str) -> int:
    """How many messages of the group have these words."""
    return sum(part in seen for seen in bot.texts())


def open_kinds(control: ControlDirectory) -> list[str]:
    """Requests that the guard would find; not what a death at the link has left beside one."""
    return [path.name for path in control.path.glob("requests/*.json")]


def finish(receiver: Receiver, control: ControlDirectory, bot: Bot) -> None:
    """The incident to its end: one open request, known by its id, answered, and told once."""
    asked = wait_for_request(control)
    assert open_kinds(control) == ["recover.json"]
    wait_for(
        lambda: receiver.rows("SELECT id FROM requests WHERE claimed_at IS NOT NULL"), "its record"
    )
    assert [row["id"] for row in receiver.rows("SELECT id FROM requests")] == [asked.id]
    # Alertmanager's next repeat makes no second.
    (repeat,) = receiver.decisions(receiver.deliver(alert()))
    assert (repeat["outcome"], repeat["request_id"]) == ("open", asked.id)
    control.publish(status(generation=1, rollbacks_left=2))
    control.answer(answer_to(asked))
    wait_for(lambda: is_about(bot, "run gpt was rolled back"), "the outcome")
    # What comes later is told after it, so nothing else was waiting to be told.
    tell(receiver, "later")
    wait_for(lambda: is_about(bot, "run later"), "a later message")
    assert is_about(bot, "run gpt was rolled back") == 1
    assert [row["result"] for row in receiver.rows("SELECT result FROM requests")] == ["done"]
    assert open_kinds(control) == []


def wait_for_death(receiver: Receiver) -> None:
    assert receiver.server.process is not None
    assert receiver.server.process.wait(TIMEOUT) == -signal.SIGKILL


class TestKilled:
    @pytest.mark.parametrize(
        "step", [step for step in DEATHS if "message" not in step and "outcome" not in step]
    )
    def test_a_delivery_becomes_one_request_wherever_it_is_killed(
        self, tmp_path: Path, step: str
    ) -> None:
        control = register(tmp_path / "runs")
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, module=(FAULTY, step), feishu=bot) as first:
                if step in UNANSWERED:
                    with pytest.raises(requests.ConnectionError):
                        first.deliver(alert())
                else:
                    first.deliver(alert())
                wait_for_death(first)
            with receiving(tmp_path, feishu=bot) as second:
                if step in UNANSWERED:
                    second.deliver(alert())
                wait_until_handled(second, 1)
                finish(second, control, bot)

    @pytest.mark.parametrize("step", ["before-outcome", "after-outcome"])
    def test_the_guards_answer_is_told_once(self, tmp_path: Path, step: str) -> None:
        control = register(tmp_path / "runs")
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, module=(FAULTY, step), feishu=bot) as first:
                first.deliver(alert())
                asked = wait_for_request(control)
                control.answer(answer_to(asked))
                wait_for_death(first)
            with receiving(tmp_path, feishu=bot) as second:
                wait_for(lambda: is_about(bot, "run gpt was rolled back"), "the outcome")
                tell(second, "later")
                wait_for(lambda: is_about(bot, "run later"), "a later message")
                (row,) = second.rows("SELECT id, result FROM requests")
        assert is_about(bot, "run gpt was rolled back") == 1
        assert (row["id"], row["result"]) == (asked.id, "done")
        assert open_ids(control) == []

    @pytest.mark.parametrize("step", [step for step in DEATHS if "message" in step])
    def test_people_are_told_wherever_it_is_killed(self, tmp_path: Path, step: str) -> None:
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, module=(FAULTY, step), feishu=bot) as first:
                if step in UNANSWERED:
                    with pytest.raises(requests.ConnectionError):
                        tell(first)
                else:
                    tell(first)
                wait_for_death(first)
            with receiving(tmp_path, feishu=bot) as second:
                if step in UNANSWERED:
                    tell(second)
                tell(second, "later")
                wait_for(lambda: is_about(bot, "run later"), "a later message")
                assert len(second.rows("SELECT * FROM messages")) == 2
        # At least once: only what was sent and not yet recorded as such is sent again.
        assert is_about(bot, "1 firing: run gpt") == (2 if step == "message-after-sending" else 1)


class TestAway:
    def test_fifty_attempts_in_vain_and_then_each_incident_once(self, tmp_path: Path) -> None:
        """Eight runs: Alertmanager waits longer after each attempt for the same group."""
        runs = [f"run-{number}." for number in range(8)]
        controls = [register(tmp_path / "runs", folder=run, run=run) for run in runs]
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                port = port_of(first)
            with alertmanager(tmp_path, port) as sender:
                sender.fire(*(shipped("ActRunaway", run=run) for run in runs))
                wait_for(lambda: sender.attempts(failed=True) >= 50, "50 attempts in vain")
                assert bot.posts == []
                with receiving(tmp_path, port=port, feishu=bot) as second:
                    for run, control in zip(runs, controls, strict=True):
                        wait_for_request(control)
                        wait_for(lambda run=run: is_about(bot, f"run {run}"), f"word of {run}")
                    wait_until_handled(second, len(runs))
                    made = {row["run"] for row in second.rows("SELECT run FROM requests")}
                    assert made == set(runs)
                    assert len(second.rows("SELECT id FROM requests")) == len(runs)
                    assert len(second.rows("SELECT id FROM messages")) == len(runs)
        assert len(bot.taken) == len(runs)

    def test_a_slow_one_is_cut_and_called_again_and_asks_once(self, tmp_path: Path) -> None:
        """The second call comes while the first one's handler still runs."""
        control = register(tmp_path / "runs")
        begun = time.monotonic()
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, module=(FAULTY, "slow"), feishu=bot) as receiver,
            alertmanager(tmp_path, port_of(receiver)) as sender,
        ):
            sender.fire(shipped("ActRunaway", run=RUN))
            # Recorded, so acted upon and told, though it has no answer yet.
            wait_for_request(control)
            wait_for_messages(bot, 1)
            wait_for(
                lambda: receiver.metric("act_webhook_deliveries_total", code="202") == 4,
                "both notifications to be answered twice",
            )
            assert time.monotonic() - begun > SLOW_SECONDS  # the first two, cut long ago
            assert len(receiver.rows("SELECT id FROM deliveries")) == 2
            assert len(receiver.rows("SELECT id FROM messages")) == 1
            finish(receiver, control, bot)
            assert "Traceback" not in receiver.server.log.read_text()
        assert is_about(bot, "1 firing: run gpt") == 1


class TestTwo:
    def test_two_alertmanagers_ask_the_trainer_once(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
            alertmanager(tmp_path, port_of(receiver), "left") as left,
            alertmanager(tmp_path, port_of(receiver), "right") as right,
        ):
            starts = datetime.now(UTC).isoformat()
            for sender in (left, right):
                sender.fire(shipped("ActRunaway", run=RUN) | {"startsAt": starts})
            wait_until_handled(receiver, 2)
            wait_for(
                lambda: receiver.metric("act_webhook_deliveries_total", code="202") == 4,
                "four notifications",
            )
            outcomes = receiver.rows("SELECT outcome FROM decisions")
            assert sorted(row["outcome"] for row in outcomes) == ["open", "requested"]
            finish(receiver, control, bot)
        assert is_about(bot, "1 firing: run gpt") == 1

    def test_two_receivers_with_an_alertmanager_each_ask_once_and_one_tells_the_outcome(
        self, tmp_path: Path
    ) -> None:
        runs = tmp_path / "runs"
        control = register(runs)
        folders = [tmp_path / "left", tmp_path / "right"]
        with FeishuBot().serving() as bot, contextlib.ExitStack() as opened:
            pair, senders = [], []
            for folder in folders:
                folder.mkdir()
                pair.append(opened.enter_context(receiving(folder, runs=runs, feishu=bot)))
                senders.append(opened.enter_context(alertmanager(folder, port_of(pair[-1]))))
            for sender in senders:
                sender.fire(shipped("ActRunaway", run=RUN))
            for receiver in pair:
                wait_until_handled(receiver, 1)
            asked = wait_for_request(control)
            assert open_ids(control) == ["recover.json"]
            made = [row["id"] for one in pair for row in one.rows("SELECT id FROM requests")]
            assert made == [asked.id]
            control.answer(answer_to(asked))
            wait_for(lambda: is_about(bot, "run gpt was rolled back"), "the outcome")
            for receiver in pair:
                tell(receiver, receiver.database.parent.name)
            for folder in folders:
                wait_for(lambda name=folder.name: is_about(bot, f"run {name}"), "a later message")
        assert is_about(bot, "run gpt was rolled back") == 1
        # Without a folder in common they know nothing of each other, so the alert is told by both.
        assert is_about(bot, "1 firing: run gpt") == 2


@contextlib.contextmanager
def locked(receiver: Receiver) -> Iterator[None]:
    """Another process writes to the database and does not come to an end."""
    argv = [sys.executable, "-c", LOCK, str(receiver.database), "600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            process.kill()


def set_largest_file(receiver: Receiver, size: int) -> None:
    assert receiver.server.process is not None
    pid = receiver.server.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))


@contextlib.contextmanager
def full(receiver: Receiver) -> Iterator[None]:
    """No file of the receiver's can grow: database, requests, log."""
    set_largest_file(receiver, 1)
    try:
        yield
    finally:
        set_largest_file(receiver, -1)


class TestDisk:
    @pytest.mark.parametrize("broken", [locked, full])
    def test_what_cannot_be_recorded_is_sent_again_until_it_is(
        self, tmp_path: Path, broken: Callable[[Receiver], Any]
    ) -> None:
        control = register(tmp_path / "runs")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
            alertmanager(tmp_path, port_of(receiver)) as sender,
        ):
            with broken(receiver):
                sender.fire(shipped("ActRunaway", run=RUN))
                wait_for(lambda: sender.attempts(failed=True) >= 2, "both attempts in vain")
                ready = requests.get(f"{receiver.address}/readyz", timeout=TIMEOUT)
                assert ready.status_code == 503
                assert receiver.metric("act_webhook_deliveries_total", code="202") == 0
                assert open_ids(control) == []
                assert bot.posts == []
            wait_for_request(control)
            wait_for_messages(bot, 1)
            ready = requests.get(f"{receiver.address}/readyz", timeout=TIMEOUT)
            assert ready.status_code == 200
            finish(receiver, control, bot)
        assert is_about(bot, "1 firing: run gpt") == 1

    def test_full_after_the_answer_it_asks_when_there_is_room(self, tmp_path: Path) -> None:
        """Nobody sends an acknowledged delivery again, so the receiver must come back to it."""
        control = register(tmp_path / "runs")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, module=(FAULTY, "full"), feishu=bot) as receiver,
        ):
            receiver.deliver(alert())
            wait_for(
                lambda: (
                    requests.get(f"{receiver.address}/readyz", timeout=TIMEOUT).status_code == 503
                ),
                "a full disk",
            )
            assert open_kinds(control) == []
            set_largest_file(receiver, -1)
            finish(receiver, control, bot)

    def test_locked_between_the_request_and_its_record(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        module = (FAULTY, f"locked={tmp_path / 'receiver.sqlite'}")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, module=module, feishu=bot) as receiver,
        ):
            receiver.deliver(alert())
            asked = wait_for_request(control)
            wait_until_handled(receiver, 1)
            assert control.open_request("recover") == asked
            assert "It is tried again" in receiver.server.log.read_text()
            finish(receiver, control, bot)

    def test_a_closed_control_directory_is_asked_at_alertmanagers_next_repeat(
        self, tmp_path: Path
    ) -> None:
        control = register(tmp_path / "runs")
        folder = control.path / "requests"
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
            alertmanager(tmp_path, port_of(receiver), repeat_interval="1s") as sender,
        ):
            folder.rmdir()
            folder.touch()
            sender.fire(shipped("ActRunaway", run=RUN))
            wait_until_handled(receiver, 2)
            outcomes = receiver.rows("SELECT DISTINCT outcome FROM decisions")
            assert outcomes == [{"outcome": "failed"}]
            # People hear of the alert all the same, once.
            wait_for_messages(bot, 1)
            folder.unlink()
            folder.mkdir()
            asked = wait_for_request(control)
            before = len(receiver.rows("SELECT id FROM deliveries"))
            wait_until_handled(receiver, before + 1)
            assert control.open_request("recover") == asked
            sender.server.stop()
            finish(receiver, control, bot)
        assert is_about(bot, "1 firing: run gpt") == 1


class TestClock:
    def test_set_back_it_holds_nothing_back_and_asks_nothing_twice(self, tmp_path: Path) -> None:
        offset = tmp_path / "offset"
        offset.write_text("0")
        control = register(tmp_path / "runs")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, module=(FAULTY, f"clock={offset}"), feishu=bot) as receiver,
        ):
            tell(receiver)
            receiver.decisions(receiver.deliver(alert()))
            asked = wait_for_request(control)
            # Whole at any moment, since the receiver reads it all the time.
            write_atomically(offset, "-86400", durable=False)
            (repeat,) = receiver.decisions(receiver.deliver(alert()))
            assert (repeat["outcome"], repeat["request_id"]) == ("open", asked.id)
            # A backup of tomorrow keeps nobody from one today.
            control.publish(status(last_backup_at=time.time() - 60))
            (backup,) = receiver.decisions(receiver.deliver(CHECKPOINT))
            assert backup["outcome"] == "requested"
            tell(receiver, "at-once")
            wait_for(lambda: is_about(bot, "run at-once"), "a message after the change")
            control.answer(answer_to(asked))
            wait_for(lambda: is_about(bot, "run gpt was rolled back"), "the outcome")
            (row,) = receiver.rows("SELECT result FROM requests WHERE action = 'recover'")
            assert row["result"] == "done"
        assert is_about(bot, "1 firing: run gpt") == 1
        assert open_ids(control) == ["checkpoint.json"]


class TestStorm:
    def test_a_thousand_alerts_whole_are_one_request_and_one_message(self, tmp_path: Path) -> None:
        """`max_alerts` off, as in a configuration of one's own."""
        control = register(tmp_path / "runs")
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
            alertmanager(
                tmp_path, port_of(receiver), max_alerts=0, group_wait="5s", group_interval="5s"
            ) as sender,
        ):
            storm = (
                alert(layer=f"model.layers.{number}.mlp.down_proj.output") for number in range(1000)
            )
            sender.fire(*({key: one[key] for key in ("labels", "annotations")} for one in storm))
            wait_for_request(control)
            wait_until_handled(receiver, 1)
            (row,) = receiver.rows("SELECT payload FROM deliveries")
            assert len(json.loads(row["payload"])["alerts"]) == 1000
            assert len(row["payload"]) > 302_000
            wait_for_messages(bot, 1)
            finish(receiver, control, bot)
        assert is_about(bot, "1000 firing: run gpt") == 1
